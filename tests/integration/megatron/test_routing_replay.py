"""Routing replay through the worker: which experts tokens really go to, and what comes out of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.errors import DataError
from slime.types import RolloutBatch
from tests.support.replay import Choices, watched_routers, with_planted_routes
from tests.support.rollouts import make_rollout, rollout_mean
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import LINEAR_ADAM, Case, assert_same_training, run_case, running_worker

pytestmark = pytest.mark.timeout(180)

OWN = {"use_routing_replay": True}
ENGINE = {"use_routing_replay": True, "use_rollout_routing_replay": True}
SHIFT = {"custom_megatron_before_train_step_hook_path": "tests.support.replay.shift_routers"}
BATCH = with_planted_routes(make_rollout(), num_layers=3, num_experts=8, topk=2, dense=[0])
"""The tiny Qwen2-MoE of three layers, the first of them dense."""
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2_moe", num_hidden_layers=3)


def train_watched(
    model_dir: Path, algorithm: dict[str, Any], *, argv: tuple[str, ...] = (), shift: bool = False
) -> tuple[Choices, list[dict[str, float]]]:
    config = make_config(
        model_dir,
        (*LINEAR_ADAM, *argv),
        algorithm=algorithm,
        data={"global_batch_size": 6, "micro_batch_size": 4},
        train=SHIFT if shift else {},
    )
    with running_worker(config) as worker:
        with watched_routers(worker) as choices:
            worker.train(BATCH)
        return choices, worker.step_metrics


def test_training_uses_the_choices_of_the_old_pass(model_dir: Path) -> None:
    free, _ = train_watched(model_dir, {}, shift=True)
    assert free.scoring.keys() == free.training.keys()
    changed = sum(set(free.training[key]) != set(free.scoring[key]) for key in free.scoring)
    assert changed > len(free.scoring) / 4
    for argv in ((), RECOMPUTE, ("--recompute-granularity", "selective", "--recompute-modules", "moe")):
        replayed, _ = train_watched(model_dir, OWN, argv=argv, shift=True)
        assert replayed.scoring.keys() == replayed.training.keys() == free.scoring.keys()
        runs = 2 if argv else 1
        for key, seen in replayed.training.items():
            assert len(set(replayed.scoring[key])) == 1
            assert len(seen) >= runs
            assert set(seen) == set(replayed.scoring[key])


def test_the_first_ratio_is_one(model_dir: Path) -> None:
    _, steps = train_watched(model_dir, OWN)
    assert steps[0]["train/ppo_kl"] == 0.0
    assert steps[1]["train/ppo_kl"] != 0.0


def forced_log_probs(model_dir: Path, batch: RolloutBatch, *, forced: bool) -> tuple[torch.nn.Module, list[Tensor]]:
    """Log-probs of the responses from transformers in float64, tokens sent to their planted experts if ``forced``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(model_dir), dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    assert batch.rollout_routed_experts is not None
    planted: dict[int, Tensor] = {}

    def route(layer: int, gate: Any) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.size(-1)) @ gate.weight.T
            probs = logits.softmax(-1)  # Qwen2-MoE does not normalise the weights of the chosen experts
            return logits, probs.gather(1, planted[layer]), planted[layer]

        return forward

    for layer in (1, 2):
        gate = model.model.layers[layer].mlp.gate
        if forced:
            gate.forward = route(layer, gate)
    log_probs = []
    for row, length, routes in zip(batch.tokens, batch.response_lengths, batch.rollout_routed_experts, strict=True):
        planted.update({layer: torch.from_numpy(routes[:, layer].astype(np.int64)) for layer in (1, 2)})
        ids = torch.from_numpy(row.astype(np.int64))
        full = torch.log_softmax(model(ids[None, :-1]).logits[0, len(row) - 1 - length :], dim=-1)
        log_probs.append(full.gather(1, ids[len(ids) - length :, None])[:, 0])
    return model, log_probs


def test_planted_routes_of_the_engine_are_what_policy_and_gradient_use(model_dir: Path) -> None:
    sections = {
        "algorithm": ENGINE | {"use_kl_loss": True, "kl_loss_coef": 0.0, "advantage_estimator": "gspo"},
        "data": {"global_batch_size": 12, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 60},
    }
    config = make_config(model_dir, LINEAR_ADAM, **sections)
    with running_worker(config) as worker:
        with pytest.raises(DataError, match=r"sample 0 carries no rollout_routed_experts, which --use-rollout-routing"):
            worker.train(replace(BATCH, rollout_routed_experts=None))
        with watched_routers(worker) as choices:
            metrics = worker.train(BATCH)
    assert BATCH.rollout_routed_experts is not None
    for tokens, routes in zip(BATCH.tokens, BATCH.rollout_routed_experts, strict=True):
        for t in range(len(tokens) - 1):
            for layer in (1, 2):
                used = choices.training[layer, tuple(tokens[: t + 1].tolist())]
                assert set(used) == {frozenset(routes[t, layer].tolist())}
    _, log_probs = forced_log_probs(model_dir, BATCH, forced=True)
    assert metrics["rollout/log_probs"] == pytest.approx(rollout_mean(BATCH, log_probs).item(), abs=1e-6)
    assert metrics["train/ppo_kl"] == pytest.approx(0, abs=1e-7)
    _, free = forced_log_probs(model_dir, BATCH, forced=False)
    assert metrics["rollout/ref_log_probs"] == pytest.approx(rollout_mean(BATCH, free).item(), abs=1e-6)
    assert abs(metrics["rollout/ref_log_probs"] - metrics["rollout/log_probs"]) > 1e-4


def test_gradients_flow_through_the_gates_of_the_replayed_experts(model_dir: Path) -> None:
    sections = {"algorithm": ENGINE, "data": {"global_batch_size": 12, "micro_batch_size": 5}}
    metrics = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[BATCH])).metrics[0]
    model, log_probs = forced_log_probs(model_dir, BATCH, forced=True)
    # The ratio is 1 with the gradient of the log-prob.
    terms = [-reward * (x - x.detach()).exp() for reward, x in zip(BATCH.rewards, log_probs, strict=True)]
    rollout_mean(BATCH, terms).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item()
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert model.model.layers[1].mlp.gate.weight.grad.abs().max() > 1e-4  # type: ignore[union-attr]


DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
PACKINGS: dict[str, dict[str, Any]] = {
    "repacked": {"data": DYNAMIC | {"log_probs_max_tokens_per_gpu": 25}},
    "shared_prompts_recomputed": {"data": {"micro_batch_size": 13}, "argv": RECOMPUTE},
}


@pytest.mark.parametrize("replayed", [OWN, ENGINE], ids=["own", "engine"])
def test_results_do_not_depend_on_packing(model_dir: Path, replayed: dict[str, Any]) -> None:
    def outcome(*, data: dict[str, Any] | None = None, argv: tuple[str, ...] = (), share: bool | None = None) -> Any:
        sections = {
            "algorithm": replayed | {"use_tis": True},
            "data": {"global_batch_size": 6} | (data or {}),
            "train": SHIFT | {"share_prompt_prefix": share},
        }
        return run_case(model_dir, Case(argv=(*LINEAR_ADAM, *argv), sections=sections, batches=[BATCH]))

    alone = outcome(share=False)
    for packing in PACKINGS.values():
        assert_same_training(outcome(**packing), alone, weights=5e-6)
