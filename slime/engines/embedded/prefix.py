"""Prompts whose keys and values are kept: a cache keyed by token ids that finds the longest common prefix.

An entry holds the keys and values of one token sequence in one contiguous block, and the logits after its last token,
so that a second request with the same prompt costs nothing before its first token. A radix tree over the token ids
finds the entry with the longest match. Entries in use are counted; unused ones leave in least-recently-used order when
memory is needed. Weight updates make every entry unfindable at once, and begin a new generation: what was computed,
even in part, with the weights of an earlier one is never found.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime.engines.embedded.cache import KvBudget
from slime.engines.embedded.kv import CacheShape, KvBlock

TokenArray = npt.NDArray[np.int32]


@dataclass(eq=False)
class PrefixEntry:
    """What is kept of ``tokens``; the first ``filled`` are computed, none with weights older than ``generation``."""

    tokens: TokenArray
    kv: KvBlock
    generation: int
    filled: int = 0
    logits: Tensor | None = None
    """``[V]`` logits after the last token; None for a finished sequence, whose last token was never run."""
    users: int = 0
    is_cached: bool = False


@dataclass(eq=False)
class _Node:
    """One edge of the radix tree and the entries that run through it."""

    edge: TokenArray
    children: dict[int, _Node] = field(default_factory=dict)
    entries: dict[int, PrefixEntry] = field(default_factory=dict[int, PrefixEntry])
    ends: dict[int, PrefixEntry] = field(default_factory=dict[int, PrefixEntry])
    """Those of ``entries`` whose last token is the last of this edge."""


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Number of equal leading tokens."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    first = int(different.argmax()) if n else 0
    return first if n and different[first] else n


class PrefixCache:
    """All kept prompts of one engine.

    Args:
        shape: What is kept of a token.
        dtype: Of keys and values.
        device: Where they live.
        budget: Shared with the slabs of running rows.
        enabled: Whether entries can be found again; without it each request computes its own prompt.
    """

    def __init__(
        self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device, budget: KvBudget, enabled: bool = True
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._budget = budget
        self.is_enabled = enabled
        self.generation = 0
        self._root = _Node(np.zeros(0, dtype=np.int32))
        self._by_age: OrderedDict[int, PrefixEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_age)

    def find(self, tokens: TokenArray) -> tuple[int, PrefixEntry | None]:
        """Longest match: the number of leading tokens of ``tokens`` that the returned entry holds too."""
        node, matched, step = self._root, 0, 0
        while matched < len(tokens):
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            step = common_length(child.edge, tokens[matched:])
            node, matched = child, matched + step
            if step < len(child.edge):
                break
        if matched == 0:
            return 0, None
        entry = next(iter(node.entries.values()))
        if step == len(node.edge):  # one that ends here may know the logits after the match
            entry = next((e for e in node.ends.values() if e.logits is not None), entry)
        self._by_age.move_to_end(id(entry))
        return matched, entry

    def create(self, tokens: TokenArray) -> PrefixEntry:
        """Allocate an entry, in use by the caller and not yet findable.

        Raises:
            KvFullError: No memory for it.
        """
        self._budget.reserve(len(tokens))
        kv = self._shape.allocate(len(tokens), rows=None, dtype=self._dtype, device=self._device)
        return PrefixEntry(tokens, kv, self.generation, users=1)

    def insert(self, entry: PrefixEntry) -> None:
        """Make a complete entry findable, unless it is of an earlier generation or another one contains it already."""
        if not self.is_enabled or entry.generation != self.generation:
            return
        matched, same = self.find(entry.tokens)
        if matched == len(entry.tokens) and same is not None and _covers(same, entry):
            return
        entry.is_cached = True
        self._by_age[id(entry)] = entry
        node, done = self._root, 0
        while done < len(entry.tokens):
            rest = entry.tokens[done:]
            child = node.children.get(int(rest[0]))
            if child is None:
                node.children[int(rest[0])] = _Node(rest, entries={id(entry): entry}, ends={id(entry): entry})
                return
            step = common_length(child.edge, rest)
            if step < len(child.edge):
                child = self._split(node, child, step)
            child.entries[id(entry)] = entry
            node, done = child, done + step
        node.ends[id(entry)] = entry

    def release(self, entry: PrefixEntry) -> None:
        """One user less; an entry that cannot be found again is freed with its last user."""
        entry.users -= 1
        if entry.users == 0 and not entry.is_cached:
            self._budget.give_back(len(entry.tokens))

    def evict(self, tokens: int) -> int:
        """Free unused entries, oldest first, until ``tokens`` are given back; return how many were."""
        freed = 0
        for entry in [e for e in self._by_age.values() if e.users == 0]:
            if freed >= tokens:
                break
            self._remove(entry)
            self._budget.give_back(len(entry.tokens))
            freed += len(entry.tokens)
        return freed

    def clear(self) -> None:
        """Forget every entry and begin a new generation; entries in use live until their last user is done."""
        self.generation += 1
        for entry in self._by_age.values():
            entry.is_cached = False
            if entry.users == 0:
                self._budget.give_back(len(entry.tokens))
        self._by_age.clear()
        self._root = _Node(np.zeros(0, dtype=np.int32))

    def _split(self, parent: _Node, child: _Node, at: int) -> _Node:
        upper = _Node(child.edge[:at], entries=dict(child.entries))
        lower = _Node(child.edge[at:], children=child.children, entries=child.entries, ends=child.ends)
        upper.children[int(lower.edge[0])] = lower
        parent.children[int(upper.edge[0])] = upper
        return upper

    def _remove(self, entry: PrefixEntry) -> None:
        del self._by_age[id(entry)]
        entry.is_cached = False
        node, done = self._root, 0
        while done < len(entry.tokens):
            child = node.children[int(entry.tokens[done])]
            del child.entries[id(entry)]
            child.ends.pop(id(entry), None)
            if not child.entries:
                del node.children[int(entry.tokens[done])]
                return
            node, done = child, done + len(child.edge)


def _covers(kept: PrefixEntry, new: PrefixEntry) -> bool:
    """Whether ``kept``, which starts with all tokens of ``new``, makes ``new`` needless."""
    return new.logits is None or (len(kept.tokens) == len(new.tokens) and kept.logits is not None)
