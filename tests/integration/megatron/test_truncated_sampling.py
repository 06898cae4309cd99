"""Training on rollouts of a truncated distribution: everything is scored under that distribution."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.replay import with_kept_tokens
from tests.support.rollouts import make_rollout, rollout_mean
from tests.support.tiny_models import make_tiny_model
from tests.support.workers import LINEAR_ADAM, Case, assert_same_training, run_case

pytestmark = pytest.mark.timeout(180)


BATCH = with_kept_tokens(make_rollout())


def case(*, data: dict[str, Any] | None = None, train: dict[str, Any] | None = None) -> Case:
    sections = {
        "algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.01, "use_tis": True},
        "data": {"global_batch_size": 6} | (data or {}),
        "train": train or {},
    }
    return Case(argv=LINEAR_ADAM, sections=sections, batches=[BATCH, replace(BATCH, rollout_id=1)])


def masked_log_probs(model_dir: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the response tokens, from transformers in float64: restricted log-probs, and entropies of whole rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float64, attn_implementation="eager")
    ids, offsets = BATCH.rollout_top_p_token_ids, BATCH.rollout_top_p_token_offsets
    assert ids is not None
    assert offsets is not None
    log_probs, entropies = [], []
    for i, (row, length) in enumerate(zip(BATCH.tokens, BATCH.response_lengths, strict=True)):
        with torch.no_grad():
            logits = model(torch.from_numpy(row.astype(np.int64))[None]).logits[0, len(row) - 1 - length : -1]
        whole = torch.log_softmax(logits, -1)
        entropies.append(-(whole.exp() * whole).sum(-1))
        found = []
        for t, target in enumerate(row[len(row) - length :].tolist()):
            kept = ids[i][offsets[i][t] : offsets[i][t + 1]].tolist()
            mask = torch.full((logits.size(1),), bool(kept))
            mask[kept] = False
            found.append(torch.log_softmax(logits[t].masked_fill(mask, float("-inf")), -1)[target])
        log_probs.append(torch.stack(found))
    return log_probs, entropies


def test_every_pass_is_restricted_however_the_batch_is_packed(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path / "model", "qwen2")
    plain = run_case(model_dir, case(train={"share_prompt_prefix": False}))
    log_probs, entropies = masked_log_probs(model_dir)
    # Old and reference policy are the checkpoint itself in the first rollout.
    want = rollout_mean(BATCH, log_probs).item()
    assert plain.metrics[0]["rollout/log_probs"] == pytest.approx(want, abs=1e-6)
    assert plain.metrics[0]["rollout/ref_log_probs"] == pytest.approx(want, abs=1e-6)
    assert plain.steps[0][0]["train/ppo_kl"] == pytest.approx(0, abs=1e-7)
    first = [i for i, rollout in enumerate(BATCH.rollout_ids) if rollout < 6]
    entropy = rollout_mean(BATCH, entropies, first).item()
    assert plain.steps[0][0]["train/entropy_loss"] == pytest.approx(entropy, abs=2e-6)
    dynamic = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
    packed = case(data=dynamic, train={"recompute_loss_function": True, "log_probs_chunk_size": 3})
    assert_same_training(run_case(model_dir, packed), plain)
