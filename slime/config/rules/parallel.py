"""Checks that need Megatron's resolved parallel sizes."""

from __future__ import annotations

from slime.config.draft import Draft
from slime.config.families import MegatronConfig


def check_parallel(draft: Draft, megatron: MegatronConfig) -> None:
    """Check that each data-parallel rank gets a sample per optimizer step."""
    batch = draft.data.global_batch_size
    data_parallel = max(1, draft.cluster.world_size // megatron.model_parallel_size)
    if batch is not None and batch < data_parallel and not draft.debug.debug_rollout_only:
        draft.problems.append(
            f"--global-batch-size {batch} is less than the {data_parallel} data-parallel ranks; each rank needs at "
            "least one sample per optimizer step"
        )
