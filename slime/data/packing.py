"""Which sample goes into which optimizer step, micro-batch and data-parallel rank.

Every rank computes the same schedule from the same lengths, so nothing has to be sent. Owns the
arithmetic only; tensors are built elsewhere. Tests hold: every sample of a step is placed exactly
once; token caps hold except for a single sample that is larger than the cap; all ranks get the same
number of micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from slime.errors import ConfigError

MicroBatchIndices = tuple[int, ...]
"""Sample indices of one micro-batch. Empty where a rank only has to keep the others company."""

Balance = Literal["none", "tokens", "cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token counts of N samples, and which prompts are equal.

    Args:
        total: N prompt plus response tokens.
        prompt: N prompt tokens; needed for sharing.
        prompt_keys: N keys; samples with equal keys in one micro-batch hold their prompt once. None
            means that prompts are never shared.
    """

    total: Sequence[int]
    prompt: Sequence[int] | None = None
    prompt_keys: Sequence[Hashable] | None = None

    def __post_init__(self) -> None:
        if self.prompt_keys is not None and self.prompt is None:
            raise ValueError("sharing prompts needs their lengths")

    def tokens(self, samples: Sequence[int]) -> int:
        """Tokens that a micro-batch of ``samples`` really holds."""
        load = _Bin()
        for sample in samples:
            load.add(sample, self)
        return load.tokens


class _Bin:
    """A micro-batch being filled."""

    __slots__ = ("prompts", "samples", "tokens")

    def __init__(self) -> None:
        self.samples: list[int] = []
        self.tokens = 0
        self.prompts: set[Hashable] = set()

    def extra(self, sample: int, lengths: Lengths) -> int:
        """Tokens that ``sample`` would add."""
        if lengths.prompt_keys is None or lengths.prompt is None:
            return lengths.total[sample]
        shared = lengths.prompt_keys[sample] in self.prompts
        return lengths.total[sample] - (lengths.prompt[sample] if shared else 0)

    def add(self, sample: int, lengths: Lengths) -> None:
        self.tokens += self.extra(sample, lengths)
        self.samples.append(sample)
        if lengths.prompt_keys is not None:
            self.prompts.add(lengths.prompt_keys[sample])


def first_fit(samples: Sequence[int], lengths: Lengths, cap: int) -> list[list[int]]:
    """Put each sample into the first micro-batch with room.

    With shared prompts a micro-batch that already holds the sample's prompt comes first: there
    only the response counts, and the samples of a group stay together. A sample longer than the
    cap gets a micro-batch of its own.

    Args:
        samples: Indices into ``lengths``, in order.
        lengths: Token counts.
        cap: Largest token count of a micro-batch.
    """
    bins: list[_Bin] = []
    homes: dict[Hashable, list[_Bin]] = {}
    for sample in samples:
        key = None if lengths.prompt_keys is None else lengths.prompt_keys[sample]
        candidates = [*homes.get(key, ()), *bins] if key is not None else bins
        target = next((b for b in candidates if b.tokens + b.extra(sample, lengths) <= cap), None)
        if target is None:
            target = _Bin()
            bins.append(target)
        if key is not None and key not in target.prompts:
            homes.setdefault(key, []).append(target)
        target.add(sample, lengths)
    return [b.samples for b in bins]


def consecutive(samples: Sequence[int], micro_batch_size: int) -> list[list[int]]:
    """Cut into consecutive chunks of ``micro_batch_size`` samples; the last may be shorter."""
    return [list(samples[i : i + micro_batch_size]) for i in range(0, len(samples), micro_batch_size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One optimizer step.

    Args:
        samples: Indices of the samples it trains, in batch order.
        num_rollouts: Trajectories among them: the step's global batch size.
        micro_batches: Per data-parallel rank the sample indices of each micro-batch; the same
            number of micro-batches on every rank.
    """

    samples: tuple[int, ...]
    num_rollouts: int
    micro_batches: tuple[tuple[MicroBatchIndices, ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank."""
        return len(self.micro_batches[0])

    def rank_samples(self, rank: int) -> list[int]:
        """Sample indices of one rank, in the order in which it meets them."""
        return [sample for micro_batch in self.micro_batches[rank] for sample in micro_batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class DPSchedule:
    """The optimizer steps of one rollout, and how many trailing samples no step takes."""

    steps: tuple[StepPlan, ...]
    num_dropped_samples: int = 0

    def rank_samples(self, rank: int) -> list[int]:
        """Sample indices of one rank over all steps."""
        return [sample for step in self.steps for sample in step.rank_samples(rank)]

    def rank_micro_batches(self, rank: int) -> list[list[list[int]]]:
        """Per step and micro-batch, positions within ``rank_samples(rank)``."""
        out: list[list[list[int]]] = []
        position = 0
        for step in self.steps:
            rows: list[list[int]] = []
            for micro_batch in step.micro_batches[rank]:
                rows.append(list(range(position, position + len(micro_batch))))
                position += len(micro_batch)
            out.append(rows)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingSettings:
    """How a step is cut.

    Args:
        global_batch_size: Rollouts per optimizer step.
        dp_size: Data-parallel ranks.
        micro_batch_size: Samples per micro-batch; used when ``max_tokens`` is None.
        max_tokens: Token cap of a micro-batch (cap per GPU times context-parallel size); None
            means a fixed number of samples.
        micro_batch_group: The number of micro-batches of a rank is a multiple of this (virtual
            pipeline stages).
        balance: What to even out over ranks: nothing, tokens, or the cost given to the planner.
    """

    global_batch_size: int
    dp_size: int
    micro_batch_size: int = 1
    max_tokens: int | None = None
    micro_batch_group: int = 1
    balance: Balance = "none"


def build_dp_schedule(
    rollout_ids: Sequence[int],
    lengths: Lengths,
    settings: PackingSettings,
    costs: Sequence[float] | None = None,
) -> DPSchedule:
    """Plan the optimizer steps of one rollout.

    Samples of one rollout id stay in one step. A trailing step with fewer than
    ``global_batch_size`` rollouts is dropped.

    Args:
        rollout_ids: N trajectory ids.
        lengths: N token counts.
        settings: How to cut.
        costs: N costs for ``balance="cost"``.

    Raises:
        ConfigError: There are fewer rollouts than one step takes, or a step has fewer samples than
            there are data-parallel ranks.
    """
    rollouts: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_ids):
        rollouts.setdefault(rollout, []).append(sample)
    members = list(rollouts.values())
    num_steps = len(members) // settings.global_batch_size
    if num_steps == 0:
        raise ConfigError(
            f"the rollout has {len(members)} trajectories, and one optimizer step takes --global-batch-size "
            f"{settings.global_batch_size}; lower it, or raise --rollout-batch-size or --n-samples-per-prompt"
        )
    steps: list[StepPlan] = []
    for start in range(0, num_steps * settings.global_batch_size, settings.global_batch_size):
        step = [s for rollout in members[start : start + settings.global_batch_size] for s in rollout]
        if len(step) < settings.dp_size:
            raise ConfigError(
                f"optimizer step {len(steps)} has {len(step)} samples for {settings.dp_size} data-parallel ranks; "
                "raise --global-batch-size or use fewer training processes"
            )
        steps.append(_plan_step(step, lengths, settings, costs))
    used = sum(len(step.samples) for step in steps)
    return DPSchedule(steps=tuple(steps), num_dropped_samples=len(rollout_ids) - used)


def repack(schedule: DPSchedule, lengths: Lengths, max_tokens: int, *, micro_batch_group: int = 1) -> DPSchedule:
    """Cut each rank's samples anew under another token cap, for passes without a backward.

    Every rank keeps its samples; all steps of the rollout become one. Ranks with fewer
    micro-batches split some of theirs until the counts agree.
    """
    dp_size = len(schedule.steps[0].micro_batches)
    packed = [first_fit(schedule.rank_samples(rank), lengths, max_tokens) for rank in range(dp_size)]
    count = _round_up(max(len(bins) for bins in packed), micro_batch_group)
    ranks = [_split_until(bins, count, lengths) for bins in packed]
    samples = tuple(s for step in schedule.steps for s in step.samples)
    step = StepPlan(
        samples=samples,
        num_rollouts=sum(step.num_rollouts for step in schedule.steps),
        micro_batches=tuple(tuple(tuple(b) for b in bins) for bins in ranks),
    )
    return DPSchedule(steps=(step,), num_dropped_samples=schedule.num_dropped_samples)


def _plan_step(step: list[int], lengths: Lengths, settings: PackingSettings, costs: Sequence[float] | None) -> StepPlan:
    if settings.max_tokens is None:
        bins = consecutive(step, settings.micro_batch_size)
    else:
        bins = first_fit(step, lengths, settings.max_tokens)
    bins = _split_until(bins, _round_up(len(bins), settings.dp_size * settings.micro_batch_group), lengths)
    ranks = _assign(bins, lengths, settings, costs)
    return StepPlan(
        samples=tuple(step),
        num_rollouts=settings.global_batch_size,
        micro_batches=tuple(tuple(tuple(b) for b in rank) for rank in ranks),
    )


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _split_until(bins: list[list[int]], count: int, lengths: Lengths) -> list[list[int]]:
    """Split the largest micro-batch until there are ``count``; when only single samples are left, add empty ones."""
    bins = [list(b) for b in bins]
    while len(bins) < count:
        splittable = [i for i, b in enumerate(bins) if len(b) > 1]
        if not splittable:
            bins.extend([] for _ in range(count - len(bins)))
            break
        largest = max(splittable, key=lambda i: (lengths.tokens(bins[i]), -i))
        whole = bins[largest]
        cut = _even_cut(whole, lengths)
        bins[largest] = whole[:cut]
        bins.append(whole[cut:])
    return bins


def _even_cut(samples: list[int], lengths: Lengths) -> int:
    """Where to cut so that the larger half is as small as possible; both halves get a sample."""
    return min(
        range(1, len(samples)),
        key=lambda cut: (max(lengths.tokens(samples[:cut]), lengths.tokens(samples[cut:])), cut),
    )


def _assign(
    bins: list[list[int]], lengths: Lengths, settings: PackingSettings, costs: Sequence[float] | None
) -> list[list[list[int]]]:
    match settings.balance:
        case "none":
            return [bins[rank :: settings.dp_size] for rank in range(settings.dp_size)]
        case "tokens":
            weights = [float(lengths.tokens(b)) for b in bins]
        case "cost":
            if costs is None:
                raise ValueError("balancing by cost needs one cost per sample")
            weights = [sum(costs[s] for s in b) for b in bins]
    partitions = balanced_partitions(weights, settings.dp_size, equal_size=True)
    return [[bins[i] for i in partition] for partition in partitions]


class _Partial:
    """A partial partition in the Karmarkar-Karp heap: k subsets, largest sum first."""

    __slots__ = ("subsets",)

    def __init__(self, subsets: list[tuple[float, list[tuple[int, float]]]]) -> None:
        self.subsets = sorted(subsets, key=lambda s: (s[0], len(s[1]), s[1]), reverse=True)

    def merge(self, other: _Partial) -> _Partial:
        """Join the largest subsets of one with the smallest of the other."""
        pairs = zip(self.subsets, reversed(other.subsets), strict=True)
        return _Partial([(a[0] + b[0], a[1] + b[1]) for a, b in pairs])

    def __lt__(self, other: _Partial) -> bool:
        mine, theirs = self._order(), other._order()
        return mine > theirs

    def _order(self) -> tuple[float, float, int, list[tuple[int, float]]]:
        largest = self.subsets[0]
        return largest[0] - self.subsets[-1][0], largest[0], len(largest[1]), largest[1]


def balanced_partitions(weights: Sequence[float], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Partition indices into parts of nearly equal weight (Karmarkar-Karp largest differencing).

    Args:
        weights: N weights.
        num_parts: Number of parts.
        equal_size: Every part gets N / num_parts items.

    Returns:
        ``num_parts`` ascending index lists.

    Raises:
        ValueError: N is not a multiple of ``num_parts`` although parts must have equal size, or
            there are fewer items than parts.
    """
    n = len(weights)
    if n < num_parts:
        raise ValueError(f"{n} items cannot be spread over {num_parts} parts")
    if equal_size and n % num_parts:
        raise ValueError(f"{n} items cannot be spread over {num_parts} parts of equal size")
    ordered = sorted((weight, index) for index, weight in enumerate(weights))
    heap: list[_Partial] = []
    if equal_size:
        for start in range(0, n, num_parts):
            chunk = ordered[start : start + num_parts]
            heapq.heappush(heap, _Partial([(weight, [(index, weight)]) for weight, index in chunk]))
    else:
        for weight, index in ordered:
            empty: list[tuple[float, list[tuple[int, float]]]] = [(0.0, []) for _ in range(num_parts - 1)]
            heapq.heappush(heap, _Partial([(weight, [(index, weight)]), *empty]))
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, first.merge(second))
    return [sorted(index for index, _ in items) for _, items in heap[0].subsets]


def sequence_costs(lengths: Sequence[int], *, per_token: float, per_token_pair: float) -> list[float]:
    """Estimated work of each sequence: linear in tokens plus causal attention's quadratic part.

    Args:
        lengths: N token counts.
        per_token: Operations per token outside attention.
        per_token_pair: Operations per attended pair; a causal sequence of L has L * (L + 1) / 2.
    """
    return [per_token * n + per_token_pair * n * (n + 1) / 2 for n in lengths]
