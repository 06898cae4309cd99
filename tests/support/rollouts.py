"""Small random rollouts for tests of the training step, and the loss of one batch in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slime.types import RolloutBatch


def make_rollout(
    *,
    num_groups: int = 3,
    group_size: int = 4,
    prompt_length: int = 7,
    max_response: int = 6,
    vocab_size: int = 250,
    fan_out: bool = True,
    seed: int = 0,
    rollout_id: int = 0,
    log_prob_noise: float = 0.3,
) -> RolloutBatch:
    """Groups with equal prompts, ragged responses, gaps in the masks and random shaped rewards.

    Args:
        num_groups: Prompts.
        group_size: Rollouts per prompt.
        prompt_length: Tokens of the first prompt; each next one has one more.
        max_response: Longest response.
        vocab_size: Token ids are below this.
        fan_out: The first rollout of the first group consists of two samples.
        seed: Of everything.
        rollout_id: Of the batch.
        log_prob_noise: Spread of the recorded engine log-probs around -3.
    """
    rng = np.random.default_rng(seed)
    tokens, lengths, groups, rollouts, masks = [], [], [], [], []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab_size, size=prompt_length + group)
        for member in range(group_size):
            for _ in range(2 if fan_out and group == member == 0 else 1):
                length = int(rng.integers(1, max_response + 1))
                tokens.append(np.concatenate([prompt, rng.integers(0, vocab_size, size=length)]).astype(np.int32))
                lengths.append(length)
                groups.append(group)
                rollouts.append(group * group_size + member)
                mask = np.ones(length, dtype=np.float32)
                if length > 3:
                    mask[1] = 0
                masks.append(mask)
    sums = {r: float(sum(m.sum() for m, q in zip(masks, rollouts, strict=True) if q == r)) for r in rollouts}
    rewards = {r: float(rng.normal()) for r in rollouts}
    return RolloutBatch(
        rollout_id=rollout_id,
        tokens=tokens,
        response_lengths=lengths,
        loss_masks=masks,
        rewards=[rewards[r] for r in rollouts],
        raw_rewards=[float(rewards[r] > 0) for r in rollouts],
        truncated=[False] * len(tokens),
        sample_indices=list(range(len(tokens))),
        group_ids=groups,
        rollout_ids=rollouts,
        rollout_mask_sums=[sums[r] for r in rollouts],
        weight_versions=[("1",)] * len(tokens),
        rollout_log_probs=[(-3 + log_prob_noise * rng.normal(size=n)).astype(np.float32) for n in lengths],
    )


def reference_log_probs(
    model_dir: str | Path, batch: RolloutBatch, *, temperature: float = 1.0
) -> tuple[torch.nn.Module, list[Tensor], list[Tensor]]:
    """Log-probs and entropies of the response tokens from transformers in float64, sample by sample.

    Returns:
        The model, N x ``[R_i]`` log-probs and N x ``[R_i]`` entropies, both with gradient.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(model_dir), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    log_probs, entropies = [], []
    for row, length in zip(batch.tokens, batch.response_lengths, strict=True):
        ids = torch.from_numpy(row.astype(np.int64))
        full = torch.log_softmax(model(ids[None]).logits[0] / temperature, dim=-1)
        full = full[len(ids) - 1 - length : len(ids) - 1]
        log_probs.append(full.gather(1, ids[len(ids) - length :, None])[:, 0])
        entropies.append(-(full.exp() * full).sum(-1))
    return model, log_probs, entropies


def rollout_mean(batch: RolloutBatch, values: Sequence[Tensor], samples: Sequence[int] | None = None) -> Tensor:
    """Mean over rollouts of the masked token mean of each rollout, written out one rollout at a time."""
    chosen = range(len(batch)) if samples is None else samples
    means = []
    for rollout in dict.fromkeys(batch.rollout_ids[i] for i in chosen):
        members = [i for i in chosen if batch.rollout_ids[i] == rollout]
        masked = [values[i][torch.from_numpy(batch.loss_masks[i]).bool()] for i in members]
        means.append(torch.cat(masked).mean())
    return torch.stack(means).mean()
