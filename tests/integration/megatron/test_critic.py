"""The critic and a whole PPO step against float64 over transformers, and the critic under other layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.types import RolloutBatch
from tests.support.gloo import Rank, run_ranks
from tests.support.rollouts import make_rollout, reference_log_probs, rollout_mean
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config, make_critic_config
from tests.support.workers import LEARNING_RATE, LINEAR_ADAM, free_ports, running_worker, weights_of

pytestmark = pytest.mark.timeout(300)

VALUE_CLIP = 0.3
KL_COEF, GAMMA, LAMBD = 0.05, 0.9, 0.8
DATA = {"global_batch_size": 11, "micro_batch_size": 4}


def awkward_rollout() -> RolloutBatch:
    """Ragged groups, a rollout of two samples, a wholly masked sample, responses of one token, masked infinities."""
    full = make_rollout(seed=3)
    kept = [i for i in range(len(full)) if i != 7]
    columns = {
        name: [getattr(full, name)[i] for i in kept]
        for name in (
            "tokens", "response_lengths", "loss_masks", "rewards", "raw_rewards", "truncated", "sample_indices",
            "group_ids", "rollout_ids", "rollout_mask_sums", "weight_versions", "rollout_log_probs",
        )
    }  # fmt: skip
    batch = replace(full, **columns)
    masked = next(i for i in kept[:-1] if batch.rollout_ids.count(batch.rollout_ids[i]) == 1)
    batch.loss_masks[masked] = np.zeros_like(batch.loss_masks[masked])
    batch.rollout_mask_sums[masked] = 0.0
    assert 1 in batch.response_lengths
    assert len(set(batch.rollout_ids)) == DATA["global_batch_size"]
    assert {batch.group_ids.count(g) for g in batch.group_ids} == {5, 3, 4}
    return batch


BATCH = awkward_rollout()


def make_value_model(path: Path) -> Path:
    """A checkpoint whose head is already that of a value model."""
    make_tiny_model(path, "qwen3", tie_word_embeddings=True)
    hidden_size = json.loads((path / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(11)
    head = {
        "score.weight": torch.randn(1, hidden_size, generator=generator) * 0.1,
        "score.bias": torch.tensor([0.25]),
    }
    save_file(head, path / "score.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_value_model(tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class ValueModel:
    """transformers' trunk and a linear head, in float64, with all parameters by their checkpoint names."""

    parameters: dict[str, Tensor]
    values: list[Tensor]


def reference_values(model_dir: Path, batch: RolloutBatch, weight: Tensor, bias: Tensor) -> ValueModel:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=torch.float64, attn_implementation="eager")
    weight, bias = (x.double().requires_grad_() for x in (weight, bias))
    values = []
    for row, length in zip(batch.tokens, batch.response_lengths, strict=True):
        hidden = model.model(torch.from_numpy(row.astype(np.int64))[None]).last_hidden_state[0]
        values.append((hidden @ weight[0] + bias)[len(row) - 1 - length : len(row) - 1])
    named = {name: p for name, p in model.named_parameters() if not name.startswith("lm_head")}
    return ValueModel({**named, "score.weight": weight, "score.bias": bias}, values)


def stored_head(model_dir: Path) -> tuple[Tensor, Tensor]:
    head = load_file(model_dir / "score.safetensors")
    return head["score.weight"], head["score.bias"]


def slow_advantages(reward: float, kl: Sequence[float], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Generalised advantages (https://arxiv.org/abs/1506.02438, eq. 16) and returns, token by token from the end."""
    advantages = [0.0] * len(values)
    following_advantage = following_value = 0.0
    for t in reversed(range(len(values))):
        token_reward = -KL_COEF * kl[t] + (reward if t == len(values) - 1 else 0.0)
        delta = token_reward + GAMMA * following_value - values[t]
        advantages[t] = delta + GAMMA * LAMBD * following_advantage
        following_advantage, following_value = advantages[t], values[t]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def slow_mean(batch: RolloutBatch, rows: Sequence[Tensor]) -> Tensor:
    """As ``rollout_mean``; a wholly masked rollout counts with 0."""
    trained = [i for i in range(len(batch)) if batch.rollout_mask_sums[i] > 0]
    share = len({batch.rollout_ids[i] for i in trained}) / len(set(batch.rollout_ids))
    return rollout_mean(batch, rows, trained) * share


def slow_value_loss(values: Sequence[Tensor], old: Sequence[Tensor], returns: Sequence[Tensor]) -> list[Tensor]:
    rows = []
    for v, v_old, r in zip(values, old, returns, strict=True):
        tokens = []
        for t in range(len(v)):
            near = v_old[t] + torch.clamp(v[t] - v_old[t], -VALUE_CLIP, VALUE_CLIP)
            tokens.append(torch.maximum((v[t] - r[t]) ** 2, (near - r[t]) ** 2))
        rows.append(torch.stack(tokens))
    return rows


def gradients(loss: Tensor, parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    found = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, found, strict=True)), float(torch.cat([g.flatten() for g in found]).norm())


def assert_stepped(got: dict[str, Tensor], parameters: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    """Weights after one step of Adam with epsilon 1 from these gradients."""
    assert got.keys() == parameters.keys()
    for name, tensor in got.items():
        step = LEARNING_RATE * grads[name] / (grads[name].abs() + 1)
        torch.testing.assert_close(tensor.double(), parameters[name].detach() - step, atol=1e-6, rtol=1e-6)


def as_rows(columns: Sequence[Tensor]) -> dict[int, np.ndarray]:
    return {i: column.detach().float().numpy() for i, column in enumerate(columns)}


def critic(model_dir: Path, argv: Sequence[str] = LINEAR_ADAM, **sections: Any) -> Any:
    config = make_critic_config(model_dir, argv, **({"algorithm": {"value_clip": VALUE_CLIP}, "data": DATA} | sections))
    return running_worker(config)


def test_values_are_those_of_the_states_that_choose_each_token(model_dir: Path) -> None:
    reference = reference_values(model_dir, BATCH, *stored_head(model_dir))
    with critic(model_dir, rollout={"rollout_temperature": 0.5}) as worker:
        got = worker.score(BATCH)
    assert sorted(got) == list(range(len(BATCH)))
    for i, want in enumerate(reference.values):
        np.testing.assert_allclose(got[i], want.detach(), atol=3e-6)


def test_a_policys_checkpoint_gives_the_trunk_and_the_seed_the_head(model_dir: Path, tmp_path: Path) -> None:
    policy = make_tiny_model(tmp_path, "qwen3", tie_word_embeddings=True)
    with critic(policy) as worker:
        got, weights = worker.score(BATCH), weights_of(worker)
    assert weights["score.weight"].std().item() == pytest.approx(0.02, rel=0.3)
    assert weights["score.bias"].tolist() == [0.0]
    reference = reference_values(policy, BATCH, weights["score.weight"], weights["score.bias"])
    for i, want in enumerate(reference.values):
        np.testing.assert_allclose(got[i], want.detach(), atol=3e-6)
    with critic(policy, argv=(*LINEAR_ADAM, "--seed", "7")) as worker:
        assert not torch.equal(weights_of(worker)["score.weight"], weights["score.weight"])


@pytest.mark.parametrize("per_token", [False, True])
def test_value_loss_gradient_norm_and_weights(model_dir: Path, per_token: bool) -> None:
    reference = reference_values(model_dir, BATCH, *stored_head(model_dir))
    generator = torch.Generator().manual_seed(5)
    # Old values far enough for the clip to take effect on some tokens, not on others.
    old = [v.detach() + torch.randn(len(v), generator=generator) * 0.5 for v in reference.values]
    returns = [v.detach() + torch.randn(len(v), generator=generator) for v in reference.values]
    rows = slow_value_loss(reference.values, old, returns)
    masks = [torch.from_numpy(m).bool() for m in BATCH.loss_masks]
    chosen = torch.cat([row[mask] for row, mask in zip(rows, masks, strict=True)])
    # The count is at least 1 for each sample, so that a wholly masked one is not divided by 0.
    loss = chosen.sum() / (len(chosen) + 1) if per_token else slow_mean(BATCH, rows)
    grads, norm = gradients(loss, reference.parameters)
    clipped = [
        ((o + (v - o).clamp(-VALUE_CLIP, VALUE_CLIP) - r) ** 2 > (v - r) ** 2).double()
        for v, o, r in zip(reference.values, old, returns, strict=True)
    ]
    all_returns = torch.cat([r[m] for r, m in zip(returns, masks, strict=True)])
    all_old = torch.cat([v[m] for v, m in zip(old, masks, strict=True)])
    explained = 1 - (all_returns - all_old).var() / all_returns.var()

    poisoned = [row.masked_fill(~mask, float("inf")) for row, mask in zip(returns, masks, strict=True)]
    algorithm = {"value_clip": VALUE_CLIP, "calculate_per_token_loss": per_token}
    with critic(model_dir, algorithm=algorithm) as worker:
        metrics = worker.train(BATCH, as_rows(old), as_rows(poisoned))
        weights = weights_of(worker)
    assert metrics["critic-train/value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["critic-train/loss"] == metrics["critic-train/value_loss"]
    assert metrics["critic-train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["critic-train/explained_variance"] == pytest.approx(explained.item(), rel=1e-5)
    if not per_token:
        share = slow_mean(BATCH, clipped).item()
        assert metrics["critic-train/value_clipfrac"] == pytest.approx(share, abs=1e-6)
        assert 0.1 < share < 0.9
    assert {"critic-train/lr-pg_0", "critic-train/step", "perf/critic_train_time"} <= metrics.keys()
    assert_stepped(weights, reference.parameters, grads)


def test_a_whole_ppo_step(model_dir: Path, tmp_path: Path) -> None:
    """Values, KL, advantages, returns and both updates, as a rollout goes through the two roles."""
    other = make_tiny_model(tmp_path / "reference", "qwen3", tie_word_embeddings=True, seed=5)
    reference = reference_values(model_dir, BATCH, *stored_head(model_dir))
    policy, log_probs, _ = reference_log_probs(model_dir, BATCH)
    _, ref_log_probs, _ = reference_log_probs(other, BATCH)
    estimated = [
        slow_advantages(BATCH.rewards[i], (log_probs[i] - ref_log_probs[i]).tolist(), reference.values[i].tolist())
        for i in range(len(BATCH))
    ]
    advantages = [torch.tensor(a, dtype=torch.float64) for a, _ in estimated]
    returns = [torch.tensor(r, dtype=torch.float64) for _, r in estimated]
    policy_loss = slow_mean(BATCH, [-(p - p.detach()).exp() * a for p, a in zip(log_probs, advantages, strict=True)])
    value_loss = slow_mean(BATCH, [(v - r) ** 2 for v, r in zip(reference.values, returns, strict=True)])

    algorithm = {"advantage_estimator": "ppo", "kl_coef": KL_COEF, "gamma": GAMMA, "lambd": LAMBD}
    sections = {"algorithm": algorithm | {"value_clip": VALUE_CLIP}, "data": DATA}
    start = {"ref_load": str(other), "load": str(model_dir)}
    with critic(model_dir, **sections) as worker:
        values = worker.score(BATCH)
    config = make_config(model_dir, LINEAR_ADAM, checkpoint=start, **sections)
    with running_worker(config) as worker:
        before = weights_of(worker)
        worker.update_weights()
        worker.estimate(BATCH, values)
        early = worker.returns
        worker.update_weights()
        assert worker.weight_version == 1
        assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(worker).items())
        metrics = worker.train(BATCH, values)
        weights = weights_of(worker)
        found = worker.returns
        worker.update_weights()
        assert worker.weight_version == 2
        for changed, version in ((False, 7), (True, 8)):  # of processes that ended
            worker.continue_version(7, changed)
            worker.update_weights()
            assert worker.weight_version == version
    for i, want in enumerate(returns):
        np.testing.assert_allclose(found[i], want, atol=5e-6)
        np.testing.assert_array_equal(early[i], found[i])
    parameters = dict(policy.named_parameters())
    grads, norm = gradients(policy_loss, parameters)
    assert metrics["train/loss"] == pytest.approx(policy_loss.item(), abs=2e-6)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["rollout/values"] == pytest.approx(slow_mean(BATCH, reference.values).item(), abs=2e-6)
    assert_stepped(weights, parameters, grads)

    with critic(model_dir, **sections) as worker:
        metrics = worker.train(BATCH, values, found)
        weights = weights_of(worker)
    grads, norm = gradients(value_loss, reference.parameters)
    assert metrics["critic-train/value_loss"] == pytest.approx(value_loss.item(), rel=1e-5)
    assert metrics["critic-train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_stepped(weights, reference.parameters, grads)


LAYOUTS: dict[str, Sequence[str]] = {
    "dp2": (),
    "tp2_sp": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "tp2": ("--tensor-model-parallel-size", "2"),
    "pp2": ("--pipeline-model-parallel-size", "2"),
    "cp2": ("--context-parallel-size", "2"),
}


def two_rollouts(rank: Rank | None, model_dir: Path, layout: Sequence[str], num_processes: int) -> Any:
    """Score and train twice; values, metrics, and every weight of this rank's head."""
    data = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 60, "global_batch_size": 5}
    config = make_critic_config(model_dir, (*LINEAR_ADAM, *layout), num_processes=num_processes, data=data)
    generator = torch.Generator().manual_seed(5)
    returns = {i: torch.randn(n, generator=generator).numpy() for i, n in enumerate(BATCH.response_lengths)}
    scores, metrics = [], []
    with running_worker(config, rank) as worker:
        for _ in range(2):
            scores.append(worker.score(BATCH))
            old = {i: np.full(n, 0.1, dtype=np.float32) for i, n in enumerate(BATCH.response_lengths)}
            metrics.append(worker.train(BATCH, old, returns))
        head = {name: p.detach().clone() for name, p in worker.chunks[-1].named_parameters() if "output_layer" in name}
        return scores, metrics, head, weights_of(worker)


def in_every_layout(rank: Rank, model_dir: Path, ports: Sequence[int]) -> dict[str, Any]:
    return {
        name: two_rollouts(Rank(rank.rank, 2, port), model_dir, layout, 2)
        for (name, layout), port in zip(LAYOUTS.items(), ports, strict=True)
    }


def test_layouts_equal_one_process(tmp_path: Path) -> None:
    # A policy's checkpoint: the fresh head has to be the same everywhere too.
    model_dir = make_tiny_model(tmp_path, "llama")
    scores, metrics, _, weights = two_rollouts(None, model_dir, (), 1)
    ranks = run_ranks(2, in_every_layout, model_dir, free_ports(len(LAYOUTS)), timeout_seconds=200)
    for name in LAYOUTS:
        outcomes = [rank[name] for rank in ranks]
        for k in range(2):
            rows = [outcome[0][k] for outcome in outcomes]
            together = rows[0] | rows[1]
            assert len(rows[0]) + len(rows[1]) == len(together), f"{name}: a sample came from two ranks"
            assert together.keys() == scores[k].keys()
            for i, want in scores[k].items():
                np.testing.assert_allclose(together[i], want, atol=3e-6, err_msg=f"{name}: values of sample {i}")
            for key, want in metrics[k].items():
                if key.startswith("critic-train/"):
                    assert outcomes[0][1][k][key] == pytest.approx(want, rel=5e-6, abs=1e-6), (name, k, key)
        for key, tensor in weights.items():
            difference = (outcomes[0][3][key] - tensor).abs().max().item()
            assert difference <= 2e-6, f"{name}: {key} differs by {difference}"
        if name.startswith("tp2"):
            heads = [outcome[2] for outcome in outcomes]
            assert heads[0].keys() == heads[1].keys()
            assert len(heads[0]) == 2
            assert all(torch.equal(heads[0][key], heads[1][key]) for key in heads[0]), f"{name}: heads drift apart"
