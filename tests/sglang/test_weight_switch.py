"""Weights change while the real SGLang generates: every token's log-prob is that of the weights its span names.

Rollouts go through the real router, updates through our bracket; the radix cache is on. The reference recomputes
whole sequences by transformers, without a cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime.engines.api import PauseMode
from slime.engines.features import ask_features
from slime.http_control import request
from slime.rollout.context import RolloutContext
from slime.rollout.pipeline import generate_rollout
from slime.types import Sample
from slime.version_spans import VersionSpan, spans_of_reply
from slime.weights.pause import choose_pause_mode
from tests.sglang.servers import sglang_server
from tests.support.engine_process import router_process
from tests.support.rollout_args import ListSource, open_context
from tests.support.tiny_models import make_tiny_model
from tests.support.version_check import LogProbs, change_weights, transformers_log_probs, worst_difference

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 1e-5
LENGTH = 500
PROMPT = "one prompt whose beginning every sample shares, so that it is found in the radix cache: "


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for each of two versions."""
    folder = tmp_path_factory.mktemp("versions")
    return {v: make_tiny_model(folder / v, "qwen3", seed=int(v), max_position_embeddings=4096) for v in ("1", "2")}


@pytest.fixture(scope="module")
def models(paths: dict[str, Path]) -> dict[str, LogProbs]:
    return {version: transformers_log_probs(path) for version, path in paths.items()}


@pytest.fixture(scope="module")
def urls(paths: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """A server and the router in front of it."""
    with sglang_server(paths["1"], "--weight-version", "1") as server, router_process([server.url]) as router:
        yield server.url, router


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    return request(url + path, body, timeout_seconds=60)


def generate(context: RolloutContext, prompts: list[str]) -> list[Sample]:
    context.sampling_params["ignore_eos"] = True
    return [s for group in context.generate(generate_rollout, 0, ListSource(prompts, 2)).samples for s in group]


def ask(router: str, context: RolloutContext, prompt: str) -> tuple[list[int], Any]:
    ids = context.tokenizer.encode(prompt, add_special_tokens=False)
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    return ids, post(router, "/generate", {"input_ids": ids, "sampling_params": sampling, "return_logprob": True})


def worst_of_reply(ids: list[int], reply: Any, models: dict[str, LogProbs]) -> dict[str, float]:
    output = reply["output_ids"]
    log_probs = [row[0] for row in reply["meta_info"]["output_token_logprobs"]]
    return worst_difference([*ids, *output], log_probs, spans_of_reply(reply["meta_info"], len(output)), models)


@pytest.mark.parametrize("mode", ["retract", "abort", "in_place"])
def test_a_rollout_across_a_switch(
    mode: PauseMode, paths: dict[str, Path], models: dict[str, LogProbs], urls: tuple[str, str]
) -> None:
    engine, router = urls
    change_weights(engine, paths["1"], "1", "abort")
    flags = {"rollout_batch_size": 2, "rollout_max_response_len": LENGTH, "n_samples_per_prompt": 2}
    with open_context(paths["1"], router, **flags) as context, ThreadPoolExecutor(3) as pool:
        prompts = [PROMPT + str(i) for i in range(2)]
        rollout = pool.submit(generate, context, prompts)
        time.sleep(0.4)
        post(engine, "/pause_generation", {"mode": mode})
        assert not rollout.done()
        # These come during the pause: one has the prompt of a request that runs, one shares its beginning.
        late = [pool.submit(ask, router, context, prompt) for prompt in (prompts[0], PROMPT + "late")]
        time.sleep(0.2)
        change_weights(engine, paths["2"], "2", mode)
        samples = rollout.result(90)
        after = [job.result(60) for job in late] + [ask(router, context, p) for p in (prompts[1], PROMPT + "after")]
    assert len(samples) == 4
    for sample in samples:
        spans = sample.weight_version_spans
        assert [span.version for span in spans] == ["1", "2"]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, LENGTH)
        assert sample.rollout_log_probs is not None
        worst = worst_difference(sample.tokens, sample.rollout_log_probs, spans, models)
        assert worst["1"] <= TOLERANCE
        # In place goes on with the keys and values of the old weights, which the user chose and the check sees.
        assert (worst["2"] > 0.1) if mode == "in_place" else (worst["2"] <= TOLERANCE)
        wrong = [VersionSpan("2", 0, LENGTH)]
        assert worst_difference(sample.tokens, sample.rollout_log_probs, wrong, models)["2"] > 0.1
    differences = [worst_of_reply(ids, reply, models)["2"] for ids, reply in after]
    if mode == "in_place":  # the radix cache is not flushed: new requests too start from what the old weights computed
        assert min(differences) > 0.1
    else:
        assert max(differences) <= TOLERANCE


def test_the_default_is_a_mode_that_is_right_there(urls: tuple[str, str]) -> None:
    features = ask_features(urls[0], timeout_seconds=30)
    assert features.has_version_spans
    assert choose_pause_mode("auto", features, name="engine 0", routing_replay=False) == "retract"
    assert choose_pause_mode("auto", features, name="engine 0", routing_replay=True) == "abort"
