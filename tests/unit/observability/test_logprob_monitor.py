"""What the operator is told when trainer and engine drift apart; planted causes are in the integration tests."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, replace

import pytest
import torch

from slime.algorithms.logprob_pattern import DifferencePattern, pattern_sums, read_pattern
from slime.errors import TrainerError
from slime.observability.logprob_diagnosis import (
    Cause,
    LogprobEvidence,
    LogprobFacts,
    SideFacts,
    describe,
    diagnose,
    pattern_of,
)
from slime.observability.logprob_monitor import DIFF_KEY, PATTERN_PREFIX, PROMPT_KEY, STALE_KEY, LogprobMonitor

SIDE = SideFacts(precision="fp32", quantized="", rope_base=1e6, rope_scaling="none", norm_epsilon=1e-6)
EQUAL = LogprobFacts(trainer=SIDE, engine=SIDE)
NOISE = DifferencePattern(
    mean=0.01,
    largest=0.06,
    one_sidedness=0.02,
    early=0.011,
    late=0.01,
    temperature_ratio=1.0,
    temperature_fit=0.01,
)


def ranked(facts: LogprobFacts, evidence: LogprobEvidence) -> list[str]:
    return [cause.name for cause in diagnose(facts, evidence) if cause.score >= 0.05]


def score(causes: list[Cause], name: str) -> float:
    return next(cause.score for cause in causes if cause.name == name)


def test_what_both_sides_agree_on_is_ruled_out() -> None:
    causes = diagnose(EQUAL, LogprobEvidence(pattern=NOISE))
    assert {c.name for c in causes if c.score == 0} >= {"rope", "norm epsilon", "precision", "truncation"}
    assert "ruled out: " in describe(causes)
    nothing_left, ruled_out = describe([replace(cause, score=0.0) for cause in causes]).splitlines()
    assert nothing_left.startswith("  none of the causes known here")
    assert ruled_out.count(", ") == len(causes) - 1


def test_unknown_settings_stay_possible() -> None:
    names = ranked(LogprobFacts(trainer=SIDE), LogprobEvidence(pattern=replace(NOISE, one_sidedness=0.5, mean=0.3)))
    assert {"rope", "norm epsilon", "precision"} <= set(names)
    assert "temperature" not in names


def test_a_different_setting_is_proof_whatever_the_pattern() -> None:
    facts = LogprobFacts(trainer=SIDE, engine=replace(SIDE, rope_base=1e4, norm_epsilon=1e-5))
    causes = diagnose(facts, LogprobEvidence(pattern=NOISE))
    assert {causes[0].name, causes[1].name} == {"rope", "norm epsilon"}
    assert causes[0].score == causes[1].score == 1.0


def test_both_sides_in_half_precision_may_round_differently() -> None:
    half = replace(SIDE, precision="bf16")
    noise = LogprobEvidence(pattern=NOISE)
    assert ranked(LogprobFacts(trainer=half, engine=half), noise) == ["precision"]
    quantized = diagnose(LogprobFacts(trainer=half, engine=replace(half, quantized="fp8 weights")), noise)
    assert quantized[0].name == "precision"
    assert "with fp8 weights" in quantized[0].evidence
    assert quantized[0].score > score(diagnose(LogprobFacts(trainer=half, engine=half), noise), "precision")


def test_growth_along_the_response_points_to_the_rope_of_an_unknown_engine() -> None:
    growing = replace(NOISE, mean=0.3, early=0.1, late=0.4, one_sidedness=0.4)
    assert ranked(LogprobFacts(trainer=SIDE), LogprobEvidence(pattern=growing))[0] == "rope"


def test_another_number_of_prompt_tokens_is_proof() -> None:
    causes = diagnose(EQUAL, LogprobEvidence(pattern=NOISE, prompt_mismatch=0.25))
    assert causes[0].name == "prompt"
    assert "25% of the samples" in causes[0].evidence


def test_old_weights_are_expected_when_rollouts_are_generated_ahead() -> None:
    evidence = LogprobEvidence(pattern=NOISE, stale_share=1.0)
    inside, ahead = diagnose(EQUAL, evidence), diagnose(replace(EQUAL, generated_ahead=True), evidence)
    assert score(inside, "stale weights") > 0.9 > score(ahead, "stale weights") >= 0.5
    assert "--async-buffer-size" in describe(ahead)
    assert "--async-buffer-size" not in describe(inside)


@pytest.mark.parametrize(
    ("history", "grew"), [((0.01, 0.02, 0.04), True), ((0.04, 0.02, 0.04), False), ((0.1,), False)]
)
def test_only_growth_from_rollout_to_rollout_counts_as_drift(history: tuple[float, ...], grew: bool) -> None:
    assert ("stale weights" in ranked(EQUAL, LogprobEvidence(pattern=NOISE, history=history))) is grew


@pytest.mark.parametrize("top_k", [3, 10])
def test_renormalisation_of_one_side_is_told_by_its_sign(top_k: int) -> None:
    """The engine reports log-probs of the top-k distribution that it samples, the trainer those of the whole one."""
    generator = torch.Generator().manual_seed(0)
    trainer = torch.log_softmax(2 * torch.randn(500, 40, generator=generator, dtype=torch.float64), -1)
    kept = trainer.topk(top_k)
    engine = torch.log_softmax(kept.values, -1)
    choice = torch.multinomial(engine.exp(), 1, generator=generator)
    tokens = kept.indices.gather(1, choice)
    entropy = -(trainer.exp() * trainer).sum(-1)
    sums, largest = pattern_sums(
        trainer.gather(1, tokens)[:, 0], engine.gather(1, choice)[:, 0], entropy, torch.ones(500), [500]
    )
    evidence = LogprobEvidence(pattern=read_pattern(sums.tolist(), float(largest)))
    asked = replace(EQUAL, truncation=f"--rollout-top-k {top_k}")
    assert ranked(asked, evidence)[0] == "truncation"
    assert "engine's log-probs are larger" in diagnose(asked, evidence)[0].evidence
    # Also when nobody asked for it: an engine may take top-k from generation_config.json.
    assert ranked(EQUAL, evidence)[0] == "truncation"


def test_a_pattern_travels_through_metrics() -> None:
    metrics = {f"{PATTERN_PREFIX}{name}": value for name, value in asdict(NOISE).items()}
    assert pattern_of(metrics, PATTERN_PREFIX) == NOISE
    assert pattern_of({}, PATTERN_PREFIX) is None
    assert "temperature" in ranked(EQUAL, LogprobEvidence())  # not measured is not ruled out


def monitor(bound: float | None = 0.01, *, stop: bool = False, asked: list[int] | None = None) -> LogprobMonitor:
    def facts() -> LogprobFacts:
        if asked is not None:
            asked.append(1)
        return EQUAL

    return LogprobMonitor(bound, stop=stop, facts=facts)


def test_the_bound_warns_or_stops(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[int] = []
    warning, stopping = monitor(asked=asked), monitor(stop=True)
    warning.check(0, {DIFF_KEY: 0.009})
    stopping.check(0, {DIFF_KEY: 0.009})
    assert not asked
    for difference in (0.02, math.nan):
        caplog.clear()
        warning.check(1, {DIFF_KEY: difference})
        assert f"differ by {difference:.3g} on average, above --max-logprob-diff 0.01" in caplog.text
        with pytest.raises(TrainerError, match="--max-logprob-diff"):
            stopping.check(1, {DIFF_KEY: difference})
    assert len(asked) == 1


def test_without_a_bound_or_a_difference_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    monitor(None).check(0, {DIFF_KEY: 5.0})
    monitor(stop=True).check(0, {"train/loss": 5.0})
    assert not caplog.text


def test_evidence_is_taken_from_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    watching = monitor()
    with caplog.at_level(logging.WARNING):
        watching.check(0, {DIFF_KEY: 0.5, STALE_KEY: 0.5, PROMPT_KEY: 0.75})
    assert "  1. prompt: in 75% of the samples" in caplog.text
    assert "  2. stale weights: 50% of the samples" in caplog.text
    caplog.clear()
    for step, difference in enumerate((0.6, 0.7, 1.1), start=1):
        watching.check(step, {DIFF_KEY: difference})
    assert "the difference grew from 0.5 to 1.1 over the last 4 rollouts" in caplog.text
