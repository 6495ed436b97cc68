"""What the runner holds of a session, taken apart and put together: keys, values and model state as named CPU tensors.

Owns the copies and the checks of what comes back: names, shapes and dtypes are exactly those that ``take_apart`` makes. Must
not know sessions, files or which state a model has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from msgspec import Struct, field
from torch import Tensor

from realtime_omni.engine.accounting import Storages, storages
from realtime_omni.errors import ArgumentError
from realtime_omni.kv.geometry import WindowGeometry
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.kv.window import FrameRef
from realtime_omni.models.base import PackedState, WorldModel
from realtime_omni.session.values import freeze_json, thaw_json
from realtime_omni.snapshot.header import TENSOR_NAME, StateRecord, WorkerRecord, kv_name, state_prefix


class Moment(Struct, frozen=True):
    """A session at a chunk boundary: the model's state, how many frames were committed, and what the state keeps alive."""

    state: Any
    frames: int
    storages: Storages = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parts:
    """A checked worker state. ``moments``: oldest first, the present one last. ``kv``: by name, as in the file."""

    moments: tuple[Moment, ...]
    retained: tuple[tuple[int, ...], ...]
    kv: Mapping[str, Tensor]


def take_apart(
    session: str, moments: Sequence[Moment], model: WorldModel, book: KVBook, storage: KVStorage
) -> tuple[WorkerRecord, dict[str, Tensor]]:
    """The committed part of a session, copied to the CPU; ``moments`` as in :class:`Parts`. A block in flight is no part."""
    tensors: dict[str, Tensor] = {}
    records: list[StateRecord] = []
    packed_states = [
        model.pack(moment.state) for moment in moments
    ]  # all alive at once: places in memory tell them apart
    kept: dict[tuple[object, ...], str] = {}
    for age, moment, packed in zip(reversed(range(len(moments))), moments, packed_states, strict=True):
        shared: dict[str, str] = {}
        for name, tensor in packed.tensors.items():
            known = kept.setdefault(_place(tensor), _checked(state_prefix(age) + name))
            if known.startswith(state_prefix(age)):
                tensors[_checked(state_prefix(age) + name)] = _copy(tensor)
            else:
                shared[name] = known
        values = thaw_json(freeze_json(packed.values, "state"))
        records.append(StateRecord(frames=moment.frames, values=values, shared=shared))
    retained: list[tuple[int, ...]] = []
    for branch in book.spec.branches:
        frames = book.table(session, branch.name).retained()
        retained.append(tuple(frame.index for frame in frames))
        for layer in range(book.spec.num_layers):
            for which, tensor in zip(("k", "v"), storage.read(layer, frames), strict=True):
                shaped = tensor.view(len(frames), book.spec.tokens_per_frame, *tensor.shape[1:])
                tensors[kv_name(branch.local_index, layer, which)] = shaped.cpu()
    return WorkerRecord(retained=tuple(retained), present=records.pop(), past=tuple(records)), tensors


def check_parts(record: WorkerRecord, tensors: Mapping[str, Tensor], model: WorldModel, storage: KVStorage) -> Parts:
    """What :func:`put_together` needs; allocates nothing beside the model's states. Raises ArgumentError."""
    records = (*record.past, record.present)
    kv = _check_kv(record, tensors, storage)
    states: dict[str, dict[str, Tensor]] = {state_prefix(age): {} for age in range(len(records))}
    for name in tensors.keys() - kv.keys():
        prefix = next((p for p in states if name.startswith(p)), None)
        if prefix is None:
            raise ArgumentError("the snapshot has tensors that nothing owns", path="tensors")
        states[prefix][name.removeprefix(prefix)] = tensors[name]
    common = _check_shared(records, tensors.keys() - kv.keys())
    placed = {name: tensors[name].to(storage.device) for name in common}  # once: what was shared is shared again
    moments: list[Moment] = []
    for age, saved in zip(reversed(range(len(records))), records, strict=True):
        own = {name: placed.get(state_prefix(age) + name, tensor) for name, tensor in states[state_prefix(age)].items()}
        others = {name: placed[other] for name, other in saved.shared.items()}
        packed = PackedState(own | others, freeze_json(saved.values, "state"))
        state = model.unpack(packed)
        moments.append(Moment(state, saved.frames, storages(state)))
    _check_frames(moments, model, storage.spec.window)
    return Parts(tuple(moments), record.retained, kv)


def _check_shared(records: Sequence[StateRecord], names: Collection[str]) -> set[str]:
    """The tensors that states share, all among the states' own ``names``. Raises ArgumentError."""
    for age, saved in zip(reversed(range(len(records))), records, strict=True):
        if any(other not in names for other in saved.shared.values()):
            raise ArgumentError("a state shares a tensor that is not there", path="shared")
        if any(state_prefix(age) + name in names for name in saved.shared):
            raise ArgumentError("a state has a tensor of its own and a shared one of that name", path="shared")
    return {other for saved in records for other in saved.shared.values()}


def _check_frames(moments: Sequence[Moment], model: WorldModel, window: WindowGeometry) -> None:
    """Every chunk committed one block, a call's prompt several; only what the present state carries may not be written yet.
    Raises ArgumentError."""
    owing = [model.needs_prefill(moment.state) for moment in moments]
    blocks = [window.block_frames(moment.frames) for moment in moments[:-1]]
    grown = [
        b.frames - a.frames + block * owes
        for (a, b), owes, block in zip(pairwise(moments), owing[1:], blocks, strict=True)
    ]
    several = model.spec.duplex is not None
    if any(owing[:-1]) or any(
        f < block or f % block or (f > block and not several) for f, block in zip(grown, blocks, strict=True)
    ):
        raise ArgumentError("the frames of the past do not rise by whole blocks", path="past")


def _check_kv(record: WorkerRecord, tensors: Mapping[str, Tensor], storage: KVStorage) -> dict[str, Tensor]:
    """The keys and values among the tensors, of the right names, shapes and dtype. Raises ArgumentError."""
    spec = storage.spec
    if len(record.retained) != len(spec.branches):
        raise ArgumentError(f"frames of {len(record.retained)} branches, not {len(spec.branches)}", path="retained")
    kv: dict[str, Tensor] = {}
    for branch, indices in zip(spec.branches, record.retained, strict=True):
        spec.window.restored(record.present.frames, indices)
        shape = (len(indices), spec.tokens_per_frame, spec.num_kv_heads, spec.head_dim)
        for name in (kv_name(branch.local_index, layer, w) for layer in range(spec.num_layers) for w in ("k", "v")):
            tensor = tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != storage.dtype:
                raise ArgumentError(f"{name} is missing, or not {storage.dtype} {shape}", path="tensors")
            kv[name] = tensor
    return kv


def put_together(session: str, parts: Parts, book: KVBook, storage: KVStorage) -> None:
    """Open the session in the book with its saved frames. Raises CapacityError; nothing has changed then."""
    places = book.restore(session, parts.moments[-1].frames, parts.retained)
    try:
        for branch, indices, frames in zip(book.spec.branches, parts.retained, places, strict=True):
            rows = _rows(indices, frames)
            runs = storage.runs(frames)
            for layer in range(book.spec.num_layers):
                k, v = (parts.kv[kv_name(branch.local_index, layer, w)][rows].flatten(0, 1) for w in ("k", "v"))
                storage.write(layer, runs, k, v)
    except BaseException:
        book.end(session)
        raise


def _rows(indices: Sequence[int], frames: Sequence[FrameRef]) -> list[int]:
    """Which of the saved frames have a place."""
    number = {index: row for row, index in enumerate(indices)}
    return [number[frame.index] for frame in frames]


def _checked(name: str) -> str:
    if TENSOR_NAME.fullmatch(name) is None:
        raise ValueError(f"a model's tensor is called {name!r}")
    return name


def _place(tensor: Tensor) -> tuple[object, ...]:
    """The same for two tensors when they are the same numbers in memory, none of which is written while they live."""
    if not tensor.numel():
        return (id(tensor),)
    return (tensor.device, tensor.dtype, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
