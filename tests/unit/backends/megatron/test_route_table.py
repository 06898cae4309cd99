"""Routes recorded from rows of one packing, found in rows of another; engines' routes that do not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from slime.backends.megatron import cpu

cpu.install()

from slime.backends.megatron.batches import MicroBatch, RowSettings, build_micro_batch, packing_lengths  # noqa: E402
from slime.backends.megatron.layout import context_parallel_index  # noqa: E402
from slime.backends.megatron.route_table import RouteShape, RouteTable, check_routes  # noqa: E402
from slime.errors import DataError  # noqa: E402
from slime.replay_data import UNROUTED  # noqa: E402
from slime.types import RolloutBatch  # noqa: E402
from tests.support.rollouts import make_rollout  # noqa: E402
from tests.support.training import place  # noqa: E402

SHAPE = RouteShape(num_layers=4, num_experts=6, topk=2)
LAYERS = (1, 3)
"""Layers with experts on this rank."""


def routed_rollout(seed: int = 0) -> RolloutBatch:
    """A rollout with random routes; the samples of a group share those of their prompt, layer 0 is dense."""
    batch = make_rollout(num_groups=2, group_size=3)
    rng = np.random.default_rng(seed)
    routes: list[np.ndarray] = []
    for i, tokens in enumerate(batch.tokens):
        shape = (len(tokens) - 1, SHAPE.num_layers, SHAPE.num_experts)
        rows = rng.random(shape).argsort(-1)[..., : SHAPE.topk].astype(np.int32)
        rows[:, 0] = 0
        first = batch.group_ids.index(batch.group_ids[i])
        prompt = len(tokens) - batch.response_lengths[i]
        rows[:prompt] = (routes[first] if first < i else rows)[:prompt]
        routes.append(rows)
    return replace(batch, rollout_routed_experts=routes)


BATCH = routed_rollout()


def micro_batch(samples: list[int], *, share: bool, every_position: bool = False, multiple: int = 8) -> MicroBatch:
    settings = RowSettings(share_prompts=share, every_position=every_position, multiple=multiple, dtype=torch.float32)
    return build_micro_batch(BATCH, samples, settings, place())


def engine_table(samples: list[int]) -> RouteTable:
    table = RouteTable(BATCH.total_lengths, samples, LAYERS, SHAPE)
    table.take(BATCH)
    return table


def routes_by_hand(mb: MicroBatch) -> dict[int, np.ndarray]:
    """Place in the row to ``[2, k]`` routes of its token, found by walking through the layout's segments."""
    assert BATCH.rollout_routed_experts is not None
    found: dict[int, np.ndarray] = {}
    tokens = mb.tokens[0].tolist()
    for segment in mb.row.layout.segments:
        row = tokens[segment.start : segment.end]
        if segment.prefix is not None:
            before = mb.row.layout.segments[segment.prefix]
            row = tokens[before.start : before.end] + row
        owner = next(i for i in mb.samples if BATCH.tokens[i][: len(row)].tolist() == row)
        for k in range(segment.length):
            position = segment.position + k
            if position < len(BATCH.tokens[owner]) - 1:
                found[segment.start + k] = BATCH.rollout_routed_experts[owner][position][list(LAYERS)]
    return found


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("every_position", [False, True])
def test_engine_routes_stand_at_their_tokens(share: bool, every_position: bool) -> None:
    mb = micro_batch([5, 1, 2, 6], share=share and not every_position, every_position=every_position)
    places = torch.arange(mb.tokens.size(1))
    ids, known = engine_table(list(range(len(BATCH)))).lookup(mb.pieces, places)
    want = routes_by_hand(mb)
    assert known.nonzero()[:, 0].tolist() == sorted(want)
    assert all(ids[place].tolist() == rows.tolist() for place, rows in want.items())


def parts(length: int) -> list[Tensor]:
    """The row as two context-parallel ranks with two tensor-parallel ranks each hold it."""
    return [part for rank in range(2) for part in context_parallel_index(length, rank, 2).chunk(2)]


def test_recorded_in_one_packing_found_in_another() -> None:
    samples = list(range(len(BATCH)))
    source, ranks = engine_table(samples), [RouteTable(BATCH.total_lengths, samples, LAYERS, SHAPE) for _ in range(4)]
    for chunk in ([0, 2, 4], [1, 3, 5, 6]):
        mb = micro_batch(chunk, share=True)
        for rank, places in zip(ranks, parts(mb.row.layout.num_tokens), strict=True):
            ids, _ = source.lookup(mb.pieces, places)
            for slot in range(len(LAYERS)):  # one pipeline chunk after the other
                rank.record(mb.pieces, places, [slot], ids[:, [slot]].long())
    whole = RouteTable(BATCH.total_lengths, samples, LAYERS, SHAPE)
    for mine, *others in ((whole._ids, *(r._ids for r in ranks)), (whole._known, *(r._known for r in ranks))):
        mine.copy_(torch.stack(others).amax(0))  # what ``complete`` does over the ranks
    for mb in (micro_batch(samples, share=True), *(micro_batch([i], share=False) for i in samples)):
        for places in parts(mb.row.layout.num_tokens):
            got, known = whole.lookup(mb.pieces, places)
            want, known_before = source.lookup(mb.pieces, places)
            assert torch.equal(known, known_before)
            assert torch.equal(got[known], want[known])


def test_a_placeholder_and_padding_have_no_routes() -> None:
    mb = micro_batch([], share=True)
    _, known = RouteTable(BATCH.total_lengths, [], LAYERS, SHAPE).lookup(mb.pieces, torch.arange(mb.tokens.size(1)))
    assert not known.any()


def test_ids_are_stored_in_a_byte() -> None:
    samples = list(range(len(BATCH)))
    tokens = sum(BATCH.total_lengths)
    assert engine_table(samples).num_bytes == tokens * (len(LAYERS) * SHAPE.topk + 1)
    many = replace_shape(num_experts=257)
    assert RouteTable(BATCH.total_lengths, samples, LAYERS, many).num_bytes == tokens * (2 * len(LAYERS) * 2 + 1)


def replace_shape(**changes: int) -> RouteShape:
    return RouteShape(**({"num_layers": 4, "num_experts": 6, "topk": 2} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 5}, r"sample 0: .* shape \[\d+, 4, 2\]; --use-rollout-routing-replay needs \[\d+, 5, 2\]"),
        ({"topk": 3}, r"sample 0: .* shape \[\d+, 4, 2\]; --use-rollout-routing-replay needs \[\d+, 4, 3\]"),
    ],
)
def test_routes_of_another_model_are_refused(changes: dict[str, int], message: str) -> None:
    check_routes(BATCH, SHAPE)
    with pytest.raises(DataError, match=message):
        check_routes(BATCH, replace_shape(**changes))


def with_routes(sample: int, rows: np.ndarray) -> RolloutBatch:
    assert BATCH.rollout_routed_experts is not None
    routes = list(BATCH.rollout_routed_experts)
    routes[sample] = rows
    return replace(BATCH, rollout_routed_experts=routes)


def test_missing_routes_are_refused_unless_the_sample_is_not_trained() -> None:
    assert BATCH.rollout_routed_experts is not None
    message = r"sample 2 carries no rollout_routed_experts, which --use-rollout-routing-replay replays"
    batch = with_routes(2, np.full_like(BATCH.rollout_routed_experts[2], UNROUTED))
    with pytest.raises(DataError, match=message):
        check_routes(batch, SHAPE)
    with pytest.raises(DataError, match="sample 0 carries no rollout_routed_experts"):
        check_routes(replace(BATCH, rollout_routed_experts=None), SHAPE)
    masks = list(batch.loss_masks)
    masks[2] = np.zeros_like(masks[2])
    check_routes(replace(batch, loss_masks=masks), SHAPE)


@pytest.mark.parametrize(("experts", "sample"), [([6, 1], 3), ([-2, 1], 1), ([4, 4], 0)])
def test_ids_that_are_no_choice_are_refused(experts: list[int], sample: int) -> None:
    assert BATCH.rollout_routed_experts is not None
    rows = BATCH.rollout_routed_experts[sample].copy()
    rows[4, 3] = experts
    table = RouteTable(BATCH.total_lengths, list(range(len(BATCH))), LAYERS, SHAPE)
    said = rf"sample {sample}: rollout_routed_experts sends token 4 in layer 3 to the experts .{experts[0]}, "
    with pytest.raises(DataError, match=said):
        table.take(with_routes(sample, rows))


def test_prompts_are_shared_only_by_samples_with_the_same_routes_of_them() -> None:
    assert BATCH.rollout_routed_experts is not None
    keys = packing_lengths(BATCH, share_prompts=True).prompt_keys
    assert keys is not None
    assert len(set(keys)) == 2
    rows = BATCH.rollout_routed_experts[1].copy()
    rows[0, 1] = rows[0, 1][::-1]
    other = packing_lengths(with_routes(1, rows), share_prompts=True).prompt_keys
    assert other is not None
    assert [key == keys[i] for i, key in enumerate(other)] == [i != 1 for i in range(len(BATCH))]
