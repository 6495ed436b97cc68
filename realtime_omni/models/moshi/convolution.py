"""Causal convolutions over a stream, frame by frame: what a layer remembers is a value that goes in and comes out.

All of a network's layers keep theirs in one tensor, one after the other in the order in which they run (:class:`Carry`).
A convolution remembers the end of its input, a transposed one the end of its output, which the next frame adds to.

Shapes: B rows, C channels, T steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv_transpose1d, elu

from realtime_omni.models.moshi.network import empty


class Carry:
    """The memory of one pass: read front to back, written in the same order."""

    def __init__(self, before: Tensor) -> None:
        """``before`` [B, M]; zeros for a row that begins."""
        self._before = before
        self._read = 0
        self._after: list[Tensor] = []

    def take(self, channels: int, steps: int) -> Tensor:
        """[B, C, T] of the next layer."""
        size = channels * steps
        part = self._before[:, self._read : self._read + size]
        self._read += size
        return part.reshape(-1, channels, steps)

    def keep(self, part: Tensor) -> None:
        """What the next frame finds."""
        self._after.append(part.flatten(1))

    def after(self) -> Tensor:
        """[B, M]."""
        return torch.cat(self._after, dim=1)


class Convolution(nn.Module):
    """``carried``: numbers that it remembers of a row."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.weight = empty(outputs, inputs, kernel)
        self.bias = empty(outputs) if bias else None
        self._stride = stride
        self._overlap = kernel - stride
        self.carried = inputs * self._overlap

    def forward(self, x: Tensor, carry: Carry, first: Tensor | None = None) -> Tensor:
        """``first`` bool [B]: rows that begin, and whose past is their first value instead of zeros."""
        if self._overlap:
            before = carry.take(x.shape[1], self._overlap)
            if first is not None:
                before = torch.where(first[:, None, None], x[..., :1], before)
            x = torch.cat((before, x), dim=-1)
            carry.keep(x[..., -self._overlap :])
        return conv1d(x, self.weight, self.bias, stride=self._stride)


class Transposed(nn.Module):
    """A transposed convolution of kernel ``2 * stride``."""

    def __init__(self, inputs: int, outputs: int, stride: int, *, groups: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.weight = empty(inputs, outputs // groups, 2 * stride)
        self.bias = empty(outputs) if bias else None
        self._outputs, self._stride, self._groups = outputs, stride, groups
        self.carried = outputs * stride

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        y = conv_transpose1d(x, self.weight, stride=self._stride, groups=self._groups)
        tail = y.shape[-1] - self._stride
        before = carry.take(self._outputs, self._stride)
        carry.keep(y[..., tail:])
        y = torch.cat((y[..., : self._stride] + before, y[..., self._stride : tail]), dim=-1)
        return y if self.bias is None else y + self.bias[:, None]


class Residual(nn.Module):
    """A narrow convolution and a pointwise one, beside the input itself."""

    def __init__(self, width: int, kernel: int, compress: int) -> None:
        super().__init__()
        self.narrow = Convolution(width, width // compress, kernel)
        self.wide = Convolution(width // compress, width, 1)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        y: Tensor = self.wide(elu(self.narrow(elu(x), carry)), carry)
        return x + y


def carried(network: nn.Module) -> int:
    """M: numbers that all layers of a network remember of one row."""
    return sum(m.carried for m in network.modules() if isinstance(m, (Convolution, Transposed)))
