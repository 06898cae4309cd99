"""Supervised fine-tuning from conversations to weights, against the loss that transformers computes from labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.data.batch import build_rollout_batch
from slime.rollout.sft import generate_rollout
from slime.types import RolloutBatch
from tests.support.rollout_args import ListSource, make_args
from tests.support.tiny_models import make_tiny_model
from tests.support.workers import LEARNING_RATE, LINEAR_ADAM, Case, run_case

pytestmark = pytest.mark.timeout(180)

SYSTEM = {"role": "system", "content": "be kind"}


def turn(question: str, answer: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


TALKS = [
    [*turn("hi", "hello"), *turn("more", "no"), *turn("why", "because it is late")],
    [SYSTEM, *turn("q", "a")],
    [SYSTEM, *turn("one", "1", step_loss_mask=0), *turn("two", "22"), {"role": "user", "content": "left open"}],
    turn("x", "y" * 30),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def batch(model_dir: Path) -> RolloutBatch:
    flags = {"rollout_batch_size": 4, "n_samples_per_prompt": 1, "loss_type": "sft_loss"}
    args = make_args(model_dir, "http://127.0.0.1:1", **flags)
    return build_rollout_batch(args, 0, generate_rollout(args, 0, ListSource(TALKS, 1)).samples)


def labels_of(batch: RolloutBatch, i: int) -> torch.Tensor:
    labels = torch.full((len(batch.tokens[i]),), -100)
    mask = torch.from_numpy(batch.loss_masks[i]).bool()
    start = len(labels) - len(mask)
    labels[start:][mask] = torch.from_numpy(batch.tokens[i][start:].astype("int64"))[mask]
    return labels


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("data", "train"),
    [
        ({"micro_batch_size": 1}, {}),
        ({"use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096}, {}),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 4096},
            {"recompute_loss_function": True, "log_probs_chunk_size": 7},
        ),
    ],
    ids=["alone", "packed", "recomputed"],
)
def test_loss_and_weights(
    per_token: bool, data: dict[str, Any], train: dict[str, Any], model_dir: Path, batch: RolloutBatch
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager")
    counts = [float(mask.sum()) for mask in batch.loss_masks]
    assert any(0 < count < length for count, length in zip(counts, batch.response_lengths, strict=True))
    losses = [
        model(torch.from_numpy(row.astype("int64"))[None], labels=labels_of(batch, i)[None]).loss
        for i, row in enumerate(batch.tokens)
    ]
    nll = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    want = nll if per_token else sum(losses) / len(losses)
    want.backward()
    sections = {
        "algorithm": {
            "loss_type": "sft_loss",
            "compute_advantages_and_returns": False,
            "calculate_per_token_loss": per_token,
        },
        "data": {"global_batch_size": 4, **data},
        "train": train,
    }
    outcome = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[batch]))
    metrics = outcome.metrics[0]
    assert metrics["train/loss"] == pytest.approx(want.item(), abs=2e-6)
    assert metrics["train/nll"] == pytest.approx(nll.item(), abs=2e-6)
    assert metrics["train/perplexity"] == pytest.approx(math.exp(nll.item()), rel=1e-5)
    assert not [name for name in metrics if "log_probs_time" in name]
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        step = LEARNING_RATE * gradient / (gradient.abs() + 1)
        torch.testing.assert_close(outcome.weights[name].double(), parameter.detach() - step, atol=2e-6, rtol=1e-6)
