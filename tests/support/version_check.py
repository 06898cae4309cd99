"""Change the weights of an engine, and recompute each token's log-prob with the weights of its version.

The reference for updates while generating: whole sequences by transformers, without any cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from slime.engines.api import PauseMode
from slime.http_control import request
from slime.version_spans import VersionSpan


class LogProbs(Protocol):
    """One version's model."""

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[n - 1]`` log-prob of each token but the first, given all before it."""
        ...


def change_weights(engine: str, path: Path, version: str, mode: PauseMode) -> None:
    """Load a model directory into a running engine, in the order in which the bracket of an update does it."""

    def post(route: str, body: dict[str, Any]) -> Any:
        return request(engine + route, body, timeout_seconds=60)

    post("/pause_generation", {"mode": mode})
    if mode != "in_place":
        post("/flush_cache", {})  # SGLang asked to wait, by a timeout, would wait for the retracted requests to end
    body = {"model_path": str(path), "weight_version": version, "flush_cache": mode != "in_place"}
    assert post("/update_weights_from_disk", body)["success"]
    post("/continue_generation", {"torch_empty_cache": False})


def transformers_log_probs(model_path: Path) -> LogProbs:
    """The model of a directory in float32, whole sequence at once, without any cache."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    @torch.no_grad()
    def log_probs(tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)])
        rows = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
        return rows.gather(-1, ids[0, 1:, None])[:, 0]

    return log_probs


def recomputed(
    tokens: Sequence[int], response_length: int, spans: Sequence[VersionSpan], models: Mapping[str, LogProbs]
) -> torch.Tensor:
    """``[R]`` log-probs of a response, each token by the weights that its span names; NaN where no span does."""
    expected = torch.full((response_length,), float("nan"), dtype=torch.float64)
    prompt_length = len(tokens) - response_length
    for span in spans:
        rows = models[span.version](tokens)
        expected[span.start : span.end] = rows[prompt_length + span.start - 1 : prompt_length + span.end - 1]
    return expected


def worst_difference(
    tokens: Sequence[int],
    log_probs: Sequence[float],
    spans: Sequence[VersionSpan],
    models: Mapping[str, LogProbs],
) -> dict[str, float]:
    """Largest distance of ``[R]`` reported log-probs from the recomputed ones, by version.

    Every token must belong to a span: what nobody can recompute is no evidence.
    """
    expected = recomputed(tokens, len(log_probs), spans, models)
    assert not expected.isnan().any(), f"tokens without a version: {spans} of {len(log_probs)}"
    off = (expected - torch.tensor(list(log_probs), dtype=torch.float64)).abs()
    worst: dict[str, float] = {}
    for span in spans:
        worst[span.version] = max(worst.get(span.version, 0.0), float(off[span.start : span.end].max()))
    return worst
