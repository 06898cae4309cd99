"""Helpers that custom losses import by their established names.

Owns signatures, not arithmetic. Tests hold: a custom loss written with them equals the built-in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron import cpu
from slime.errors import PluginError

cpu.install()  # a user's module may import this one before anything of ours has imported Megatron

from megatron.core import parallel_state as mpu  # noqa: E402

from slime.backends.megatron.hooks import icepop_function, vanilla_tis_function  # noqa: E402
from slime.backends.megatron.kept_tokens import KeptTokens  # noqa: E402
from slime.backends.megatron.logprobs import score_tokens  # noqa: E402
from slime.backends.megatron.vocab_shard import VocabShard  # noqa: E402

__all__ = ["get_log_probs_and_entropy", "icepop_function", "vanilla_tis_function"]


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    rollout_top_p_token_ids: Sequence[Any] | None = None,
    rollout_top_p_token_offsets: Sequence[Any] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probs (and entropy) of each sample's response tokens. Collective over the tensor-parallel group.

    Args:
        logits: ``[1, T, V/tp]`` of whole samples, one after the other, as a custom loss gets them.
        args: Flat argument view.
        unconcat_tokens: N x ``[L_i]`` token ids.
        total_lengths: N values of L_i.
        response_lengths: N response lengths.
        with_entropy: Also return the entropy.
        rollout_top_p_token_ids: N x ``[K_i]`` kept tokens, to which the log-probs are then restricted.
        rollout_top_p_token_offsets: N x ``[R_i + 1]`` where each token's set begins.
        **kwargs: Further established options; none changes the result.

    Returns:
        An empty tensor (the established form has a placeholder there), and ``log_probs`` and ``entropy``
        as lists of ``[R_i]``.

    Raises:
        PluginError: The row is split over context-parallel ranks.
    """
    del kwargs
    if mpu.get_context_parallel_world_size() > 1:
        raise PluginError("get_log_probs_and_entropy sees whole samples only; use --context-parallel-size 1")
    device = logits.device
    rows, targets, start = [], [], 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        rows.append(torch.arange(start + total - response - 1, start + total - 1, device=device))
        targets.append(tokens[total - response :].to(device))
        start += total
    columns = logits.size(-1)
    group = mpu.get_tensor_model_parallel_group() if mpu.get_tensor_model_parallel_world_size() > 1 else None
    shard = VocabShard.of(args.vocab_size, columns, mpu.get_tensor_model_parallel_rank(), group)
    kept = None
    if rollout_top_p_token_ids is not None and rollout_top_p_token_offsets is not None:
        kept = KeptTokens.of_samples(
            rollout_top_p_token_ids, rollout_top_p_token_offsets, torch.cat(targets).cpu().numpy()
        )
    scores = score_tokens(
        logits.view(-1, columns),
        torch.cat(targets),
        shard,
        rows=torch.cat(rows),
        temperature=args.rollout_temperature,
        chunk_size=args.log_probs_chunk_size,
        with_entropy=with_entropy,
        kept=kept,
    )
    result = {"log_probs": list(scores.log_probs.split(list(response_lengths)))}
    if scores.entropy is not None:
        result["entropy"] = list(scores.entropy.split(list(response_lengths)))
    return torch.empty(0, device=device), result
