"""Which tensors are checked after which synchronisation, when checking all would take too long.

An engine's checksum is a pass over its weights by its own code, at its own speed. So the tensors take turns: a fixed
share of the time of every synchronisation is spent, and what does not fit waits for the next. Tests hold: every
tensor's turn comes, and over many synchronisations the share is kept.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping

_LAYER = re.compile(r"\blayers\.\d+\.")


class Rotation:
    """Chooses the part of the tensors that one synchronisation checks: at first all of them.

    A part is made of units: the tensors of one layer, or a tensor outside layers. An engine that cannot leave tensors
    out is asked for all of them, but not after every synchronisation.

    Args:
        share: Of the time of a synchronisation without its check; None checks everything every time.
    """

    def __init__(self, *, share: float | None) -> None:
        self._share = share
        self._sizes: dict[str, int] = {}
        self._queue: deque[str] = deque()
        self._chosen: frozenset[str] | None = None
        self._seconds_per_byte: float | None = None
        self._debt_seconds = 0.0

    def wants(self, name: str) -> bool:
        """Whether the engine's tensor of this name is checked this time."""
        return self._chosen is None or unit_of(name) in self._chosen

    @property
    def is_idle(self) -> bool:
        """Whether nothing is checked this time."""
        return self._chosen is not None and not self._chosen

    def skipped(self) -> list[str]:
        """Patterns that the engine shall leave out: it skips every name that contains one."""
        return [] if self._chosen is None else [unit for unit in self._sizes if unit not in self._chosen]

    def learn(
        self, sizes: Mapping[str, int], *, send_seconds: float, check_seconds: float, has_parts: bool = True
    ) -> None:
        """Choose the next part by what this synchronisation took.

        Args:
            sizes: Bytes of every tensor that can be checked; empty after one that checked nothing.
            send_seconds: The synchronisation without the check.
            check_seconds: The check.
            has_parts: Whether the engines can leave tensors out.
        """
        if self._share is None:
            return
        units: dict[str, int] = {}
        for name, size in sizes.items():
            units[unit_of(name)] = units.get(unit_of(name), 0) + size
        is_first = not self._sizes
        if units and units.keys() != self._sizes.keys():
            self._queue = deque(units)
            self._seconds_per_byte = None
        self._sizes = units or self._sizes
        checked = sum(size for unit, size in units.items() if self._chosen is None or unit in self._chosen)
        if checked:
            # Averaged: machines are not always as fast, and a call also takes time that does not depend on the size.
            found = check_seconds / checked
            self._seconds_per_byte = found if self._seconds_per_byte is None else (self._seconds_per_byte + found) / 2
        allowed = self._share * send_seconds
        if not (is_first and has_parts):
            self._debt_seconds = max(0.0, self._debt_seconds + check_seconds - allowed)
        if has_parts:
            self._chosen = self._choose(allowed - self._debt_seconds)
        else:
            self._chosen = frozenset() if self._debt_seconds else None

    def _choose(self, seconds: float) -> frozenset[str] | None:
        """The units whose turn it is, as many as fit, but one at least; None for all."""
        per_byte = self._seconds_per_byte
        if per_byte is None or sum(self._sizes.values()) * per_byte <= seconds:
            return None
        chosen: list[str] = []
        for _ in range(len(self._queue)):
            seconds -= self._sizes[self._queue[0]] * per_byte
            if chosen and seconds < 0:
                break
            chosen.append(self._queue[0])
            self._queue.rotate(-1)
        return frozenset(chosen)


def unit_of(name: str) -> str:
    """The unit that a tensor belongs to: ``layers.N.``, or its own name."""
    layer = _LAYER.search(name)
    return layer[0] if layer else name
