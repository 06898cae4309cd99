"""What ends an output, checked where no engine did.

An engine that is told to abort may run one more step and report its token without asking whether the output has ended
with it; and one that continues an output looks for stop strings only in what it adds. Both cases are looked at here,
with the engines' own rules: end and stop tokens, stop strings, not before ``min_new_tokens``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECENT_TOKENS = 16
"""Tokens at the end of an aborted output that an engine may not have checked: those of one speculative step."""
_TOKENS_PER_CHARACTER = 4
_CONFIG_FILES = ("config.json", "generation_config.json")


def end_token_ids(model_path: str, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an output by themselves: the tokenizer's and those that the model directory names."""
    found = {tokenizer.eos_token_id}
    for name in _CONFIG_FILES:
        path = Path(model_path) / name
        if path.is_file():
            config = json.loads(path.read_text())
            for value in (config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")):
                found.update(value if isinstance(value, list) else [value])
    return frozenset(int(token_id) for token_id in found if token_id is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Where an output ends: after ``count`` tokens, because of a token id or a string."""

    count: int
    matched: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConditions:
    """The stop conditions of one request.

    Args:
        token_ids: Tokens that end the output.
        strings: Texts that do.
        min_new_tokens: Tokens before which nothing ends it.
        tokenizer: Decodes the output for the search of strings.
    """

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    min_new_tokens: int
    tokenizer: Any

    @classmethod
    def of(cls, params: Mapping[str, Any], end_ids: frozenset[int], tokenizer: Any) -> StopConditions:
        """Those of a request with the sampling parameters ``params``."""
        stop = params.get("stop") or ()
        ids = end_ids | frozenset(params.get("stop_token_ids") or ())
        return cls(
            token_ids=frozenset() if params.get("ignore_eos") else ids,
            strings=(stop,) if isinstance(stop, str) else tuple(stop),
            min_new_tokens=params.get("min_new_tokens") or 0,
            tokenizer=tokenizer,
        )

    def first(self, output_ids: Sequence[int], checked: int) -> Stop | None:
        """The first stop that ends after the ``checked`` leading tokens, in which an engine found none.

        Args:
            output_ids: ``[n]`` all output tokens.
            checked: How many of them were checked by an engine.
        """
        window = _TOKENS_PER_CHARACTER * max((len(text) for text in self.strings), default=0)
        start = max(0, checked - window)
        text = self._text(output_ids[start:checked])
        for count in range(checked + 1, len(output_ids) + 1):
            before, text = text, self._text(output_ids[start:count])
            if count < self.min_new_tokens:
                continue
            token_id = output_ids[count - 1]
            matched = token_id if token_id in self.token_ids else self._string(before, text)
            if matched is not None:
                return Stop(count=count, matched=matched)
        return None

    def across(self, output_ids: Sequence[int], border: int) -> Stop | None:
        """The first stop string that begins before the token ``border`` and ends behind it."""
        if not self.strings or border == 0:
            return None
        window = _TOKENS_PER_CHARACTER * max(len(text) for text in self.strings)
        stop = self.first(output_ids[: border + window], border)
        return stop if stop is not None and isinstance(stop.matched, str) else None

    def _string(self, before: str, text: str) -> str | None:
        """The string in ``text`` that is not in ``before``, the text one token earlier."""
        found = [
            (at, string)
            for string in self.strings
            if (at := text.find(string, max(0, len(before) - len(string) + 1))) >= 0
        ]
        return min(found)[1] if found else None

    def _text(self, ids: Sequence[int]) -> str:
        if not self.strings:
            return ""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)
