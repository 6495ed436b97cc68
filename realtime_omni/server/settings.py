"""What the server needs to know before it listens: one frozen value, derived from the configuration.

Owns the limits of the listening side and their reasons. Knows no socket and no session.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from realtime_omni.config import STALLED_INPUT_DEFAULT_S, Config
from realtime_omni.errors import ConfigError

_HOST_AND_PORT = re.compile(r"(\[(?P<bracketed>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(:[0-9]*)?")
_ORIGIN = re.compile(r"null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#*\s]+/?")
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits and access rules of one server.

    Args:
        api_key: what a client must present, or None for an open (loopback) server. Never printed.
        origins: web origins (``https://example.org``) that may connect besides the server's own.
        allowed_hosts: names that a ``Host`` header may carry, without port; None accepts any (a key protects then).
        grace_s: how long a session outlives its socket.
        stall_timeout_s: how long a client with frames outstanding may make no progress.
        stalled_input_s: how long an attached client may say nothing but pings; 0 is off.
        max_message_bytes: size of ``session.start`` (it may carry a picture); later messages have the protocol's bound.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    openpi_port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    origins: tuple[str, ...] = ()
    allowed_hosts: frozenset[str] | None = LOOPBACK_HOSTS
    grace_s: float = 30.0
    stall_timeout_s: float = 60.0
    stalled_input_s: float = STALLED_INPUT_DEFAULT_S
    max_message_bytes: int = 4 * 1024 * 1024
    handshake_timeout_s: float = 10.0
    send_timeout_s: float = 20.0
    """A socket that takes no byte for this long is lost, whatever its pings say."""
    max_connections: int = 256
    max_events_per_s: float = 120.0
    """Two keyboards at 60 Hz; the burst is one second's worth."""
    max_messages_per_s: float = 500.0
    """Acks, pings and events together; every 64 KiB of a message count as one more."""
    ping_interval_s: float = 20.0
    ping_timeout_s: float = 20.0
    shutdown_timeout_s: float = 10.0
    encode_threads: int | None = None

    @classmethod
    def from_config(cls, config: Config, env: Mapping[str, str] | None = None) -> ServerSettings:
        """Resolve a configuration; the key comes from the environment variable that it names.

        Raises:
            ConfigError: a host beyond loopback without a key, a key that no header can carry, or an origin that is none.
        """
        server = config.server
        key = (os.environ if env is None else env).get(server.api_key_env) or None
        if key is not None and key != key.strip():
            raise ConfigError(
                f"{server.api_key_env}: the key has white space around it, which no client can send",
                path="server.api_key_env",
            )
        for origin in server.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"server.origins: {origin!r} is no origin that a browser sends: write https://game.example, with a"
                    " port where there is one and without a path",
                    path="server.origins",
                )
        loopback = is_loopback(server.host)
        if not loopback and key is None:
            raise ConfigError(
                f"server.host: {server.host} can be reached from other machines, so a key is needed:"
                f" put one into the environment variable {server.api_key_env}, or use 127.0.0.1",
                path="server.host",
            )
        return cls(
            host=server.host,
            port=server.port,
            openpi_port=server.openpi_port,
            api_key=key,
            origins=tuple(origin.rstrip("/").lower() for origin in server.origins),
            allowed_hosts=_allowed_hosts(server.host, server.origins) if loopback else None,
            grace_s=config.session.grace_s,
            stall_timeout_s=server.stall_timeout_s,
            stalled_input_s=server.stalled_input_s,
            max_message_bytes=server.max_message_bytes,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def _allowed_hosts(host: str, origins: tuple[str, ...]) -> frozenset[str]:
    """The loopback names, the bound one, and the hosts of allowed origins (a reverse proxy keeps the public name)."""
    public = {origin.lower().rpartition("://")[2].rstrip("/") for origin in origins}
    return LOOPBACK_HOSTS | {host.lower()} | {strip_port(name) for name in public}


def strip_port(host: str) -> str:
    """``[::1]:8000`` → ``::1``, ``localhost:8000`` → ``localhost``. What is no host with a port stays as it is."""
    found = _HOST_AND_PORT.fullmatch(host)
    return host if found is None else found["bracketed"] or found["name"]
