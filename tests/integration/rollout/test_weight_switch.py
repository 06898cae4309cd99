"""Weights change while a rollout generates: every token's log-prob is that of the weights its span names.

Through the real router on a real engine; the reference recomputes whole sequences by transformers, without a cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime.engines.api import PauseMode
from slime.http_control import request
from slime.rollout.context import RolloutContext
from slime.rollout.pipeline import generate_rollout
from slime.types import Sample
from slime.version_spans import VersionSpan, spans_of_reply
from tests.support.engine_process import engine_process, router_process
from tests.support.rollout_args import ListSource, open_context
from tests.support.tiny_models import make_tiny_model
from tests.support.version_check import LogProbs, change_weights, transformers_log_probs, worst_difference

pytestmark = pytest.mark.timeout(120)

TOLERANCE = 1e-5
VERSIONS = ("1", "2")
LENGTH = 1000
PROMPT = "one prompt whose beginning every sample shares, so that it is found in the prefix cache: "


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for each version."""
    folder = tmp_path_factory.mktemp("versions")
    return {v: make_tiny_model(folder / v, "qwen3", seed=int(v), max_position_embeddings=4096) for v in VERSIONS}


@pytest.fixture(scope="module")
def models(paths: dict[str, Path]) -> dict[str, LogProbs]:
    return {version: transformers_log_probs(path) for version, path in paths.items()}


@pytest.fixture(scope="module")
def urls(paths: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """An engine and the router in front of it."""
    with engine_process(paths["1"], "--weight-version", "1") as engine, router_process([engine]) as router:
        yield engine, router


def wait_for_tokens(engine: str, requests: int) -> None:
    """Until this many requests run, and have run for a while."""
    give_up_at = time.monotonic() + 20
    while request(f"{engine}/get_load", timeout_seconds=5)[0]["num_running_reqs"] < requests:
        assert time.monotonic() < give_up_at, "the requests do not run"
        time.sleep(0.01)
    time.sleep(0.1)


def generate(context: RolloutContext, source: ListSource) -> list[Sample]:
    context.sampling_params["ignore_eos"] = True
    return [sample for group in context.generate(generate_rollout, 0, source).samples for sample in group]


def new_requests(router: str, prompts: list[str], context: RolloutContext) -> list[tuple[list[int], Any]]:
    """Ask for a few tokens of each prompt; (ids, reply) pairs."""

    def ask(prompt: str) -> tuple[list[int], Any]:
        ids = context.tokenizer.encode(prompt, add_special_tokens=False)
        sampling = {"max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        return ids, request(f"{router}/generate", body, timeout_seconds=30)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_a_rollout_across_a_switch(
    mode: PauseMode, paths: dict[str, Path], models: dict[str, LogProbs], urls: tuple[str, str]
) -> None:
    engine, router = urls
    change_weights(engine, paths["1"], "1", "abort")
    flags = {"rollout_batch_size": 4, "rollout_max_response_len": LENGTH, "n_samples_per_prompt": 2}
    with open_context(paths["1"], router, **flags) as context, ThreadPoolExecutor(2) as pool:
        prompts = [PROMPT + str(i) for i in range(4)]
        rollout = pool.submit(generate, context, ListSource(prompts, 2))
        wait_for_tokens(engine, 8)
        request(f"{engine}/pause_generation", {"mode": mode}, timeout_seconds=20)
        # These come during the pause: one has the prompt of a request that runs, one shares its beginning.
        late = pool.submit(new_requests, router, [prompts[0], PROMPT + "late"], context)
        time.sleep(0.2)
        change_weights(engine, paths["2"], "2", mode)
        samples = rollout.result(60)
        after = [*late.result(30), *new_requests(router, [prompts[1], PROMPT + "after"], context)]
    assert len(samples) == 8
    for sample in samples:
        spans = sample.weight_version_spans
        assert [span.version for span in spans] == ["1", "2"]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, LENGTH)
        assert sample.rollout_log_probs is not None
        worst = worst_difference(sample.tokens, sample.rollout_log_probs, spans, models)
        assert worst["1"] <= TOLERANCE
        # In place the new weights go on with what the old ones computed, which the user chose and the check sees.
        assert (worst["2"] > 0.1) if mode == "in_place" else (worst["2"] <= TOLERANCE)
        wrong = [VersionSpan("2", 0, spans[1].end)]
        assert worst_difference(sample.tokens, sample.rollout_log_probs, wrong, models)["2"] > 0.1
    for ids, reply in after:
        meta, output = reply["meta_info"], reply["output_ids"]
        spans = spans_of_reply(meta, len(output))
        assert [span.version for span in spans] == ["2"]
        log_probs = [row[0] for row in meta["output_token_logprobs"]]
        assert worst_difference([*ids, *output], log_probs, spans, models)["2"] <= TOLERANCE


UNEVEN = """
from slime.rollout.sglang_rollout import generate

async def uneven(args, sample, sampling_params):
    # The first sample ends first, and so ends the rollout while the others run.
    longest = sampling_params["max_new_tokens"] // (1 if sample.index else 2)
    return await generate(args, sample, {**sampling_params, "max_new_tokens": longest})
"""


def test_a_sample_that_crosses_two_switches_and_two_rollouts(
    paths: dict[str, Path], models: dict[str, LogProbs], urls: tuple[str, str], tmp_path: Path
) -> None:
    engine, router = urls
    change_weights(engine, paths["1"], "1", "abort")
    (tmp_path / "plugin.py").write_text(UNEVEN)
    flags = {
        "rollout_batch_size": 1, "over_sampling_batch_size": 3, "rollout_max_response_len": 2 * LENGTH,
        "n_samples_per_prompt": 1, "partial_rollout": True, "mask_offpolicy_in_partial_rollout": True,
        "custom_generate_function_path": f"{tmp_path / 'plugin.py'}:uneven",
    }  # fmt: skip
    source = ListSource([PROMPT, PROMPT + "x", PROMPT + "y"], 1)
    with open_context(paths["1"], router, **flags) as context, ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(generate, context, source)
        wait_for_tokens(engine, 3)
        change_weights(engine, paths["2"], "2", "abort")
        rollout.result(60)
        cut = {group[0].index: group[0].response_length for group in source.returned}
        change_weights(engine, paths["1"], "1", "retract")
        (sample,) = generate(context, source)
    length = cut[sample.index]
    assert 0 < length < 2 * LENGTH
    spans = sample.weight_version_spans
    assert [span.version for span in spans] == ["1", "2", "1"]
    assert (spans[-1].start, spans[-1].end) == (length, 2 * LENGTH)
    assert sample.rollout_log_probs is not None
    worst = worst_difference(sample.tokens, sample.rollout_log_probs, spans, models)
    assert max(worst.values()) <= TOLERANCE
    assert sample.loss_mask == [0] * length + [1] * (2 * LENGTH - length)
