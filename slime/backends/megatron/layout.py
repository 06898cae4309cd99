"""How sequences lie in one packed row of tokens, and which earlier tokens each may attend to.

Owns ``PackedLayout``: segments of a row, each attending causally to itself and, when it has a prefix,
to everything of that prefix, so that a prompt is packed once in front of all its responses. Owns the
zig-zag split of a row over context-parallel ranks. Torch only; knows nothing of Megatron. Tests hold:
``visible`` equals the definition written out token by token; the ranks' shares of a row are a partition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive tokens of one sequence.

    Args:
        start: Index of its first token in the row.
        length: Number of tokens.
        position: Rotary position of its first token.
        prefix: Index of the segment that it continues, or None. It attends to all tokens of the
            prefix (and of the prefix's own prefix, and so on).
    """

    start: int
    length: int
    position: int = 0
    prefix: int | None = None

    @property
    def end(self) -> int:
        """Index after its last token in the row."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a row that are the same positions of one or several samples.

    Args:
        start: Place of the first in the row.
        length: Number of tokens.
        position: Of the first in each of the samples.
        samples: Indices into the rollout.
    """

    start: int
    length: int
    position: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """All segments of a row; tokens in no segment are padding and attend to nothing.

    Args:
        segments: In any order of ``start``, without overlap; a prefix stands before its continuations.
        num_tokens: Length of the row, padding included.
    """

    segments: tuple[Segment, ...]
    num_tokens: int

    def __post_init__(self) -> None:
        end = 0
        for segment in sorted(self.segments, key=lambda s: (s.start, s.end)):
            if segment.length < 0 or segment.start < end:
                raise ValueError(f"segment {segment} overlaps its neighbour, which ends at {end}")
            end = segment.end
        if end > self.num_tokens:
            raise ValueError(f"segments end at {end}, the row has {self.num_tokens} tokens")
        for i, segment in enumerate(self.segments):
            if segment.prefix is not None and not 0 <= segment.prefix < i:
                raise ValueError(f"segment {i} continues {segment.prefix}; a prefix stands before it")

    @classmethod
    def of_sequences(cls, lengths: Sequence[int], *, multiple: int = 1) -> "PackedLayout":
        """Independent sequences one after the other.

        Args:
            lengths: Tokens of each sequence.
            multiple: The row is padded at its end to a multiple of this many tokens.
        """
        segments, start = [], 0
        for length in lengths:
            segments.append(Segment(start, length))
            start += length
        return cls(tuple(segments), -(-start // multiple) * multiple)

    @classmethod
    def of_groups(cls, groups: Sequence[tuple[int, Sequence[int]]], *, multiple: int = 1) -> "PackedLayout":
        """Every prompt once, followed by its responses.

        Args:
            groups: Per prompt its length in tokens and the lengths of its responses.
            multiple: The row is padded at its end to a multiple of this many tokens.

        Returns:
            Segments in the order prompt, its responses, next prompt, ...
        """
        segments: list[Segment] = []
        start = 0
        for prompt_length, response_lengths in groups:
            prompt = len(segments)
            segments.append(Segment(start, prompt_length))
            start += prompt_length
            for length in response_lengths:
                segments.append(Segment(start, length, prompt_length, prompt))
                start += length
        return cls(tuple(segments), -(-start // multiple) * multiple)

    def chain(self, index: int) -> tuple[int, ...]:
        """Segments that segment ``index`` attends to, the root first and itself last."""
        found = [index]
        while (prefix := self.segments[found[-1]].prefix) is not None:
            found.append(prefix)
        return tuple(reversed(found))

    def positions(self) -> torch.Tensor:
        """``[num_tokens]`` int64 rotary position of each token; 0 for padding."""
        positions = torch.zeros(self.num_tokens, dtype=torch.int64)
        for s in self.segments:
            positions[s.start : s.end] = torch.arange(s.position, s.position + s.length)
        return positions

    def segment_ids(self) -> torch.Tensor:
        """``[num_tokens]`` int64 segment of each token; -1 for padding."""
        ids = torch.full((self.num_tokens,), -1, dtype=torch.int64)
        for i, s in enumerate(self.segments):
            ids[s.start : s.end] = i
        return ids

    def predictors(self, index: int) -> torch.Tensor:
        """``[length]`` int64: the tokens whose logits predict the tokens of a segment with a prefix.

        The first is the last token of the prefix, shared by all continuations.
        """
        segment = self.segments[index]
        if segment.prefix is None:
            raise ValueError(f"segment {index} has no prefix, so nothing predicts its first token")
        found = torch.arange(segment.start - 1, segment.end - 1)
        found[:1] = self.segments[segment.prefix].end - 1
        return found

    def visible(self) -> torch.Tensor:
        """``[num_tokens, num_tokens]`` bool: whether the row's token attends to the column's."""
        ids = self.segment_ids()
        order = torch.arange(self.num_tokens)
        mask = (ids[:, None] == ids[None]) & (order[:, None] >= order[None]) & (ids[:, None] >= 0)
        for i in range(len(self.segments)):
            for prefix in self.chain(i)[:-1]:
                mask |= (ids == i)[:, None] & (ids == prefix)[None]
        return mask

    @property
    def num_attended(self) -> int:
        """Pairs of tokens that attention looks at: what its cost grows with."""
        total = 0
        for i, segment in enumerate(self.segments):
            before = sum(self.segments[j].length for j in self.chain(i)[:-1])
            total += segment.length * before + segment.length * (segment.length + 1) // 2
        return total


def context_parallel_index(num_tokens: int, cp_rank: int, cp_size: int) -> torch.Tensor:
    """``[num_tokens / cp_size]`` int64: the tokens of a row that one context-parallel rank holds.

    The row is cut into 2 * cp_size equal chunks; rank r takes chunks r and 2 * cp_size - 1 - r, which
    balances causal attention.

    Raises:
        ValueError: The row is not padded to a multiple of 2 * cp_size.
    """
    if cp_size == 1:
        return torch.arange(num_tokens)
    if num_tokens % (2 * cp_size):
        raise ValueError(f"a row of {num_tokens} tokens cannot be split over {cp_size} ranks: pad to {2 * cp_size}")
    chunks = torch.arange(num_tokens).view(2 * cp_size, -1)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
