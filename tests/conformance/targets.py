"""The engines under test as clients see them, and requests to them that run in the background."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

Kind = Literal["embedded", "sglang"]
TOLERANCE = 1e-5
PROMPT = list(range(40, 70))
OTHER_PROMPT = [201, 7, 7, 99, 150, 33]


@dataclass(frozen=True)
class Target:
    """One engine, and the way that requests for samples take to it.

    Args:
        kind: Which engine.
        url: Its own address, for control.
        generate_url: Address for samples: its own, or that of the router in front of it.
        model_path: What it was started with.
    """

    kind: Kind
    url: str
    generate_url: str
    model_path: Path

    @property
    def is_direct(self) -> bool:
        return self.url == self.generate_url

    def generate(self, *, expect: int = 200, **body: Any) -> Any:
        return call(self.generate_url, "/generate", body, expect=expect)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, expect: int = 200) -> Any:
        return call(self.url, path, body or {}, expect=expect)

    def get(self, path: str, *, expect: int = 200) -> Any:
        return call(self.url, path, expect=expect)

    def status(self, path: str, body: Mapping[str, Any] | None = None) -> int:
        """Status of an answer, whichever it is."""
        return exchange(self.url, path, body)[0]


def call(url: str, path: str, body: Mapping[str, Any] | None = None, *, expect: int = 200) -> Any:
    """The parsed answer, or its text, after checking the status; a request without body is a GET."""
    status, content = exchange(url, path, body)
    assert status == expect, (path, status, content)
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        return content.decode()


def exchange(url: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@dataclass
class Stream:
    """A streamed request that is read in the background."""

    target: Target
    body: dict[str, Any]
    chunks: list[dict[str, Any]] = field(default_factory=list)
    saw_done: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_tokens(self, count: int, seconds: float = 30.0) -> Stream:
        """Wait until so many tokens have come; the request still runs then."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._tokens() >= count or not self._thread.is_alive(), seconds)
            assert came, f"{self._tokens()} of {count} tokens after {seconds:g} s"
        assert self._failure is None, self._failure
        assert self.last["meta_info"]["finish_reason"] is None, "the request ended too early"
        return self

    def result(self, seconds: float = 60.0) -> dict[str, Any]:
        """The last chunk."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"not finished after {seconds:g} s, {self._tokens()} tokens"
        assert self._failure is None, self._failure
        assert self.saw_done
        return self.last

    @property
    def last(self) -> dict[str, Any]:
        return self.chunks[-1]

    @property
    def is_finished(self) -> bool:
        return not self._thread.is_alive()

    def _tokens(self) -> int:
        return len(self.chunks[-1]["output_ids"]) if self.chunks else 0

    def _read(self) -> None:
        data = json.dumps(self.body | {"stream": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.target.generate_url + "/generate", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                for line in reply:
                    self._take(line.decode().strip())
        except (OSError, ValueError) as error:
            self._failure = error
        with self._changed:
            self._changed.notify_all()

    def _take(self, line: str) -> None:
        if not line:
            return
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            self.saw_done = True
            return
        with self._changed:
            self.chunks.append(json.loads(line.removeprefix("data: ")))
            self._changed.notify_all()


class Reference:
    """What transformers computes for the same model directory, in float32."""

    def __init__(self, path: Path) -> None:
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)

    def rows(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Log-probs ``[len(output), V]`` at each position of the output, at a temperature."""
        tokens = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            logits = self._model(tokens).logits[0, len(prompt) - 1 : -1].double()
        return torch.log_softmax(logits / temperature, -1)

    def log_probs(self, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probs of the output tokens."""
        rows = self.rows(prompt, output, temperature)
        return rows.gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def log_probs_of(reply: Mapping[str, Any]) -> list[float]:
    """The reported log-probs, after checking that they belong to the tokens."""
    triples = reply["meta_info"]["output_token_logprobs"]
    assert [triple[1] for triple in triples] == reply["output_ids"]
    return [triple[0] for triple in triples]
