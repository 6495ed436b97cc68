"""Muon for the matrices of the layers, AdamW for everything else.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): the momentum of a matrix
is replaced by its nearest semi-orthogonal matrix, found by five Newton-Schulz steps. Matrices
of one shape are stacked, so a step costs a handful of batched products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic of the Muon write-up


def orthogonalise(stack_NRC: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly (singular values within about 0.7 to 1.2)."""
    a, b, c = NEWTON_SCHULZ
    x = stack_NRC.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(stack_NRC.dtype)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum over 2-D parameters; lr is the size of an update's singular values."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(group, shape, parameters)

    def _step_shape(self, group: dict, shape: torch.Size, parameters: list[Tensor]) -> None:
        grads = [parameter.grad for parameter in parameters]
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            buffers.append(state["momentum"])
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        ahead = torch._foreach_lerp(grads, buffers, group["momentum"])
        update = orthogonalise(torch.stack(ahead)) * max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(update.unbind(0)), alpha=-group["lr"])


def make_optimizers(net: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the layers' matrices (`net.blocks`), AdamW on the rest."""
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2 and min(p.shape) > 16]
    taken = {id(p) for p in matrices}
    rest = [p for p in net.parameters() if id(p) not in taken]
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda)
    optimizers = [Muon(matrices, muon_lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers
