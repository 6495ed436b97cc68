"""Tensors on their way to a device. Owns nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def placed(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device, without waiting for what the device is doing.

    A copy from ordinary memory first waits for all that was queued before it; one from pinned memory is queued itself."""
    device = torch.device(device)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
