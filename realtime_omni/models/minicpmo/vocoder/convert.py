"""Once for a checkpoint: the published vocoder into files that the server reads.

    python -m realtime_omni.models.minicpmo.vocoder.convert ./MiniCPM-o-4_5

Reads ``assets/token2wav/flow.pt`` and ``hift.pt`` (``hift_original.pt``, where there is one, is the generator meant) as
tensors and nothing else (``torch.load(weights_only=True)``), writes ``token2wav.safetensors`` beside them; and for
every ``voices/NAME.wav`` a ``voice-NAME.safetensors``, for which the extra ``voice`` (onnxruntime) runs
``campplus.onnx`` and ``speech_tokenizer_v2_25hz.onnx``.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from realtime_omni.errors import ConfigError
from realtime_omni.models.minicpmo.vocoder.sample import sample_of
from realtime_omni.models.minicpmo.vocoder.token2wav import VOICE_FILE
from realtime_omni.models.minicpmo.vocoder.weights import FILE, KINDS, networks_for
from realtime_omni.models.minicpmo.voices import read_voices

FOLDER = Path("assets") / "token2wav"
_NORMALISED = (
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    (".weight_g", ".weight_v"),
)
"""A weight's length and direction, as newer and as older torch name them."""


def convert_weights(folder: Path) -> Path:
    """Write ``token2wav.safetensors`` beside ``flow.pt`` and ``hift.pt``. Raises ConfigError that lists what does not fit."""
    original = folder / "hift_original.pt"
    hift_file = original if original.is_file() else folder / "hift.pt"
    flow = read_tensors(folder / "flow.pt")
    hift = {name.replace("generator.", ""): tensor for name, tensor in read_tensors(hift_file).items()}
    networks = dict(zip(KINDS, (flow, multiplied_out(hift)), strict=True))
    shapes = [{name: tuple(tensor.shape) for name, tensor in each.items()} for each in networks.values()]
    networks_for(shapes[0], shapes[1], 1, f"{folder.name}/flow.pt, {hift_file.name}")
    whole = {f"{kind}.{name}": tensor.contiguous() for kind, each in networks.items() for name, tensor in each.items()}
    if wrong := [name for name, tensor in whole.items() if not bool(tensor.isfinite().all())]:
        raise ConfigError(f"{folder.name}: {wrong[0]} is not finite", path=wrong[0])
    return _written(whole, folder / FILE)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """A pickled state dict, by a reader that makes tensors only; all of it is in the file, byte by byte. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(f"{file.parent.name} lacks {file.name}", path=file.name)
    try:
        swells = zipfile.is_zipfile(file) and _unpacked_bytes(file) > file.stat().st_size
        read = None if swells else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the pickle of somebody else makes of the reader's stack
        raise ConfigError(
            f"{file.name} holds more than tensors, or is damaged: {error}"[:300], path=file.name
        ) from None
    if swells:
        raise ConfigError(f"{file.name} is compressed", path=file.name)
    if not isinstance(read, dict):
        raise ConfigError(f"{file.name} is no dictionary of tensors", path=file.name)
    for name, each in read.items():
        if not isinstance(name, str) or not isinstance(each, Tensor) or not _is_whole(each):
            raise ConfigError(f"{file.name}: {name!r} is no tensor of floating point numbers"[:300], path=file.name)
    return read


def _unpacked_bytes(file: Path) -> int:
    with zipfile.ZipFile(file) as archive:
        return sum(part.file_size for part in archive.infolist())


def _is_whole(tensor: Tensor) -> bool:
    """A view that repeats its numbers may be larger than any memory."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.is_floating_point():
        return False
    return tensor.nbytes <= tensor.untyped_storage().nbytes()


def multiplied_out(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of lengths and directions: direction times length by its norm, a row each."""
    out = dict(stored)
    for length_name, direction_name in _NORMALISED:
        for name in [each for each in stored if each.endswith(direction_name)]:
            base = name.removesuffix(direction_name)
            direction, length = out.pop(name), out.pop(base + length_name, None)
            rows = (*direction.shape[:1], *[1] * (direction.dim() - 1))
            if length is None or not rows or length.shape != rows:
                raise ConfigError(f"{name} has no length beside it, or of another shape", path=name)
            if f"{base}.weight" in out:
                raise ConfigError(f"{base}.weight is there twice", path=name)
            wide = direction.double()
            norm = wide.flatten(1).norm(dim=1).view(rows)
            out[f"{base}.weight"] = (wide * (length.double() / norm)).to(direction.dtype)
    return out


def convert_voices(checkpoint: Path) -> list[Path]:
    """Write ``voice-NAME.safetensors`` for every ``voices/NAME.wav`` of a checkpoint (16-bit mono at 16 kHz, 1 to 30 s). Raises
    ConfigError."""
    files = checkpoint / FOLDER
    sounds = read_voices(checkpoint / "voices")
    if not sounds:
        raise ConfigError(f"{checkpoint.name} lacks voices/NAME.wav: the vocoder speaks in a voice's sample")
    written: list[Path] = []
    for name, sound in sounds.items():
        sample = sample_of(sound, files)
        tensors = {"codes": sample.codes, "mel": sample.mel, "speaker": sample.speaker}
        written.append(_written(tensors, files / VOICE_FILE.format(name)))
    return written


def _written(tensors: Mapping[str, Tensor], path: Path) -> Path:
    """The whole file, or what was there before. Raises ConfigError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(dict(tensors), partial, metadata={"format": "pt"})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path.name} cannot be written: {error}", path=path.name) from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="MiniCPM-o's folder")
    checkpoint = parser.parse_args().checkpoint
    try:
        for path in (convert_weights(checkpoint / FOLDER), *convert_voices(checkpoint)):
            sys.stdout.write(f"wrote {path}\n")
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
