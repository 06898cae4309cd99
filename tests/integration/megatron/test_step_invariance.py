"""Training does not depend on how a batch is cut, ordered or packed, nor on what is recomputed."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.types import RolloutBatch
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.workers import LINEAR_ADAM, Case, Outcome, assert_same_training, run_case

pytestmark = pytest.mark.timeout(180)

BATCH = make_rollout()
ALGORITHM = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "entropy_coef": 0.01}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen2")


def case(
    *,
    data: dict[str, Any] | None = None,
    batch: RolloutBatch = BATCH,
    train: dict[str, Any] | None = None,
    argv: tuple[str, ...] = (),
    **more: Any,
) -> Case:
    sections = {
        "algorithm": ALGORITHM | {"use_tis": True} | more,
        "data": {"global_batch_size": 6} | (data or {}),
        "train": train or {},
    }
    return Case(argv=(*LINEAR_ADAM, *argv), sections=sections, batches=[batch, replace(batch, rollout_id=1)])


@pytest.fixture(scope="module")
def one_by_one(model_dir: Path) -> Outcome:
    """Micro-batches of one sample, prompts not shared, the head on all logits at once."""
    return run_case(model_dir, case(train={"share_prompt_prefix": False}))


DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60}
VARIANTS: dict[str, dict[str, Any]] = {
    "micro_batch_of_4": {"data": {"micro_batch_size": 4}, "train": {"share_prompt_prefix": False}},
    "shared_prompts": {"data": {"micro_batch_size": 13}},
    "dynamic": {"data": DYNAMIC, "train": {"share_prompt_prefix": False}},
    "dynamic_shared": {"data": DYNAMIC},
    "own_cap_for_scoring": {"data": DYNAMIC | {"log_probs_max_tokens_per_gpu": 25}},
    "recomputed_loss": {"data": DYNAMIC, "train": {"recompute_loss_function": True}},
    "recomputed_loss_in_chunks": {
        "data": DYNAMIC,
        "train": {"recompute_loss_function": True, "log_probs_chunk_size": 3},
    },
    "recomputed_layers": {
        "data": DYNAMIC,
        "argv": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    },
    "recomputed_attention": {"data": DYNAMIC, "argv": ("--recompute-granularity", "selective")},
    "chunks": {"data": DYNAMIC, "train": {"log_probs_chunk_size": 2}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_same_training(name: str, model_dir: Path, one_by_one: Outcome) -> None:
    assert_same_training(run_case(model_dir, case(**VARIANTS[name])), one_by_one)


def test_order_of_samples_does_not_matter(model_dir: Path) -> None:
    # One step takes the whole batch, since the order decides which rollouts share a step.
    data = DYNAMIC | {"global_batch_size": 12}
    order = np.random.default_rng(0).permutation(len(BATCH)).tolist()
    columns = {f.name: getattr(BATCH, f.name) for f in fields(BATCH)}
    shuffled = RolloutBatch(**{k: [v[i] for i in order] if isinstance(v, list) else v for k, v in columns.items()})
    want = run_case(model_dir, case(data=data))
    assert_same_training(run_case(model_dir, case(data=data, batch=shuffled)), want)


def with_empty_responses(batch: RolloutBatch, samples: set[int]) -> RolloutBatch:
    """Some samples lose their response: a prompt that filled the context."""
    lengths = [0 if i in samples else n for i, n in enumerate(batch.response_lengths)]
    removed = [n - kept for n, kept in zip(batch.response_lengths, lengths, strict=True)]
    masks = [m[:n] for m, n in zip(batch.loss_masks, lengths, strict=True)]
    sums = dict.fromkeys(batch.rollout_ids, 0.0)
    for rollout, mask in zip(batch.rollout_ids, masks, strict=True):
        sums[rollout] += float(mask.sum())
    return replace(
        batch,
        tokens=[t[: len(t) - n] for t, n in zip(batch.tokens, removed, strict=True)],
        response_lengths=lengths,
        loss_masks=masks,
        rollout_log_probs=[p[:n] for p, n in zip(batch.rollout_log_probs or [], lengths, strict=True)],
        rollout_mask_sums=[sums[r] for r in batch.rollout_ids],
    )


@pytest.mark.parametrize("per_token", [False, True])
def test_a_micro_batch_without_any_response_token_adds_nothing(model_dir: Path, per_token: bool) -> None:
    batch = with_empty_responses(BATCH, {3, 4, 5, 11})
    more = {"batch": batch, "calculate_per_token_loss": per_token}
    alone = run_case(model_dir, case(train={"share_prompt_prefix": False}, data={"micro_batch_size": 1}, **more))
    among_others = run_case(model_dir, case(data={"micro_batch_size": 13}, **more))
    assert_same_training(alone, among_others)
    assert alone.metrics[0]["train/grad_norm"] > 0


def test_two_runs_are_identical(model_dir: Path) -> None:
    first, second = (run_case(model_dir, case(data=DYNAMIC)) for _ in range(2))
    for mine, theirs in zip(first.metrics, second.metrics, strict=True):
        assert {k: v for k, v in mine.items() if not k.startswith("perf/")} == {
            k: v for k, v in theirs.items() if not k.startswith("perf/")
        }
    assert all(first.weights[k].equal(second.weights[k]) for k in first.weights)


def test_bf16_shared_and_unshared_agree_in_bf16_precision(model_dir: Path) -> None:
    half = {"precision": "bf16"}
    shared = run_case(model_dir, case(data=DYNAMIC, train=half))
    plain = run_case(model_dir, case(train=half | {"share_prompt_prefix": False}))
    for key in ("train/loss", "train/entropy_loss", "rollout/log_probs", "train/grad_norm"):
        assert shared.metrics[0][key] == pytest.approx(plain.metrics[0][key], rel=2e-2, abs=2e-2)
    assert abs(shared.steps[0][0]["train/ppo_kl"]) < 1e-6
