"""Host operations on PyTorch tensors, excluded from its compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operate(value: torch.Tensor, forward: Callable[[Any], Any], gradient: Callable[[Any], Any]) -> torch.Tensor:
    """Return ``forward(value)``, differentiable if ``value`` requires grad; see ``choros.hvd.host_ops.operate``."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return outside(forward)(value)

    class Operation(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
            return forward(tensor)

        @staticmethod
        def backward(ctx: object, *grads: Any) -> torch.Tensor:
            return gradient(grads[0])

    return outside(Operation.apply)(value)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, excluded from compilation if PyTorch is compiling."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function
