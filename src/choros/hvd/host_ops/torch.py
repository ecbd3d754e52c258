"""Host operations on PyTorch tensors, excluded from its compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operate(value: Any, forward: Callable[[Any], Any], gradient: Callable[[Any], Any]) -> Any:
    """Return ``forward(value)``, differentiable if ``value`` requires grad; see ``choros.hvd.host_ops.operate``."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return outside(forward)(value)

    class Operation(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return forward(tensor)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return gradient(grads[0])

    return outside(Operation.apply)(value)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, excluded from compilation if PyTorch is compiling."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function
