"""Attention in eight bits: queries, keys, values and probabilities as e4m3, sums in float32.

Owns the kernel and what it needs of cuDNN. Pools stay as they are; what is gathered of them is e4m3, half the bytes.
Queries and keys are RMS-normalised by the models this is for, so a number of either, and of the values, is stored as it is,
cut at 448: a floating-point number loses the same relative precision at any scale. Probabilities are at most 1 and are
stored times 256.

On CUDA FlashAttention-3 computes where it is installed (:mod:`.flash3`), else cuDNN's ``sdpa_fp8`` (package
``nvidia-cudnn-frontend``; Hopper and later), one execution plan per shape.
Elsewhere the same numbers are multiplied in float32, which is slow, and what the tests hold the arithmetic to.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from realtime_omni.errors import BackendUnavailable
from realtime_omni.float8 import E4M3, LARGEST, to_e4m3
from realtime_omni.kv.attention import flash3

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PROBABILITY_SCALE = 256.0


def reference(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """float32 [rows, heads, T, head_dim] of e4m3 queries, keys and values: exact products, rounded probabilities.

    ``p = exp(s - max(s))`` is rounded before the sum over keys and not for the sum that divides, as flash kernels do."""
    scores = (q.float() @ keys.float().transpose(-1, -2)) / q.shape[-1] ** 0.5
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = to_e4m3(p * PROBABILITY_SCALE).float() / PROBABILITY_SCALE
    out: Tensor = (rounded @ values.float()) / p.sum(-1, keepdim=True)
    return out


class Fp8Kernel:
    """A :class:`~realtime_omni.kv.attention.sdpa.Kernel`; see the module."""

    dtype: torch.dtype | None = E4M3

    def __init__(self, device: torch.device | str, library: str = "auto") -> None:
        """``library``: ``flash3``, ``cudnn``, or whichever is there, in this order. Raises BackendUnavailable on a CUDA device
        that cannot, or without the package."""
        place = torch.device(device)
        self._on_gpu = _library(place, library) if place.type == "cuda" else None
        self._round = _append if self._on_gpu is None else _Rounding()

    def gather(self, x: Tensor, out: Tensor) -> None:
        self._round(x, out)

    def append(self, x: Tensor, out: Tensor) -> None:
        self._round(x, out)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """See ``Kernel``. Raises BackendUnavailable on a mask, on grouped heads, and on shapes that cuDNN has no plan for."""
        if mask is not None or q.shape[1] != keys.shape[1]:
            raise BackendUnavailable("attention in eight bits has no mask and as many key heads as query heads")
        dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
        if self._on_gpu is None:
            return reference(to_e4m3(q), to_e4m3(keys), to_e4m3(values)).to(dtype)
        return self._on_gpu.run(self._rounded(q), self._rounded(keys), self._rounded(values), dtype)

    def _rounded(self, x: Tensor) -> Tensor:
        """e4m3 of x [rows, heads, tokens, head_dim], laid out token by token."""
        if x.dtype == E4M3:
            return x
        rows, heads, tokens, size = x.shape
        out = torch.empty(rows, tokens, heads, size, dtype=E4M3, device=x.device)
        for source, target in zip(x.transpose(1, 2), out, strict=True):
            self._round(source, target)
        return out.transpose(1, 2)


def _append(x: Tensor, out: Tensor) -> None:
    out.copy_(to_e4m3(x))


class _Rounding:
    """``_append`` by a kernel; without one, or where memory does not lie so, by torch, which costs speed and no world."""

    def __init__(self) -> None:
        self._kernel: Any = None
        try:
            self._kernel = importlib.import_module("realtime_omni.kv.attention.rounding")
        except ImportError:
            log.exception("keys and values are rounded without a kernel")

    def __call__(self, x: Tensor, out: Tensor) -> None:
        if self._kernel is None or not (self._kernel.fits(x) and self._kernel.fits(out)):
            _append(x, out)
        else:
            self._kernel.round_into(x, out)


def _divided(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() / scale).to(dtype)


def _library(device: torch.device, name: str) -> _Flash3 | _Cudnn:
    if torch.cuda.get_device_capability(device) < (9, 0):
        raise BackendUnavailable("attention in eight bits needs a CUDA device of capability 9.0")
    if name == "flash3":
        return _Flash3(flash3.load())
    found = flash3.find() if name == "auto" else None
    return _Cudnn(device) if found is None else _Flash3(found)


class _Flash3:
    """FlashAttention-3's forward kernel (package ``fa3-fwd``; Hopper). Its output is bfloat16, its probabilities at most 1."""

    def __init__(self, attend: flash3.Flash3) -> None:
        self._attend = attend

    def run(self, q: Tensor, keys: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``_Cudnn.run``."""
        return self._attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)).transpose(1, 2).to(dtype)


@dataclass(frozen=True, slots=True)
class _Plan:
    graph: Any
    workspace: Tensor
    out_dtype: torch.dtype


class _Cudnn:
    """cuDNN's graphs, by the shape and the strides of what they read. What is converted around them is compiled: as single
    operations it would take a quarter of the kernel's time."""

    def __init__(self, device: torch.device) -> None:
        try:
            torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # loads the library that the package looks for
            self._cudnn: Any = importlib.import_module("cudnn")
        except ImportError as error:
            raise BackendUnavailable(f"attention in eight bits needs nvidia-cudnn-frontend: {error}") from error
        self._device = device
        self._handle = self._cudnn.create_handle()
        self._plans: dict[tuple[object, ...], _Plan] = {}

        def scalar(value: float) -> Tensor:
            return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=device)

        self._one, self._up, self._down = scalar(1.0), scalar(PROBABILITY_SCALE), scalar(1 / PROBABILITY_SCALE)
        self._divided = _Compiled(_divided)
        self._largest_bits = _Compiled(_largest_bits, dynamic=True)  # windows that fill have many lengths
        self._largest = (scalar(0.0), scalar(0.0))  # of the probabilities and of the output: written, not read

    def run(self, q: Tensor, keys: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Attention of e4m3 queries, keys and values: q's shape in ``dtype``, laid out as [rows, T, heads, head_dim]."""
        key = tuple((part.shape, part.stride()) for part in (q, keys, values))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._planned(q, keys, values)
        rows, heads, tokens, size = q.shape
        out = torch.empty(rows, tokens, heads, size, dtype=plan.out_dtype, device=self._device).transpose(1, 2)
        scale_o = self._one if plan.out_dtype != E4M3 else self._headroom(values)
        parts = (q, keys, values, self._one, self._one, self._one, self._down, self._up, scale_o, out, *self._largest)
        self._cudnn.set_stream(handle=self._handle, stream=torch.cuda.current_stream(self._device).cuda_stream)
        plan.graph.execute(dict(enumerate(parts)), plan.workspace, handle=self._handle)
        if plan.out_dtype == dtype:
            return out
        return self._divided(out, scale_o, dtype)

    def _headroom(self, x: Tensor) -> Tensor:
        """float32 [1, 1, 1, 1]: what the largest magnitude of e4m3 numbers is multiplied with to become that of all of them."""
        bits = self._largest_bits(x.transpose(1, 2).view(torch.uint8))
        return LARGEST / bits.view(1, 1, 1, 1).view(E4M3).float().clamp_min(2.0**-9)

    def _planned(self, q: Tensor, keys: Tensor, values: Tensor) -> _Plan:
        """The plan with the best output that this cuDNN and device have."""
        refusals = []
        for out_dtype in (torch.bfloat16, torch.float16, E4M3):
            try:
                graph = self._graph(q, keys, values, out_dtype)
            except Exception as error:  # the package raises its own types, and RuntimeError
                refusals.append(f"{out_dtype}: {str(error)[:200]}")
                continue
            size = max(int(graph.get_workspace_size()), 1)
            return _Plan(graph, torch.empty(size, dtype=torch.uint8, device=self._device), out_dtype)
        raise BackendUnavailable(f"cuDNN has no attention in eight bits for {tuple(q.shape)}: {'; '.join(refusals)}")

    def _graph(self, q: Tensor, keys: Tensor, values: Tensor, out_dtype: torch.dtype) -> Any:
        """uids: q k v, their three descales, the probabilities' descale and scale, the output's scale, output, two maxima."""
        cudnn, types = self._cudnn, self._cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )
        parts = [
            graph.tensor(uid=uid, dim=list(part.shape), stride=list(part.stride()), data_type=types.FP8_E4M3)
            for uid, part in enumerate((q, keys, values))
        ]
        scales = [
            graph.tensor(uid=uid, dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], data_type=types.FLOAT) for uid in range(3, 9)
        ]
        out, _, *largest = graph.sdpa_fp8(
            q=parts[0],
            k=parts[1],
            v=parts[2],
            descale_q=scales[0],
            descale_k=scales[1],
            descale_v=scales[2],
            descale_s=scales[3],
            scale_s=scales[4],
            scale_o=scales[5],
            generate_stats=False,
            attn_scale=q.shape[-1] ** -0.5,
        )
        _, heads, tokens, size = q.shape
        kinds = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF, E4M3: types.FP8_E4M3}
        stride = [tokens * heads * size, size, heads * size, 1]
        out.set_uid(9).set_output(True).set_dim(list(q.shape)).set_stride(stride).set_data_type(kinds[out_dtype])
        for uid, tensor in enumerate(largest, 10):
            tensor.set_uid(uid).set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])
            tensor.set_data_type(types.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph


class _Compiled(Generic[P, T]):
    """A compiled function; from its first failure on the plain one: a compiler that is not there costs speed, no world."""

    def __init__(self, plain: Callable[P, T], *, dynamic: bool = False) -> None:
        self._plain = plain
        self._run: Callable[P, T] = torch.compile(plain, dynamic=dynamic)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._run is self._plain:
            return self._plain(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:
            log.exception("%s is not compiled", self._plain.__name__)
            self._run = self._plain
            return self._plain(*args, **kwargs)


def _largest_bits(bits: Tensor) -> Tensor:
    """uint8 []: of e4m3 numbers as bytes, the one of largest magnitude without its sign; their order is that of the bits."""
    return (bits & 0x7F).amax()
