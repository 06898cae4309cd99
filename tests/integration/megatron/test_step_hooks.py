"""Users' functions in the training step: the built-in arithmetic, written as hooks, gives the built-in numbers."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.errors import ConfigError, PluginError
from slime.types import RolloutBatch
from tests.support.replay import with_kept_tokens
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.workers import LINEAR_ADAM, Case, Outcome, assert_same_training, run_case

pytestmark = pytest.mark.timeout(180)

BATCH = make_rollout()

PLUGINS = """
import torch
from slime.backends.megatron.established_loss import get_log_probs_and_entropy, vanilla_tis_function

CALLS = []


def loss(args, batch, logits, sum_of_sample_mean):
    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        rollout_top_p_token_ids=batch.get("rollout_top_p_token_ids"),
        rollout_top_p_token_offsets=batch.get("rollout_top_p_token_offsets"),
    )
    log_probs, advantages = torch.cat(found["log_probs"]), torch.cat(batch["advantages"])
    ratio = torch.exp(log_probs - torch.cat(batch["log_probs"]))
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
    pg_loss = sum_of_sample_mean(torch.maximum(-ratio * advantages, -clipped * advantages))
    entropy = sum_of_sample_mean(torch.cat(found["entropy"]))
    return pg_loss - args.entropy_coef * entropy, {"pg_loss": pg_loss, "entropy_loss": entropy}


def advantage(args, rollout_data):
    rows = [torch.full_like(k, r) for k, r in zip(rollout_data["kl"], rollout_data["rewards"])]
    rollout_data["advantages"], rollout_data["returns"] = rows, rows


def lazy_advantage(args, rollout_data):
    pass


def tis(args, **kwargs):
    return vanilla_tis_function(args, **kwargs)


def pg_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(x):
        return sum((a * m).sum() / 5 for a, m in zip(x.split(response_lengths), loss_masks))

    return reduce


def postprocess(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [2 * a for a in rollout_data["advantages"]]


def init(args):
    CALLS.append(("init", args.rollout_temperature))


def before_log_prob(args, model, store_prefix):
    CALLS.append(("log_prob", len(model), store_prefix))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    CALLS.append(("step", rollout_id, step_id))
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    path = tmp_path / "hooks.py"
    path.write_text(textwrap.dedent(PLUGINS))
    return str(path)


def train(model_dir: Path, *, train: dict[str, Any] | None = None, batch: Any = BATCH, **algorithm: Any) -> Outcome:
    sections = {
        "algorithm": {"entropy_coef": 0.01} | algorithm,
        "data": {"global_batch_size": 6, "micro_batch_size": 4},
        "train": train or {},
    }
    return run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[batch]))


@pytest.mark.parametrize("batch", [BATCH, with_kept_tokens(BATCH)], ids=["plain", "truncated sampling"])
def test_custom_loss(model_dir: Path, plugins: str, batch: RolloutBatch) -> None:
    want = train(model_dir, batch=batch)
    got = train(model_dir, batch=batch, loss_type="custom_loss", custom_loss_function_path=f"{plugins}:loss")
    names = ("train/loss", "train/pg_loss", "train/entropy_loss", "train/grad_norm", "rollout/advantages")
    trimmed = [{name: row[name] for name in names} for row in want.metrics]
    assert_same_training(got, replace(want, metrics=trimmed))


def test_custom_advantage(model_dir: Path, plugins: str) -> None:
    got = train(model_dir, custom_advantage_function_path=f"{plugins}:advantage")
    assert_same_training(got, train(model_dir))


def test_custom_tis(model_dir: Path, plugins: str) -> None:
    want = train(model_dir, use_tis=True, tis_clip=0.05)
    got = train(model_dir, use_tis=True, tis_clip=0.05, custom_tis_function_path=f"{plugins}:tis")
    assert_same_training(got, want)
    assert "train/tis_clipfrac" in got.metrics[0]


def test_custom_reducer(model_dir: Path, plugins: str) -> None:
    want = train(model_dir, calculate_per_token_loss=True, entropy_coef=0.0)
    got = train(model_dir, entropy_coef=0.0, custom_pg_loss_reducer_function_path=f"{plugins}:pg_reducer")
    tokens = [
        sum(float(BATCH.loss_masks[i].sum()) for i in range(len(BATCH)) if BATCH.rollout_ids[i] in half)
        for half in (range(6), range(6, 12))
    ]
    ratio = [g["train/pg_loss"] / w["train/pg_loss"] for g, w in zip(got.steps[0], want.steps[0], strict=True)]
    assert ratio[0] == pytest.approx(tokens[0] / 5 / 6, rel=1e-5)
    assert got.steps[0][0]["train/grad_norm"] / want.steps[0][0]["train/grad_norm"] == pytest.approx(ratio[0], rel=1e-5)


def test_rollout_data_postprocess(model_dir: Path, plugins: str) -> None:
    sections = {
        "rollout": {"rollout_data_postprocess_path": f"{plugins}:postprocess"},
        "data": {"global_batch_size": 12},
    }
    got = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections, batches=[BATCH]))
    want = run_case(model_dir, Case(argv=LINEAR_ADAM, sections=sections | {"rollout": {}}, batches=[BATCH]))
    for name in ("train/loss", "train/grad_norm", "rollout/advantages"):
        assert got.metrics[0][name] == pytest.approx(2 * want.metrics[0][name], rel=1e-5)


def test_notifications_come_in_order(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recording_hooks.py").write_text(textwrap.dedent(PLUGINS))
    monkeypatch.syspath_prepend(str(tmp_path))
    train(
        model_dir,
        train={
            "custom_megatron_init_path": "recording_hooks.init",
            "custom_megatron_before_log_prob_hook_path": "recording_hooks.before_log_prob",
            "custom_megatron_before_train_step_hook_path": "recording_hooks.before_train_step",
        },
        use_kl_loss=True,
    )
    import recording_hooks  # type: ignore[import-not-found]

    assert recording_hooks.CALLS == [
        ("init", 1.0),
        ("log_prob", 1, "ref_"),
        ("log_prob", 1, ""),
        ("step", 0, 0),
        ("step", 0, 1),
    ]


def test_faults_name_the_flag(model_dir: Path, plugins: str) -> None:
    with pytest.raises(PluginError, match="--custom-advantage-function-path"):
        train(model_dir, custom_advantage_function_path=f"{plugins}:lazy_advantage")
    with pytest.raises(PluginError, match="--custom-tis-function-path"):
        train(model_dir, use_tis=True, custom_tis_function_path=f"{plugins}:missing")
    with pytest.raises(ConfigError, match="--custom-loss-function-path"):
        train(model_dir, loss_type="custom_loss")
