"""Why trainer and engine log-probs differ: causes ranked by what the run knows and what the data show.

A pure function from facts and evidence to causes. A difference between the two sides' settings is proof and ranks
first; without one the pattern of the differences decides, and what both sides agree on is ruled out. Tests hold:
each cause, planted for real, is ranked first; where the data alone cannot tell two causes apart, both are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slime.algorithms.logprob_pattern import DifferencePattern, is_noise

RULED_OUT = 0.05
"""Causes with a smaller score are listed as ruled out."""

_PROOF = 1.0
_GOOD_FIT = 0.8
_PLAUSIBLE_RATIO = (0.2, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFacts:
    """What one side computes with; None where it is not known.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
        quantized: Quantisation of weights or key-value cache, in the engine's words; empty for none.
        rope_base: Base of the rotary embedding.
        rope_scaling: Its scaling, as ``type factor``; ``none`` for none.
        norm_epsilon: Epsilon of the norms.
    """

    precision: str | None = None
    quantized: str | None = None
    rope_base: float | None = None
    rope_scaling: str | None = None
    norm_epsilon: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobFacts:
    """What the run knows about both sides.

    Args:
        trainer: The trainer's side.
        engine: The engine's side.
        temperature: ``--rollout-temperature``.
        truncation: Sampling truncation that was asked for, such as ``--rollout-top-p 0.9``; empty for none.
        own_generation: Whether a user's function talks to the engine.
        generated_ahead: Whether rollouts are generated ahead of training.
    """

    trainer: SideFacts = field(default_factory=SideFacts)
    engine: SideFacts = field(default_factory=SideFacts)
    temperature: float = 1.0
    truncation: str = ""
    own_generation: bool = False
    generated_ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobEvidence:
    """What one rollout shows.

    Args:
        pattern: How the differences are distributed; None if it was not measured.
        stale_share: Share of samples with tokens of older weights than the engines were given last.
        prompt_mismatch: Share of samples whose prompt had another number of tokens in the engine.
        history: Mean differences of this and the rollouts before, oldest first.
    """

    pattern: DifferencePattern | None = None
    stale_share: float = 0.0
    prompt_mismatch: float = 0.0
    history: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One possible cause.

    Args:
        name: One of ``temperature``, ``prompt``, ``stale weights``, ``precision``, ``rope``, ``norm epsilon``,
            ``truncation``.
        score: 0 ruled out to 1 proven.
        evidence: What speaks for it.
        advice: What to look at.
    """

    name: str
    score: float
    evidence: str
    advice: str


def diagnose(facts: LogprobFacts, evidence: LogprobEvidence) -> list[Cause]:
    """All causes, the most likely first."""
    causes = [
        _temperature(facts, evidence),
        _prompt(facts, evidence),
        _stale(facts, evidence),
        _rope(facts, evidence),
        _epsilon(facts),
        _precision(facts, evidence),
        _truncation(facts, evidence),
    ]
    return sorted(causes, key=lambda cause: -cause.score)


def describe(causes: Sequence[Cause]) -> str:
    """The causes as text, one a line, and what is ruled out."""
    likely = [cause for cause in causes if cause.score >= RULED_OUT]
    lines = [f"  {i + 1}. {cause.name}: {cause.evidence}; {cause.advice}" for i, cause in enumerate(likely)]
    if not likely:
        lines = ["  none of the causes known here; look at generation and at the trainer's model"]
    out = ", ".join(cause.name for cause in causes if cause.score < RULED_OUT)
    return "\n".join([*lines, f"  ruled out: {out}"] if out else lines)


def pattern_of(metrics: Mapping[str, float], prefix: str) -> DifferencePattern | None:
    """The pattern among the metrics of a rollout; None if it was not measured."""
    names = DifferencePattern.__dataclass_fields__
    if any(f"{prefix}{name}" not in metrics for name in names):
        return None
    return DifferencePattern(**{name: metrics[f"{prefix}{name}"] for name in names})


def _temperature(facts: LogprobFacts, evidence: LogprobEvidence) -> Cause:
    pattern = evidence.pattern
    if pattern is None:
        score, shown = 0.2, "not measured"
    else:
        ratio, fit = pattern.temperature_ratio, pattern.temperature_fit
        plausible = _PLAUSIBLE_RATIO[0] < ratio < _PLAUSIBLE_RATIO[1] and abs(ratio - 1) > 0.01
        score = 0.0
        if plausible and fit >= _GOOD_FIT:
            score = 0.95 if facts.own_generation or fit > 0.9 else 0.9
        elif plausible:
            score = fit / 2
        shown = (
            f"an engine temperature of about {facts.temperature / ratio if ratio > 0 else math.inf:.2g} instead of "
            f"{facts.temperature:g} explains {fit:.0%} of the differences"
        )
    return Cause(
        name="temperature",
        score=score,
        evidence=shown,
        advice="the sampling parameters that the engine gets must have --rollout-temperature; a generate function of "
        "your own must pass them on, and an engine must not report log-probs at temperature 1",
    )


def _prompt(facts: LogprobFacts, evidence: LogprobEvidence) -> Cause:
    pattern = evidence.pattern
    score, shown = 0.1 if facts.own_generation else 0.0, "nothing in the data speaks for it"
    if evidence.prompt_mismatch > 0:
        score = _PROOF
        shown = f"in {evidence.prompt_mismatch:.0%} of the samples the engine saw a prompt of another length"
    elif pattern is not None and pattern.late > 0:
        decay = pattern.early / pattern.late
        score = max(score, 0.85 * min(max(decay - 1.2, 0.0), 1.0))
        shown = f"the first tokens of the responses differ {decay:.1f} times as much as their second halves"
    return Cause(
        name="prompt",
        score=score,
        evidence=shown,
        advice="the engine must see the tokens that are trained on: compare chat template, special tokens and "
        "re-tokenised text, and send token ids instead of text",
    )


def _stale(facts: LogprobFacts, evidence: LogprobEvidence) -> Cause:
    share, history = evidence.stale_share, evidence.history
    growing = len(history) >= 3 and all(a < b for a, b in pairwise(history[-3:]))
    grew = growing and history[-1] > 2 * history[0]
    score, shown = 0.0, "every sample was generated with the newest weights"
    if share > 0 and facts.generated_ahead:
        score = 0.5 * share
        shown = f"{share:.0%} of the samples have tokens of older weights, as rollouts are generated ahead"
    elif share > 0:
        score = 0.6 + 0.39 * share
        shown = f"{share:.0%} of the samples have tokens of older weights than the engines were given"
    elif grew:
        score = 0.7
        shown = f"the difference grew from {history[0]:.2g} to {history[-1]:.2g} over the last {len(history)} rollouts"
    advice = "compare the engines' weight versions and checksums with the trainer's, and look for a failed sync"
    if facts.generated_ahead:
        advice = "lower --async-buffer-size or --update-weights-interval to see the difference without it"
    return Cause(name="stale weights", score=score, evidence=shown, advice=advice)


def _rope(facts: LogprobFacts, evidence: LogprobEvidence) -> Cause:
    pairs = {
        "base": (facts.trainer.rope_base, facts.engine.rope_base),
        "scaling": (facts.trainer.rope_scaling, facts.engine.rope_scaling),
    }
    score, shown = _setting(pairs)
    pattern = evidence.pattern
    if 0 < score < _PROOF and pattern is not None and pattern.early < 0.67 * pattern.late:
        score += 0.3
        shown += f", and differences grow along the response, from {pattern.early:.2g} to {pattern.late:.2g}"
    return Cause(
        name="rope",
        score=score,
        evidence=shown,
        advice="rope_theta and rope_scaling in the engine's config.json and Megatron's --rotary-base and rope scaling "
        "must agree",
    )


def _epsilon(facts: LogprobFacts) -> Cause:
    score, shown = _setting({"epsilon": (facts.trainer.norm_epsilon, facts.engine.norm_epsilon)})
    return Cause(
        name="norm epsilon",
        score=score,
        evidence=shown,
        advice="rms_norm_eps in the engine's config.json and Megatron's --norm-epsilon must agree",
    )


def _setting(pairs: Mapping[str, tuple[float | str | None, float | str | None]]) -> tuple[float, str]:
    """Score and words for settings of the trainer and the engine: different, equal, or not known."""
    apart = [f"{name} is {a} in the trainer and {b} in the engine" for name, (a, b) in pairs.items() if _differ(a, b)]
    if apart:
        return _PROOF, ", ".join(apart)
    unknown = [name for name, (a, b) in pairs.items() if a is None or b is None]
    if unknown:
        return 0.3, f"the {' and '.join(unknown)} of one side is not known"
    return 0.0, "both sides agree"


def _differ(a: float | str | None, b: float | str | None) -> bool:
    if a is None or b is None:
        return False
    if isinstance(a, str) or isinstance(b, str):
        return a != b
    return not math.isclose(a, b, rel_tol=1e-6)


def _precision(facts: LogprobFacts, evidence: LogprobEvidence) -> Cause:
    ours, theirs, quantized = facts.trainer.precision, facts.engine.precision, facts.engine.quantized or ""
    noise = evidence.pattern is not None and is_noise(evidence.pattern)
    sides = f"the trainer computes in {ours or 'unknown'}, the engine in {theirs or 'unknown'}"
    sides += f" with {quantized}" if quantized else ""
    if None in (ours, theirs):
        score = 0.5 if noise else 0.15
    elif ours != theirs or quantized:
        score = 0.85 if noise else 0.25
    elif ours == "fp32":
        score = 0.0
    else:
        score = 0.6 if noise else 0.1
    how = "; the differences look like rounding: of both signs, everywhere alike" if noise else ""
    return Cause(
        name="precision",
        score=score,
        evidence=sides + how,
        advice="use one --precision and --sglang-dtype, an unquantised key-value cache and one attention backend, "
        "correct for it with --use-tis, or raise the bound",
    )


def _truncation(facts: LogprobFacts, evidence: LogprobEvidence) -> Cause:
    pattern = evidence.pattern
    one_sided = pattern is not None and abs(pattern.one_sidedness) > 0.98
    asked = facts.truncation or "no truncation of sampling was asked for"
    shown = asked
    if one_sided:
        assert pattern is not None
        larger = "engine's" if pattern.one_sidedness > 0 else "trainer's"
        shown = f"{asked}, and the {larger} log-probs are larger everywhere, as if only it had renormalised"
    score = (0.9 if one_sided else 0.3) if facts.truncation else (0.8 if one_sided else 0.0)
    return Cause(
        name="truncation",
        score=score,
        evidence=shown,
        advice="top-p, top-k or min-p of the engine (also those of generation_config.json) and of the trainer's "
        "log-probs must agree",
    )
