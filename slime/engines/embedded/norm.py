"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm

from slime.engines.embedded.linear import Homes
from slime.engines.embedded.weights import Slot


class Norm:
    """``x / rms(x) * weight`` over the last dimension.

    Args:
        size: Of the last dimension.
        eps: Added to the mean square.
        homes: Makes the weight.
    """

    def __init__(self, size: int, eps: float, homes: Homes) -> None:
        self._weight = homes.plain(size)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise ``x`` ``[..., size]``."""
        return rms_norm(x, self._weight.shape, self._weight.data, self._eps)

    def slots(self, name: str) -> dict[str, Slot]:
        """Where the named weight lives."""
        return {f"{name}.weight": Slot(self._weight, 0, self._weight.shape[0])}
