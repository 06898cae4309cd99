"""Mistakes that parallel training makes silently, planted in every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from tests.support.training import cpu  # noqa: F401  (installs the CPU substitutions before Megatron)

from megatron.core.distributed import DistributedDataParallel  # isort: skip
from slime.backends.megatron.step import TrainStep  # isort: skip

_NORM_GRADS = "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads"


def norm_gradients_are_not_summed() -> AbstractContextManager[Any]:
    """Under sequence parallelism each rank sees part of the tokens, and norms belong to no tensor-parallel layer."""
    return mock.patch(_NORM_GRADS, return_value=None)


def gradients_are_not_reduced() -> AbstractContextManager[Any]:
    """Over data and context parallelism, at the end of a step."""
    return mock.patch.object(DistributedDataParallel, "finish_grad_sync", return_value=None)


def data_parallelism_is_not_scaled() -> AbstractContextManager[Any]:
    """Megatron averages over data-parallel ranks; without the factor the loss is too small by their number."""
    scaled = TrainStep._scaled

    def without_factor(self: TrainStep, *args: Any) -> Any:
        loss, count = scaled(self, *args)
        return loss / self._passes.parallel.dp_size, count

    return mock.patch.object(TrainStep, "_scaled", without_factor)
