"""Which forward passes routing replay needs, and which it saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slime.backends.megatron import cpu

cpu.install()

from slime.backends.megatron.scoring import plan_passes  # noqa: E402
from slime.config import Config  # noqa: E402

OWN = {"use_routing_replay": True}
ENGINE = {"use_routing_replay": True, "use_rollout_routing_replay": True}


@pytest.mark.parametrize(
    ("algorithm", "num_steps", "old"),
    [
        ({}, 1, False),
        (OWN, 1, True),  # nothing else would record the routes
        (ENGINE, 1, False),  # the engine did
        (ENGINE, 2, True),
        (OWN | {"use_rollout_logprobs": True}, 2, True),
        (ENGINE | {"use_rollout_logprobs": True}, 2, False),
        (OWN | {"loss_type": "sft_loss", "compute_advantages_and_returns": False}, 1, False),
    ],
)
def test_old_pass(algorithm: dict[str, Any], num_steps: int, old: bool) -> None:
    config = Config()
    plan = plan_passes(replace(config, algorithm=replace(config.algorithm, **algorithm)), num_steps=num_steps)
    assert plan.old is old
    assert plan.old_from_engine is algorithm.get("use_rollout_logprobs", False)
