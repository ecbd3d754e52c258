"""Operations of the host on PyTorch's tensors, which its compiler does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operate(value: Any, forward: Callable[[Any], Any], gradient: Callable[[Any], Any]) -> Any:
    """Return ``forward(value)``, differentiable where ``value`` asks for that; see ``choros.hvd.host_ops.operate``."""
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
    """The function, outside of what PyTorch compiles."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function
