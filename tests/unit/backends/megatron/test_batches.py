"""How samples lie in a row: what is packed once, what is left out, what predicts what."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.backends.megatron import cpu

cpu.install()

from slime.backends.megatron.batches import RowSettings, build_micro_batch, packing_lengths, prompt_lengths  # noqa: E402
from slime.backends.megatron.parallel import ParallelState  # noqa: E402
from slime.errors import DataError  # noqa: E402
from slime.types import RolloutBatch  # noqa: E402
from tests.support.rollouts import make_rollout  # noqa: E402
from tests.support.training import place  # noqa: E402

BATCH = make_rollout(num_groups=2, group_size=3, fan_out=False)
SAMPLES = [0, 3, 1, 5, 2, 4]  # groups interleaved


def settings(*, share: bool, every: bool = False, multiple: int = 1) -> RowSettings:
    return RowSettings(share_prompts=share, every_position=every, multiple=multiple, dtype=torch.float32)


@pytest.mark.parametrize("share", [False, True])
def test_each_response_token_is_predicted_from_the_one_before_it(share: bool) -> None:
    micro_batch = build_micro_batch(BATCH, SAMPLES, settings(share=share), place())
    assert sorted(micro_batch.samples) == sorted(SAMPLES)
    positions = micro_batch.row.positions[micro_batch.logit_index][micro_batch.rows]
    tokens = micro_batch.tokens[0][micro_batch.logit_index][micro_batch.rows]
    spans = zip(
        micro_batch.samples,
        positions.split(list(micro_batch.response_lengths)),
        tokens.split(list(micro_batch.response_lengths)),
        micro_batch.targets.split(list(micro_batch.response_lengths)),
        strict=True,
    )
    for i, where, before, target in spans:
        row, length = torch.from_numpy(BATCH.tokens[i].astype(np.int64)), BATCH.response_lengths[i]
        assert torch.equal(target, row[-length:])
        assert torch.equal(before, row[-length - 1 : -1])
        assert torch.equal(where, torch.arange(len(row) - length - 1, len(row) - 1))


def test_row_lengths() -> None:
    prompts, responses = prompt_lengths(BATCH), BATCH.response_lengths
    plain = build_micro_batch(BATCH, SAMPLES, settings(share=False), place())
    assert plain.tokens.numel() == sum(prompts) + sum(responses) - 6
    shared = build_micro_batch(BATCH, SAMPLES, settings(share=True), place())
    assert shared.tokens.numel() == prompts[0] + prompts[3] + sum(responses) - 6
    assert len(shared.logit_index) == sum(responses) - 4  # the first tokens of three responses share a place, twice
    whole = build_micro_batch(BATCH, SAMPLES, settings(share=False, every=True), place())
    assert whole.tokens.numel() == len(whole.logit_index) == sum(BATCH.total_lengths)
    assert whole.samples == tuple(SAMPLES)
    padded = build_micro_batch(BATCH, SAMPLES, settings(share=True, multiple=32), place())
    assert padded.tokens.numel() % 32 == 0


def test_columns_survive_flattening() -> None:
    micro_batch = build_micro_batch(BATCH, SAMPLES, settings(share=True), place())
    column = {i: torch.full((n,), float(i)) for i, n in enumerate(BATCH.response_lengths)}
    back = micro_batch.unflatten(micro_batch.flatten(column))
    assert back.keys() == column.keys()
    assert all(torch.equal(back[i], column[i]) for i in column)


def test_a_placeholder_owns_no_sample() -> None:
    micro_batch = build_micro_batch(BATCH, [], settings(share=True), place())
    assert micro_batch.samples == ()
    assert micro_batch.num_response_tokens == 1
    assert micro_batch.flatten({}).tolist() == [0.0]
    assert micro_batch.unflatten(torch.ones(1)) == {}


@pytest.mark.parametrize("share", [False, True])
def test_context_parallel_ranks_share_out_the_response_tokens(share: bool) -> None:
    ranks = [
        build_micro_batch(BATCH, SAMPLES, settings(share=share, multiple=4), place(cp_rank=r, cp_size=2))
        for r in range(2)
    ]
    places = torch.cat([m.places for m in ranks if m.places is not None])
    assert sorted(places.tolist()) == list(range(ranks[0].num_response_tokens))
    whole = build_micro_batch(BATCH, SAMPLES, settings(share=share), place())
    for micro_batch in ranks:
        assert micro_batch.places is not None
        assert torch.equal(micro_batch.targets, whole.targets[micro_batch.places])


def test_prompts_are_shared_within_a_group_only() -> None:
    same = BATCH.tokens[0]
    batch = RolloutBatch(
        **{name: getattr(BATCH, name) for name in BATCH.__dataclass_fields__}
        | {"tokens": [same] * 6, "response_lengths": [BATCH.response_lengths[0]] * 6}
        | {"loss_masks": [BATCH.loss_masks[0]] * 6, "rollout_log_probs": None}
    )
    lengths = packing_lengths(batch, share_prompts=True)
    prompt, response = len(same) - batch.response_lengths[0], batch.response_lengths[0]
    assert lengths.tokens(range(6)) == 2 * prompt + 6 * response


def test_padding_follows_the_layout() -> None:
    def multiple(parallel: ParallelState, *, sequence_parallel: bool = False) -> int:
        return RowSettings.of(
            parallel,
            share_prompts=True,
            every_position=False,
            sequence_parallel=sequence_parallel,
            pad_multiplier=128,
            dtype=torch.float32,
        ).multiple

    assert multiple(place()) == 1
    assert multiple(place(tp_size=4), sequence_parallel=True) == 4
    assert multiple(place(tp_size=2, cp_size=2), sequence_parallel=True) == 8
    assert multiple(place(tp_size=2, device=torch.device("cuda"))) == 256


def test_a_sample_without_a_prompt_is_refused() -> None:
    lengths = [len(BATCH.tokens[0]), *BATCH.response_lengths[1:]]
    masks = [np.ones(lengths[0], dtype=np.float32), *BATCH.loss_masks[1:]]
    values = {name: getattr(BATCH, name) for name in BATCH.__dataclass_fields__}
    changes = {"response_lengths": lengths, "loss_masks": masks, "rollout_log_probs": None}
    batch = RolloutBatch(**(values | changes))
    with pytest.raises(DataError, match="at least one prompt token"):
        prompt_lengths(batch)
