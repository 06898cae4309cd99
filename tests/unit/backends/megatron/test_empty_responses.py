"""A prompt that fills the context leaves no room for a response; such a sample still has its place in a batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron import cpu

cpu.install()

from slime.backends.megatron.batches import RowSettings, build_micro_batch, packing_lengths  # noqa: E402
from slime.data.batch import build_rollout_batch  # noqa: E402
from slime.types import RolloutBatch, Sample, Status  # noqa: E402
from tests.unit.backends.megatron.test_batches import place  # noqa: E402

PROMPT = list(range(20, 30))


def make_batch() -> RolloutBatch:
    args = SimpleNamespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
        overlong_buffer_len=None,
        overlong_penalty_factor=1.0,
        rollout_max_response_len=16,
        reward_key=None,
        custom_reward_post_process_path=None,
        custom_convert_samples_to_train_data_path=None,
    )
    lengths = [3, 0, 2, 0]
    samples = [
        Sample(
            index=i,
            group_index=i // 2,
            tokens=PROMPT + list(range(40, 40 + length)),
            response_length=length,
            rollout_log_probs=[-1.0] * length or None,
            reward=float(i % 2),
            status=Status.COMPLETED if length else Status.TRUNCATED,
        )
        for i, length in enumerate(lengths)
    ]
    return build_rollout_batch(args, 0, [samples[:2], samples[2:]])


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("samples", [[0, 1, 2, 3], [1], [1, 3], [1, 0]])
def test_micro_batches_take_empty_responses(share: bool, every: bool, samples: list[int]) -> None:
    batch = make_batch()
    settings = RowSettings(share_prompts=share and not every, every_position=every, multiple=1, dtype=torch.float32)
    micro_batch = build_micro_batch(batch, samples, settings, place())
    assert sorted(micro_batch.samples) == sorted(samples)
    assert micro_batch.num_response_tokens == sum(batch.response_lengths[i] for i in samples)
    expected = [t for i in micro_batch.samples for t in batch.tokens[i][len(PROMPT) :].tolist()]
    assert micro_batch.targets.tolist() == expected
    column = {i: torch.full((batch.response_lengths[i],), float(i)) for i in samples}
    back = micro_batch.unflatten(micro_batch.flatten(column))
    assert all(torch.equal(back[i], column[i]) for i in samples)


@pytest.mark.parametrize("share", [False, True])
def test_the_planner_counts_their_tokens(share: bool) -> None:
    lengths = packing_lengths(make_batch(), share_prompts=share)
    assert lengths.tokens([1]) == len(PROMPT)
    assert lengths.tokens([0, 1]) == (len(PROMPT) + 3 if share else 2 * len(PROMPT) + 3)
