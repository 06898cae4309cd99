"""The policy loss of a micro-batch and the advantages before it: devices, placeholders, users' functions, masked KL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slime.backends.megatron import cpu

cpu.install()

from slime.backends.megatron.batches import MicroBatch, RowSettings, build_micro_batch  # noqa: E402
from slime.backends.megatron.hooks import TrainHooks  # noqa: E402
from slime.backends.megatron.logprobs import TokenScores  # noqa: E402
from slime.backends.megatron.loss import LossContext, policy_loss  # noqa: E402
from slime.backends.megatron.rollout_columns import RolloutColumns  # noqa: E402
from slime.backends.megatron.scoring import compute_advantages  # noqa: E402
from slime.config import AlgorithmConfig, ArgsView, Config  # noqa: E402
from tests.support.rollouts import make_rollout  # noqa: E402
from tests.support.training import place  # noqa: E402

BATCH = make_rollout(num_groups=2, group_size=3, fan_out=False)
SAMPLES = list(range(len(BATCH)))
EVERYTHING = {
    "use_tis": True,
    "tis_batch_normalize": True,
    "use_rs": True,
    "rs_veto_threshold": 1e-3,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.1,
    "use_opsm": True,
    "eps_clip_c": 3.0,
}


def columns() -> RolloutColumns:
    generator = torch.Generator().manual_seed(1)

    def column() -> dict[int, torch.Tensor]:
        return {i: -torch.rand(BATCH.response_lengths[i], generator=generator) for i in SAMPLES}

    found = RolloutColumns.of(BATCH, SAMPLES, torch.device("cpu"))
    return replace(
        found,
        rollout_log_probs=column(),
        old_log_probs=column(),
        ref_log_probs=column(),
        advantages=column(),
        opd_reverse_kl=column(),
        values=column(),
    )


def micro_batch(samples: list[int]) -> MicroBatch:
    settings = RowSettings(share_prompts=False, every_position=False, multiple=1, dtype=torch.float32)
    return build_micro_batch(BATCH, samples, settings, place())


def context(hooks: dict[str, Any] | None = None, **algorithm: Any) -> LossContext:
    config = Config(algorithm=AlgorithmConfig(**algorithm))
    return LossContext(
        config=config,
        hooks=TrainHooks(args=ArgsView(config), **(hooks or {})),
        batch=BATCH,
        columns=columns(),
        weight_normaliser=0.5,
    )


def scores(row: MicroBatch) -> TokenScores:
    log_probs = torch.full((row.num_response_tokens,), -0.7, requires_grad=True)
    return TokenScores(log_probs=log_probs, entropy=log_probs * -1)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_every_metric_is_on_the_device_of_the_tokens(estimator: str) -> None:
    row = micro_batch([0, 1])
    given, found = context(**EVERYTHING, advantage_estimator=estimator), scores(row)
    with torch.device("meta"):  # what is made without a device lands there
        objective = policy_loss(given, row, found)
    kinds = (objective.sums, objective.maxima, objective.minima, objective.histograms)
    assert "batch_norm_factor" in objective.maxima
    assert {name for kind in kinds for name, value in kind.items() if value.is_meta} == set()
    assert not objective.loss.is_meta


def mean_of_tokens(total_lengths: Any, response_lengths: Any, loss_masks: Any, per_token: bool) -> Any:
    mask = torch.cat(list(loss_masks))
    return lambda x: (x * mask).sum() / mask.sum()


def test_a_placeholder_stays_out_of_a_users_mean() -> None:
    row = micro_batch([])
    given, found = context({"pg_loss_reducer": mean_of_tokens}), scores(row)
    loss = policy_loss(given, row, found).loss
    loss.backward()
    assert loss.item() == 0.0
    assert found.log_probs.grad is not None
    assert found.log_probs.grad.tolist() == [0.0]
    assert policy_loss(given, micro_batch([0]), scores(micro_batch([0]))).loss.isfinite()


def test_who_names_metrics() -> None:
    assert not context().has_metrics_of_users
    assert context({"tis": mean_of_tokens}).has_metrics_of_users
    assert context({"loss": mean_of_tokens}).has_metrics_of_users


@pytest.mark.parametrize("estimator", ["ppo", "rloo", "reinforce_plus_plus"])
@pytest.mark.parametrize("written_by_others", [0.0, -50.0, float("-inf")])
def test_engine_log_probs_of_tokens_that_others_wrote_do_not_reach_advantages(
    estimator: str, written_by_others: float
) -> None:
    sample = max(SAMPLES, key=lambda i: BATCH.response_lengths[i])

    def advantages(value: float) -> list[float]:
        given = columns()
        length = BATCH.response_lengths[sample]
        mask = torch.ones(length)
        mask[length // 2] = 0
        assert given.rollout_log_probs is not None
        given.masks[sample] = mask
        given.rollout_log_probs[sample][length // 2] = value
        algorithm = AlgorithmConfig(advantage_estimator=estimator, kl_coef=0.1, use_rollout_logprobs=True)  # type: ignore[arg-type]
        compute_advantages(Config(algorithm=algorithm), BATCH, given, [sample], place())
        assert given.advantages is not None
        return given.advantages[sample][mask.bool()].tolist()

    assert advantages(written_by_others) == advantages(-0.5)
