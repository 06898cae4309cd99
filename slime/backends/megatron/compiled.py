"""Compiling small tensor functions for rows of any length: one kernel per function and width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ForAnyLength:
    """A tensor function, compiled at its first call so that the first dimension of its tensors may vary.

    Everything else, numbers too, is fixed in the kernel: another width or scale compiles again.

    Args:
        function: Takes tensors with the same first dimension, and numbers.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._compiled = torch.compile(function, fullgraph=True)

    def __call__(self, *arguments: Any) -> Any:
        """Call it."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return self._compiled(*arguments)
