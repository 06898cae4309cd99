"""The tokens that truncated sampling (top-p, top-k, min-p) kept, and log-probs restricted to them.

Sampling from a truncated distribution makes the truncated distribution the policy, so the trainer scores
under it: the softmax runs over the kept tokens only. Owns the ragged sets and the gather, sum and gradient
over their entries; ``logprobs`` owns the rest. No mask over the vocabulary is ever made: the work and the
memory are those of the kept entries, piece by piece. Tests hold: values and gradients equal a float64
``log_softmax`` over masked logits for any chunk size and any split of the vocabulary over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from slime.backends.megatron.vocab_shard import VocabShard
from slime.errors import DataError
from slime.types import RolloutBatch


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """One set of kept token ids per target; an empty set restricts nothing.

    Both tensors stay on the CPU: an engine may keep thousands of tokens, and only a piece is needed at once.

    Args:
        ids: ``[K]`` int32 global token ids, set after set, each ascending and with its target.
        offsets: ``[R + 1]`` int64 where each set begins, and K.
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, ids: np.ndarray, offsets: np.ndarray, targets: np.ndarray) -> KeptTokens:
        """Sets as an engine returned them, with every target put into its own set.

        Args:
            ids: ``[K]`` kept ids.
            offsets: ``[R + 1]`` starting at 0.
            targets: ``[R]`` the sampled tokens.
        """
        lengths = np.diff(offsets)
        owners = np.flatnonzero(lengths)
        # Sorted by (target, id), so that repeated ids and targets already in their set count once.
        keys = np.concatenate([np.repeat(np.arange(len(lengths)), lengths), owners]).astype(np.int64) << 32
        keys |= np.concatenate([ids, targets[owners]]).astype(np.int64)
        keys = np.unique(keys)
        counts = np.bincount(keys >> 32, minlength=len(lengths))
        return cls(
            ids=torch.from_numpy((keys & 0xFFFFFFFF).astype(np.int32)),
            offsets=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)),
        )

    @classmethod
    def of_samples(cls, ids: Sequence[np.ndarray], offsets: Sequence[np.ndarray], targets: np.ndarray) -> KeptTokens:
        """The sets of N samples as those of one: N times ``[K_i]`` ids and ``[R_i + 1]`` offsets."""
        lengths = np.concatenate([np.diff(row) for row in offsets])
        return cls.of(np.concatenate(list(ids)), np.concatenate([[0], lengths.cumsum(dtype=np.int64)]), targets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of_targets(self, targets: np.ndarray) -> KeptTokens:
        """The sets of ``[r]`` ascending targets."""
        lengths = self.offsets.diff()
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[torch.from_numpy(targets)] = True
        offsets = torch.cat([lengths.new_zeros(1), lengths[chosen].cumsum(0)])
        return KeptTokens(self.ids[chosen.repeat_interleave(lengths)], offsets)

    def split(self, size: int) -> list[KeptTokens]:
        """Consecutive parts of ``size`` targets, one (empty) when there are no targets; the last may be shorter."""
        parts = []
        for start in range(0, max(len(self), 1), size):
            offsets = self.offsets[start : start + size + 1]
            parts.append(KeptTokens(self.ids[offsets[0] : offsets[-1]], offsets - offsets[0]))
        return parts


def kept_tokens(batch: RolloutBatch, samples: Sequence[int], targets: np.ndarray) -> KeptTokens | None:
    """The sets of the response tokens of some samples, one sample after the other; None if all are empty.

    Args:
        batch: The rollout.
        samples: Indices of the samples.
        targets: ``[R]`` all their response tokens.
    """
    ids, offsets = batch.rollout_top_p_token_ids, batch.rollout_top_p_token_offsets
    if ids is None or offsets is None or not any(len(ids[i]) for i in samples):
        return None
    return KeptTokens.of_samples([ids[i] for i in samples], [offsets[i] for i in samples], targets)


def check_kept_tokens(batch: RolloutBatch, *, vocab_size: int, truncated_by: str | None) -> None:
    """Check that kept tokens exist, and that sampling that truncates has kept some.

    Args:
        batch: The rollout.
        vocab_size: Token ids are below this.
        truncated_by: The flags that truncate sampling, if any: every trained sample then needs its sets.

    Raises:
        DataError: Names the sample.
    """
    for i in range(len(batch)):
        name = f"sample {batch.sample_indices[i]}"
        ids = None if batch.rollout_top_p_token_ids is None else batch.rollout_top_p_token_ids[i]
        if truncated_by is not None and batch.loss_masks[i].any() and (ids is None or not len(ids)):
            raise DataError(
                f"{name} carries no rollout_top_p_token_ids, but {truncated_by} truncates the distribution it was "
                "sampled from, so its log-probs under that are not known; let the generate function record them "
                "(return_sampling_mask), or give --rollout-top-p 1.0 and --rollout-top-k -1"
            )
        if ids is not None and len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            raise DataError(
                f"{name}: rollout_top_p_token_ids has ids from {ids.min()} to {ids.max()}; the vocabulary of "
                f"--hf-checkpoint has {vocab_size} tokens"
            )


class RestrictedSoftmax:
    """The restricted part of one scoring call: R targets with their sets over logits ``[U, V/tp]``.

    Args:
        kept: R sets.
        rows: ``[R]`` int64 row of the logits for each target.
        shard: The columns of the logits.
        scale: Multiplies the logits.
        entries_per_piece: Entries looked at together; a larger set is a piece of its own.
    """

    def __init__(
        self, kept: KeptTokens, rows: Tensor, shard: VocabShard, *, scale: float, entries_per_piece: int
    ) -> None:
        self._kept, self._shard, self._scale = kept, shard, scale
        self._per_piece = entries_per_piece
        self._device = rows.device
        # By row, so that the targets of a chunk of rows stand together.
        sorted_rows, self._order = rows.cpu().sort(stable=True)
        self._sorted_rows = sorted_rows.contiguous()
        lengths = kept.offsets.diff()
        self._ends = lengths[self._order].cumsum(0)
        restricted = lengths > 0
        self.restricts_all = bool(restricted.all())
        self.restricted = restricted.to(rows.device)
        """``[R]`` bool: targets with a set."""

    def log_sums(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Over all shards, ``[R]`` each: largest kept logit, log of the sum of exponentials above it.

        Collective over the shard's group. Meaningless where nothing is restricted.
        """
        peak = logits.new_full((len(self._kept),), float("-inf"), dtype=dtype)
        total = peak.new_zeros(len(self._kept))
        for targets, rows, which, column in self._pieces(0, len(logits)):
            values = logits[rows[which], column].to(dtype) * self._scale
            tops = peak.new_full((len(targets),), float("-inf")).scatter_reduce_(0, which, values, "amax")
            peak[targets] = tops
            total[targets] = total.new_zeros(len(targets)).index_add_(0, which, (values - tops[which]).exp_())
        if self._shard.group is not None:
            here = peak.clone()
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self._shard.group)
            total *= (here - peak).exp_()
            dist.all_reduce(total, group=self._shard.group)
        return peak, total.log()

    def subtract_expectation(
        self, grad: Tensor, logits: Tensor, first_row: int, grad_log_probs: Tensor, log_normaliser: Tensor
    ) -> None:
        """Subtract ``grad_log_probs`` times the restricted probabilities from a chunk of the gradient.

        Args:
            grad: ``[C, num_valid]`` of the scaled logits, changed in place.
            logits: ``[C, V/tp]`` the same rows.
            first_row: Row of the first of them among all U.
            grad_log_probs: ``[R]``.
            log_normaliser: ``[R]`` of the restricted distributions.
        """
        for targets, rows, which, column in self._pieces(first_row, first_row + len(logits)):
            local = (rows - first_row)[which]
            share = (logits[local, column].to(grad.dtype) * self._scale - log_normaliser[targets][which]).exp_()
            share *= -grad_log_probs[targets][which]
            grad.view(-1).index_add_(0, local * grad.size(1) + column, share)

    def _pieces(self, first_row: int, end_row: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Targets on some rows, a piece at a time, with the entries that this shard holds.

        Yields:
            ``[m]`` targets, ``[m]`` their rows, ``[k]`` place of each entry's target among the m, ``[k]`` column
            of each entry.
        """
        begin, end = (int(torch.searchsorted(self._sorted_rows, row)) for row in (first_row, end_row))
        while begin < end:
            done = int(self._ends[begin - 1]) if begin else 0
            stop = int(torch.searchsorted(self._ends, done + self._per_piece, right=True))
            stop = min(max(stop, begin + 1), end)
            targets, rows = self._order[begin:stop], self._sorted_rows[begin:stop]
            begin = stop
            which, column = self._entries(targets)
            if len(which):
                yield tuple(x.to(self._device) for x in (targets, rows, which, column))  # type: ignore[misc]

    def _entries(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``[k]`` place among the targets, and ``[k]`` column, of each of their entries in this shard."""
        starts = self._kept.offsets[targets]
        lengths = self._kept.offsets[targets + 1] - starts
        which = torch.repeat_interleave(lengths)
        entry = torch.arange(len(which)) + (starts - lengths.cumsum(0) + lengths)[which]
        column, held = self._shard.columns(self._kept.ids[entry].long())
        return which[held], column[held]
