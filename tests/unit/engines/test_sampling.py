"""The sampler against a slow float64 reference, parameter by parameter."""

from typing import Any

import numpy as np
import pytest
import torch

from slime.engines.api import parse_sampling_params
from slime.engines.embedded.sampling import SampleRow, sample, uniform

VOCAB = 300  # no multiple of the sampler's block size


def row(position: int = 0, seed: int = 0, **options: Any) -> SampleRow:
    extras = {k: options.pop(k) for k in ("banned", "counts", "seen", "top", "wants_kept") if k in options}
    return SampleRow(parse_sampling_params(options), seed, position, **extras)


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def reference_distribution(logits: torch.Tensor, r: SampleRow) -> np.ndarray:
    """``[V]`` float64 probabilities that the row is to be drawn from, by the definition of each parameter."""
    z = logits.double().numpy().copy()
    p = r.params
    for token in range(VOCAB):
        if r.seen is not None and r.counts is not None:
            if r.seen[token]:
                z[token] = z[token] / p.repetition_penalty if z[token] > 0 else z[token] * p.repetition_penalty
            z[token] -= p.frequency_penalty * float(r.counts[token]) + p.presence_penalty * float(r.counts[token] > 0)
        if token in r.banned:
            z[token] = -np.inf
    if p.temperature == 0:
        return np.eye(VOCAB)[int(np.argmax(z))]
    probs = np.exp(z / p.temperature - np.max(z / p.temperature))
    probs /= probs.sum()
    order = np.argsort(-probs)
    keep = np.zeros(VOCAB, dtype=bool)
    before = 0.0
    for rank, token in enumerate(order):
        inside_k = p.top_k == -1 or rank < p.top_k
        inside_p = before < p.top_p
        inside_min = probs[token] >= p.min_p * probs[order[0]]
        keep[token] = rank == 0 or (inside_k and inside_p and inside_min)
        before += probs[token]
    kept = np.where(keep, probs, 0.0)
    return kept / kept.sum()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature below one": {"temperature": 0.6},
    "temperature above one": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k one": {"top_k": 1},
    "top_k wider than the first look": {"top_k": 100, "temperature": 2.0},
    "top_p": {"top_p": 0.7},
    "top_p on a flat distribution": {"top_p": 0.95, "temperature": 5.0},
    "min_p": {"min_p": 0.1},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "banned": {"banned": [3, 17]},
    "greedy": {"temperature": 0.0},
    "greedy with a ban": {"temperature": 0.0, "banned": list(range(0, 300, 2))},
}


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_reference_distribution(case: str) -> None:
    draws = 4000
    logits = random_logits(1, seed=len(case))
    rows = [row(position=i, **dict(CASES[case])) for i in range(draws)]
    expected = reference_distribution(logits[0], rows[0])
    result = sample(logits.expand(draws, VOCAB), rows)
    counts = np.bincount(result.tokens, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Chi-square over tokens expected often enough; its mean is the degrees of freedom, its variance twice that.
    frequent = expected * draws >= 5
    degrees = max(int(frequent.sum()) - 1, 1)
    statistic = (((counts - draws * expected) ** 2)[frequent] / (draws * expected)[frequent]).sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 5


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 0.8}, {"presence_penalty": 1.5}, {"repetition_penalty": 1.4}, {"repetition_penalty": 0.7}],
)
def test_penalties_follow_the_reference(penalty: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 3, (VOCAB,), generator=generator).float()
    seen = (counts > 0) | (torch.rand(VOCAB, generator=generator) < 0.2)
    logits = random_logits(1, scale=1.5)
    rows = [row(position=i, counts=counts, seen=seen, top_k=10, **penalty) for i in range(3000)]
    expected = reference_distribution(logits[0], rows[0])
    drawn = np.bincount(sample(logits.expand(3000, VOCAB), rows).tokens, minlength=VOCAB) / 3000
    assert drawn[expected == 0].sum() == 0
    assert np.abs(drawn - expected).max() < 0.04


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.8])
def test_log_probs_are_of_the_model_at_that_temperature(temperature: float) -> None:
    logits = random_logits(4)
    counts, seen = torch.ones(VOCAB), torch.ones(VOCAB, dtype=torch.bool)
    rows = [
        row(temperature=temperature),
        row(temperature=temperature, top_k=3),
        row(temperature=temperature, top_p=0.5, min_p=0.1),
        row(temperature=temperature, frequency_penalty=1.0, counts=counts, seen=seen),
    ]
    result = sample(logits, rows)
    expected = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
    for i, token in enumerate(result.tokens):
        assert result.log_probs[i] == pytest.approx(float(expected[i, token]), abs=1e-5)


def test_draws_do_not_depend_on_the_batch() -> None:
    logits = random_logits(6)
    rows = [row(seed=i, position=i * 7, **options) for i, options in enumerate([{}, {"top_p": 0.8}, {"top_k": 4}] * 2)]
    together = sample(logits, rows).tokens
    alone = [sample(logits[i : i + 1], [rows[i]]).tokens[0] for i in range(6)]
    backwards = sample(logits.flip(0), rows[::-1]).tokens[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.6},
        {"top_k": 7, "temperature": 1.4},
        {"top_p": 0.9, "top_k": 30, "min_p": 0.05},
        {"temperature": 0.0},
        {"top_p": 0.8, "banned": (3, 4), "temperature": 3.0},
    ],
)
def test_kept_sets_are_what_was_drawn_from(options: dict[str, Any]) -> None:
    logits = random_logits(4)
    rows = [row(wants_kept=True, seed=i, **options) for i in range(4)]
    result = sample(logits, rows)
    for i, token in enumerate(result.tokens):
        expected = reference_distribution(logits[i], rows[i])
        kept = result.kept[i]
        assert token in kept.ids
        assert sorted(kept.ids) == np.flatnonzero(expected).tolist()
        np.testing.assert_allclose(kept.log_probs, np.log(expected[kept.ids]), atol=1e-5)
        assert kept.drawn_log_prob == pytest.approx(np.log(expected[token]), abs=1e-5)


def test_a_draw_that_nothing_is_cut_from_keeps_no_list() -> None:
    logits = random_logits(1)
    result = sample(logits, [row(wants_kept=True, temperature=1.3)])
    kept = result.kept[0]
    assert (kept.ids, kept.log_probs) == ([], [])
    assert kept.drawn_log_prob == pytest.approx(result.log_probs[0])


def test_likeliest_tokens_are_reported() -> None:
    logits = random_logits(3)
    result = sample(logits, [row(top_p=0.6), row(), row(top=4)])
    assert result.kept == {}
    assert result.top.keys() == {2}
    values, ids = torch.log_softmax(logits[2], -1).topk(4)
    assert result.top[2][1] == ids.tolist()
    assert result.top[2][0] == pytest.approx(values.tolist())


def test_uniform_is_uniform_and_uncorrelated() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert np.abs(np.histogram(numbers, bins=20, range=(0, 1))[0] - 2000).max() < 250
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02


def test_a_number_next_to_one_draws_a_possible_token() -> None:
    from slime.engines.embedded.sampling import _draw

    probs = torch.zeros(2, VOCAB)
    probs[0, :3] = torch.tensor([0.2, 0.3, 0.5])
    probs[1, 299] = 1.0
    almost = torch.tensor([1 - 2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert _draw(probs, almost).tolist() == [2, 299]
    assert _draw(probs, torch.zeros(2, dtype=torch.float64)).tolist() == [0, 299]
