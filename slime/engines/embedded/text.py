"""Text of a request: encoding prompts, decoding outputs, finding stop strings.

The tokenizer is loaded on first use in whichever thread needs it first; ``start_loading`` does it in the background,
so that a server is ready before transformers is imported. Tests hold: incremental decoding gives the text of decoding
at once, whatever the token boundaries within a character.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from slime.engines.api import RequestError, SamplingParams

_REPLACEMENT = "\ufffd"


class Text:
    """The tokenizer of one model, or none at all.

    Args:
        path: Directory of the tokenizer; None refuses text (``--skip-tokenizer-init``).
        trust_remote_code: Whether code in the directory may run.
    """

    def __init__(self, path: str | None, *, trust_remote_code: bool = False) -> None:
        self.path = path
        self._trust_remote_code = trust_remote_code
        self._lock = threading.Lock()
        self._tokenizer: Any = None

    @property
    def is_loaded(self) -> bool:
        """Whether a call will not wait for the tokenizer to be loaded."""
        return self._tokenizer is not None

    def start_loading(self) -> None:
        """Load the tokenizer in a background thread."""
        if self.path is not None:
            threading.Thread(target=self._get, name="tokenizer-load", daemon=True).start()

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        return cast("list[int]", self._get()(text)["input_ids"])

    def decode(self, ids: Sequence[int], params: SamplingParams) -> str:
        """Text of ``ids``; empty without a tokenizer."""
        if self.path is None or not ids:
            return ""
        return cast(
            str,
            self._get().decode(
                list(ids),
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
        )

    def token(self, token_id: int) -> str | None:
        """Text of one token, for log-prob triples."""
        return None if self.path is None else cast(str, self._get().decode([token_id]))

    def eos_ids(self) -> tuple[int, ...]:
        """Id of the tokenizer's eos token, read from its files without loading it."""
        if self.path is None:
            return ()
        settings = _read_json(Path(self.path) / "tokenizer_config.json")
        eos = settings.get("eos_token")
        content = eos.get("content") if isinstance(eos, dict) else eos
        if not content:
            return ()
        for key, token in settings.get("added_tokens_decoder", {}).items():
            if token.get("content") == content:
                return (int(key),)
        added = _read_json(Path(self.path) / "tokenizer.json").get("added_tokens", [])
        return tuple(int(token["id"]) for token in added if token["content"] == content)

    def _get(self) -> Any:
        if self.path is None:
            raise RequestError("text needs a tokenizer, and the server runs with --skip-tokenizer-init; send input_ids")
        with self._lock:
            if self._tokenizer is None:
                from transformers import AutoTokenizer  # takes a second; a server is ready without it

                self._tokenizer = AutoTokenizer.from_pretrained(self.path, trust_remote_code=self._trust_remote_code)
            return self._tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


class StopScanner:
    """Looks for stop strings in the growing output of one request.

    Args:
        text: The tokenizer.
        params: With ``stop`` or ``stop_regex``.

    Raises:
        RequestError: A regular expression does not compile.
    """

    def __init__(self, text: Text, params: SamplingParams) -> None:
        self._text = text
        self._params = params
        self._ids: list[int] = []
        self._settled = 0
        self._shown = 0
        self._output = ""
        try:
            self._patterns = [re.compile(pattern) for pattern in params.stop_regex]
        except re.error as error:
            raise RequestError(f"sampling_params.stop_regex does not compile: {error}") from error
        self._longest = max((len(stop) for stop in params.stop), default=0)

    def push(self, token_id: int) -> str | None:
        """Add one token; return the text that stops the output, if there is one now."""
        self._ids.append(token_id)
        before = self._text.decode(self._ids[self._settled : self._shown], self._params)
        after = self._text.decode(self._ids[self._settled :], self._params)
        if after.endswith(_REPLACEMENT):  # in the middle of a character
            return None
        new = after[len(before) :]
        start = max(0, len(self._output) - self._longest + 1)
        self._output += new
        self._settled, self._shown = self._shown, len(self._ids)
        found = [(at, stop) for stop in self._params.stop if (at := self._output.find(stop, start)) >= 0]
        if found:
            return min(found)[1]
        for pattern in self._patterns:
            match = pattern.search(self._output)
            if match and match.group():
                return match.group()
        return None


def final_text(text: Text, ids: Sequence[int], params: SamplingParams, matched: int | str | None) -> str:
    """Text of a finished output; what stopped it is cut off unless ``no_stop_trim``."""
    if params.no_stop_trim or matched is None:
        return text.decode(ids, params)
    if isinstance(matched, int):
        return text.decode(ids[:-1], params)
    whole = text.decode(ids, params)
    at = whole.find(matched)
    return whole if at < 0 else whole[:at]
