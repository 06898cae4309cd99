"""Micro-batches: the samples of one packed row as tensors of this rank.

Owns how tokens lie in the row (prompts once or per sample), at which places the head runs and which
row of its logits predicts which response token. Response tokens of a micro-batch are flat, sample
after sample, in the order of ``MicroBatch.samples``. Tests hold: for every layout, log-probs of the
response tokens are the same.

A response's last token only predicts what comes after the sample, so it is left out of the row,
as the engine leaves it out of its last forward pass.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime.backends.megatron.attention import PackedLayout, PackedRow, Segment, pack_row
from slime.backends.megatron.kept_tokens import KeptTokens, kept_tokens
from slime.backends.megatron.layout import Piece
from slime.backends.megatron.parallel import ParallelState
from slime.data.packing import Lengths
from slime.errors import DataError
from slime.types import RolloutBatch

PLACEHOLDER_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """How rows are built.

    Args:
        share_prompts: Pack equal prompts of one group once.
        every_position: Keep whole samples and run the head at every token (custom losses).
        multiple: A row's length is padded to a multiple of this.
        dtype: Of the activations.
    """

    share_prompts: bool
    every_position: bool
    multiple: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        parallel: ParallelState,
        *,
        share_prompts: bool,
        every_position: bool,
        sequence_parallel: bool,
        pad_multiplier: int,
        dtype: torch.dtype,
    ) -> RowSettings:
        """Settings whose rows this rank's parallel layout can split.

        ``pad_multiplier`` times the tensor-parallel size applies on CUDA only, where few distinct
        shapes keep allocations from fragmenting; on a CPU padding is only lost time.
        """
        needed = 2 * parallel.cp_size if parallel.cp_size > 1 else 1
        needed *= parallel.tp_size if sequence_parallel else 1
        if parallel.device.type == "cuda":
            needed = math.lcm(needed, parallel.tp_size * pad_multiplier)
        return cls(
            share_prompts=share_prompts and not every_position,
            every_position=every_position,
            multiple=needed,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed row on this rank; N samples with R response tokens in all.

    Args:
        samples: N indices into the ``RolloutBatch``, in the order of the flat response tokens.
        response_lengths: N response lengths, summing to R.
        total_lengths: N prompt plus response lengths.
        tokens: ``[1, T / cp]`` int64, this rank's part of the row.
        row: The row's layout.
        logit_index: ``[U]`` int64 places among this rank's tokens at which the head runs.
        rows: ``[r]`` int64 row of the logits for each response token predicted on this rank.
        targets: ``[r]`` int64 the token itself.
        places: ``[r]`` int64 where each of them stands among the R response tokens; None when this
            rank predicts all of them, in order.
        num_response_tokens: R.
        kept: r sets of tokens among which each was sampled; None when none was truncated.
        pieces: Whose tokens are where in the row; padding is nobody's.
    """

    samples: tuple[int, ...]
    response_lengths: tuple[int, ...]
    total_lengths: tuple[int, ...]
    tokens: Tensor
    row: PackedRow
    logit_index: Tensor
    rows: Tensor
    targets: Tensor
    places: Tensor | None
    num_response_tokens: int
    kept: KeptTokens | None = None
    pieces: tuple[Piece, ...] = ()

    def flatten(self, column: Mapping[int, Tensor]) -> Tensor:
        """A per-sample column as one flat ``[R]`` tensor; zeros for a placeholder."""
        device = self.tokens.device
        if not self.samples:
            return torch.zeros(self.num_response_tokens, device=device)
        return torch.cat([column[i] for i in self.samples]).to(device)

    def unflatten(self, flat: Tensor) -> dict[int, Tensor]:
        """Inverse of ``flatten``."""
        if not self.samples:
            return {}
        return dict(zip(self.samples, flat.split(list(self.response_lengths)), strict=True))


def prompt_lengths(batch: RolloutBatch) -> list[int]:
    """Tokens before the response of each sample.

    Raises:
        DataError: A sample has no prompt token, so nothing predicts its first response token.
    """
    lengths = [len(t) - r for t, r in zip(batch.tokens, batch.response_lengths, strict=True)]
    for i, length in enumerate(lengths):
        if length < 1 and batch.response_lengths[i]:
            raise DataError(
                f"sample {batch.sample_indices[i]} has {len(batch.tokens[i])} tokens and a response of "
                f"{batch.response_lengths[i]}: at least one prompt token must come before the response"
            )
    return lengths


def packing_lengths(batch: RolloutBatch, *, share_prompts: bool) -> Lengths:
    """Token counts for the planner; see ``_prompt_key`` for which samples share a prompt."""
    prompts = prompt_lengths(batch)
    keys = [_prompt_key(batch, i) for i in range(len(batch))] if share_prompts else None
    return Lengths(total=batch.total_lengths, prompt=prompts, prompt_keys=keys)


def _prompt_key(batch: RolloutBatch, i: int) -> tuple[int, bytes]:
    """Equal for samples that may share a prompt: same group, same prompt tokens, same routes of them in the engine."""
    length = len(batch.tokens[i]) - batch.response_lengths[i]
    key = np.ascontiguousarray(batch.tokens[i][:length]).tobytes()
    if batch.rollout_routed_experts is not None:
        routes = np.ascontiguousarray(batch.rollout_routed_experts[i][:length])
        key += hashlib.blake2b(routes, digest_size=16).digest()
    return batch.group_ids[i], key


def build_micro_batch(
    batch: RolloutBatch, samples: Sequence[int], settings: RowSettings, parallel: ParallelState
) -> MicroBatch:
    """Pack samples into one row and cut out this rank's part.

    Args:
        batch: The rollout.
        samples: Indices of the samples; none gives a placeholder with one response token that no
            sample owns, for a rank that only keeps the others company.
        settings: How rows are built.
        parallel: This rank's place.
    """
    pieces = _RowPieces()
    order = _by_prompt(batch, samples) if settings.share_prompts else [[i] for i in samples]
    for group in order:
        pieces.add(batch, group, keep_last=settings.every_position)
    if not samples:
        pieces.add_placeholder()
    length = -(-pieces.length // settings.multiple) * settings.multiple
    layout = PackedLayout(tuple(pieces.segments), length)
    row = pack_row(
        layout, dtype=settings.dtype, device=parallel.device, cp_rank=parallel.cp_rank, cp_size=parallel.cp_size
    )
    tokens = torch.zeros(length, dtype=torch.int64)
    packed = np.concatenate(pieces.tokens)
    tokens[: len(packed)] = torch.from_numpy(packed.astype(np.int64))
    placed = [i for group in order for i in group]
    predictors = np.concatenate(pieces.predictors) if pieces.predictors else np.zeros(0, dtype=np.int64)
    targets = np.concatenate(pieces.targets) if pieces.targets else np.zeros(0, dtype=np.int64)
    index, rows, places = _local_predictors(predictors, row, parallel, every_position=settings.every_position)
    device = parallel.device
    local_targets = targets if places is None else targets[places]
    kept = kept_tokens(batch, placed, targets)
    if kept is not None and places is not None:
        kept = kept.of_targets(places)
    return MicroBatch(
        samples=tuple(placed),
        response_lengths=tuple(batch.response_lengths[i] for i in placed) if placed else (1,),
        total_lengths=tuple(len(batch.tokens[i]) for i in placed) if placed else (PLACEHOLDER_TOKENS,),
        tokens=tokens.to(device).index_select(0, row.index)[None],
        row=row,
        logit_index=torch.from_numpy(index).to(device),
        rows=torch.from_numpy(rows).to(device),
        targets=torch.from_numpy(local_targets.astype(np.int64)).to(device),
        places=None if places is None else torch.from_numpy(places).to(device),
        num_response_tokens=len(targets),
        kept=kept,
        pieces=tuple(pieces.pieces),
    )


def _by_prompt(batch: RolloutBatch, samples: Sequence[int]) -> list[list[int]]:
    """Samples grouped by equal prompt, groups in order of their first sample."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    for i in samples:
        groups.setdefault(_prompt_key(batch, i), []).append(i)
    return list(groups.values())


class _RowPieces:
    """A row being put together."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.pieces: list[Piece] = []
        self.tokens: list[np.ndarray] = []
        self.predictors: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.length = 0

    def add(self, batch: RolloutBatch, group: Sequence[int], *, keep_last: bool) -> None:
        """Append samples with one prompt: as a prompt and its continuations, or whole when there is only one."""
        if len(group) == 1:
            self._add_whole(batch.tokens[group[0]], batch.response_lengths[group[0]], group, keep_last=keep_last)
            return
        prompt_length = len(batch.tokens[group[0]]) - batch.response_lengths[group[0]]
        prompt = self._append(batch.tokens[group[0]][:prompt_length], group, position=0, prefix=None)
        prompt_end = self.length
        for i in group:
            response = batch.tokens[i][prompt_length:]
            start = self.length
            if len(response) > 1:
                self._append(response[:-1], [i], position=prompt_length, prefix=prompt)
            predictors = np.arange(start - 1, start - 1 + len(response), dtype=np.int64)
            predictors[:1] = prompt_end - 1
            self.predictors.append(predictors)
            self.targets.append(response)

    def _add_whole(self, tokens: np.ndarray, response_length: int, samples: Sequence[int], *, keep_last: bool) -> None:
        kept = tokens if keep_last or len(tokens) == 1 else tokens[:-1]
        start = self.length
        self._append(kept, samples, position=0, prefix=None)
        first = start + len(tokens) - response_length
        self.predictors.append(np.arange(first - 1, first - 1 + response_length, dtype=np.int64))
        self.targets.append(tokens[len(tokens) - response_length :])

    def add_placeholder(self) -> None:
        """Two arbitrary tokens, the second of which counts as a response token without an owner."""
        self._add_whole(np.zeros(PLACEHOLDER_TOKENS, dtype=np.int32), 1, (), keep_last=True)

    def _append(self, tokens: np.ndarray, samples: Sequence[int], *, position: int, prefix: int | None) -> int:
        self.segments.append(Segment(self.length, len(tokens), position, prefix))
        if samples:
            self.pieces.append(Piece(self.length, len(tokens), position, tuple(samples)))
        self.tokens.append(tokens)
        self.length += len(tokens)
        return len(self.segments) - 1


def _local_predictors(
    predictors: np.ndarray, row: PackedRow, parallel: ParallelState, *, every_position: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Where this rank runs the head, which of its logits predicts each token, and which tokens those are."""
    if parallel.cp_size > 1:
        here = np.full(row.layout.num_tokens, -1, dtype=np.int64)
        index = row.index.cpu().numpy()
        here[index] = np.arange(len(index))
        local = here[predictors]
        places = np.flatnonzero(local >= 0)
        local = local[places]
    else:
        local, places = predictors, None
    if every_position:
        return np.arange(row.index.numel()), local, places
    # Continuations of one prompt share the place that predicts their first token.
    unique, rows = np.unique(local, return_inverse=True)
    return unique, rows.astype(np.int64), places
