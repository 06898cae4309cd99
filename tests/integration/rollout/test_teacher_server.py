"""On-policy distillation with an engine as the teacher: its log-probs against float64 ones of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.data.batch import build_rollout_batch
from slime.rollout.pipeline import generate_rollout
from tests.support.rollout_args import ListSource, open_context
from tests.support.rollouts import reference_log_probs

MODULE = "slime.rollout.on_policy_distillation"


@pytest.mark.timeout(120)
def test_the_teachers_log_probs_of_generated_responses(model_path: Path, router_url: str) -> None:
    flags = {
        "rm_url": f"{router_url}/generate",
        "custom_rm_path": f"{MODULE}.reward_func",
        "custom_reward_post_process_path": f"{MODULE}.post_process_rewards",
        "rollout_temperature": 0.7,
        "rollout_batch_size": 2,
        "use_opd": True,
        "opd_type": "sglang",
    }
    with open_context(model_path, router_url, rm_type=None, **flags) as context:
        output = context.generate(generate_rollout, 0, ListSource(["one", "two"], 2))
        batch = build_rollout_batch(context.args, 0, output.samples)
    assert len(batch) == 4
    assert batch.teacher_log_probs is not None
    _, want, _ = reference_log_probs(model_path, batch, temperature=0.7)
    for mine, theirs in zip(batch.teacher_log_probs, want, strict=True):
        assert len(mine) > 0
        torch.testing.assert_close(torch.from_numpy(mine).double(), theirs.detach(), atol=2e-5, rtol=1e-5)
