"""The pattern of differences: equal for any split, blind to masked tokens, right about the temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from slime.algorithms.logprob_pattern import EARLY_TOKENS, DifferencePattern, is_noise, pattern_sums, read_pattern

LENGTHS = [9, 1, 14, 3, 5]
COUNT = sum(LENGTHS)


def random_inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trainer = -3 * torch.rand(COUNT, generator=generator)
    engine = trainer + 0.1 * torch.randn(COUNT, generator=generator)
    entropy = 3 * torch.rand(COUNT, generator=generator)
    mask = (torch.rand(COUNT, generator=generator) > 0.3).float()
    return trainer, engine, entropy, mask


def measured(
    trainer: torch.Tensor, engine: torch.Tensor, entropy: torch.Tensor | None = None, mask: torch.Tensor | None = None
) -> DifferencePattern:
    mask = torch.ones(len(trainer)) if mask is None else mask
    lengths = LENGTHS if len(trainer) == COUNT else [len(trainer)]
    sums, largest = pattern_sums(trainer, engine, entropy, mask, lengths)
    return read_pattern(sums.tolist(), float(largest))


def test_equals_a_loop_over_tokens() -> None:
    trainer, engine, entropy, mask = (x.double() for x in random_inputs())
    early, late, everything, x = [], [], [], []
    start = 0
    for length in LENGTHS:
        for position in range(length):
            i = start + position
            if not mask[i]:
                continue
            d = float(engine[i] - trainer[i])
            everything.append(d)
            x.append(float(trainer[i] + entropy[i]))
            if position < EARLY_TOKENS:
                early.append(abs(d))
            if position >= max(length // 2, EARLY_TOKENS):
                late.append(abs(d))
        start += length
    found = measured(trainer, engine, entropy, mask)
    slope = np.dot(x, everything) / np.dot(x, x)
    residual = np.array(everything) - slope * np.array(x)
    assert found.mean == pytest.approx(np.mean(np.abs(everything)))
    assert found.largest == pytest.approx(np.max(np.abs(everything)))
    assert found.one_sidedness == pytest.approx(np.sum(everything) / np.sum(np.abs(everything)))
    assert found.early == pytest.approx(np.mean(early))
    assert found.late == pytest.approx(np.mean(late))
    assert found.temperature_ratio == pytest.approx(1 + slope)
    assert found.temperature_fit == pytest.approx(1 - np.dot(residual, residual) / np.dot(everything, everything))


def test_any_split_into_samples_gives_the_same_sums() -> None:
    columns = random_inputs()
    whole, largest = pattern_sums(*columns[:3], columns[3], LENGTHS)
    parts = [
        pattern_sums(*(c.split(LENGTHS)[i] for c in columns[:3]), columns[3].split(LENGTHS)[i], [n])
        for i, n in enumerate(LENGTHS)
    ]
    assert torch.allclose(whole, torch.stack([sums for sums, _ in parts]).sum(0))
    assert largest == max(top for _, top in parts)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_tokens_may_hold_anything(poison: float) -> None:
    trainer, engine, entropy, mask = random_inputs()
    dirty = [torch.where(mask.bool(), x, torch.full_like(x, poison)) for x in (trainer, engine, entropy)]
    assert measured(*dirty, mask) == measured(trainer, engine, entropy, mask)


def test_nothing_to_compare_is_a_pattern_of_zeros() -> None:
    found = measured(*random_inputs()[:3], torch.zeros(COUNT))
    assert (found.mean, found.largest, found.temperature_fit) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("temperature", [0.8, 0.95, 1.2])
def test_the_temperature_of_sampled_tokens_is_found(temperature: float) -> None:
    """The engine samples softmax(logits / T'), the trainer scores at 1: exact distributions of a random model."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(4000, 50, generator=generator, dtype=torch.float64)
    engine = torch.log_softmax(logits / temperature, -1)
    trainer = torch.log_softmax(logits, -1)
    tokens = torch.multinomial(engine.exp(), 1, generator=generator)
    entropy = -(trainer.exp() * trainer).sum(-1)
    found = measured(trainer.gather(1, tokens)[:, 0], engine.gather(1, tokens)[:, 0], entropy)
    assert 1 / found.temperature_ratio == pytest.approx(temperature, rel=0.05)
    assert found.temperature_fit > 0.9
    assert not is_noise(found)


def test_rounding_is_noise_and_bias_is_not() -> None:
    trainer, _, entropy, _ = random_inputs()
    noise = 0.01 * torch.randn(COUNT, generator=torch.Generator().manual_seed(2))
    assert is_noise(measured(trainer, trainer + noise, entropy))
    assert not is_noise(measured(trainer, trainer + noise.abs(), entropy))
    assert not is_noise(measured(trainer, trainer + 100 * noise, entropy))
