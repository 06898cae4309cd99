"""Routed experts of prompts and outputs: those of transformers, however the engine came to run the tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.engines.embedded.replies import build_reply
from slime.engines.embedded.request import Request
from slime.replay_data import decode_int32
from tests.support.tiny_models import Family, make_tiny_model
from tests.unit.engines.driver import GREEDY, Driver, prompt_of

FAMILIES: tuple[Family, ...] = ("qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=3)


def reference_routes(path: Path, tokens: list[int]) -> np.ndarray:
    """``[T, layers, topk]`` sorted expert ids of transformers, 0 in dense layers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    found: dict[int, torch.Tensor] = {}
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _, __, out, i=i: found.update({i: out[2]}))
    with torch.inference_mode():
        model(torch.tensor([tokens]))
    topk = next(iter(found.values())).shape[1]
    routes = np.zeros((len(tokens), len(model.model.layers), topk), dtype=np.int32)
    for i, ids in found.items():
        routes[:, i] = ids.sort(-1).values.numpy()
    return routes


def replied(driver: Driver, request: Request) -> np.ndarray | None:
    """Routes of the answer, sorted within a token and layer."""
    progress = next(event for event in driver.events if event.request is request and event.is_last)
    packed = build_reply(progress, driver.text, "v").get("meta_info").get("routed_experts")
    if packed is None:
        return None
    shape = driver.shape
    assert shape.experts is not None
    return np.sort(decode_int32(packed).reshape(-1, shape.num_layers, shape.experts.num_active), -1)


def assert_true_routes(driver: Driver, request: Request, path: Path) -> None:
    tokens = [*request.prompt.tolist(), *request.output_ids]
    found = replied(driver, request)
    assert found is not None
    np.testing.assert_array_equal(found, reference_routes(path, tokens)[:-1])


def ask(driver: Driver, prompt: list[int], count: int = 8, **body: Any) -> Request:
    return driver.submit(
        prompt,
        sampling=GREEDY | {"max_new_tokens": count, **body.pop("sampling", {})},
        return_routed_experts=True,
        **body,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: Family, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, family, num_hidden_layers=3)
    driver = Driver(path, prefill_tokens=16)
    request = ask(driver, prompt_of(40), 12)
    driver.run()
    assert_true_routes(driver, request, path)


def chunked(driver: Driver) -> list[Request]:
    return [ask(driver, prompt_of(40), 3)]


def long_outputs_that_move(driver: Driver) -> list[Request]:
    """Rows outgrow their slabs, and move up when others leave."""
    return [ask(driver, prompt_of(20 + i, seed=i), count) for i, count in enumerate((5, 120, 30, 70))]


def prompt_known_before(driver: Driver) -> list[Request]:
    driver.generate(prompt_of(30), sampling=GREEDY | {"max_new_tokens": 2})  # did not ask for routes
    request = ask(driver, prompt_of(30))
    driver.run()
    assert request.cached_tokens == 29
    return [request]


def later_turn(driver: Driver) -> list[Request]:
    first = driver.generate(prompt_of(30), sampling=GREEDY | {"max_new_tokens": 20})
    request = ask(driver, [*first.prompt.tolist(), *first.output_ids, *prompt_of(6, seed=4)])
    driver.run()
    assert request.cached_tokens == 49
    return [request]


def group(driver: Driver) -> list[Request]:
    sampling = {"temperature": 1.0}
    return [ask(driver, prompt_of(50), 10, sampling=sampling | {"sampling_seed": i}) for i in range(4)]


def retracted(driver: Driver) -> list[Request]:
    requests = [ask(driver, prompt_of(30, seed=i), 20) for i in range(3)]
    driver.run(steps=9)
    driver.scheduler.retract()
    assert driver.scheduler.flush()
    return requests


def aborted_while_running(driver: Driver) -> list[Request]:
    request = ask(driver, prompt_of(30), 20)
    driver.run(steps=9)
    driver.scheduler.abort(lambda _: True, "enough")
    assert len(request.output_ids) == 8
    return [request]


def aborted_after_a_retraction(driver: Driver) -> list[Request]:
    request = ask(driver, prompt_of(30), 20)
    driver.run(steps=9)
    driver.scheduler.retract()
    driver.scheduler.abort(lambda _: True, "enough")
    return [request]


def one_token_or_none(driver: Driver) -> list[Request]:
    return [ask(driver, prompt_of(9), 1), ask(driver, prompt_of(9), 0)]


SCENARIOS: list[Callable[[Driver], list[Request]]] = [
    chunked, long_outputs_that_move, prompt_known_before, later_turn, group, retracted, aborted_while_running,
    aborted_after_a_retraction, one_token_or_none,
]  # fmt: skip


@pytest.mark.parametrize("share_from", [1, 10_000])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_however_a_token_was_run(scenario: Callable[[Driver], list[Request]], share_from: int, path: Path) -> None:
    driver = Driver(path, prefill_tokens=16, share_from_tokens=share_from)
    requests = scenario(driver)
    driver.run()
    for request in requests:
        assert_true_routes(driver, request, path)


def test_short_memory(path: Path) -> None:
    driver = Driver(path, max_total_tokens=1300)
    requests = [ask(driver, prompt_of(20, seed=i), 400) for i in range(3)]
    driver.run()
    assert sum(r.num_retractions for r in requests) > 0
    for request in requests:
        assert_true_routes(driver, request, path)


def test_a_start_leaves_out_what_is_known(path: Path) -> None:
    driver = Driver(path)
    requests = [ask(driver, prompt_of(20), 6, routed_experts_start_len=start) for start in (0, 7, 20)]
    driver.run()
    whole = replied(driver, requests[0])
    assert whole is not None
    for request, start in zip(requests, (0, 7, 20), strict=True):
        np.testing.assert_array_equal(replied(driver, request), whole[start:])


def test_a_token_keeps_the_experts_that_its_successor_was_drawn_with(path: Path) -> None:
    driver = Driver(path)
    request = ask(driver, prompt_of(20), 12)
    driver.run(steps=5)
    before = reference_routes(path, [*request.prompt.tolist(), *request.output_ids])[:-1]
    driver.scheduler.retract()
    driver.scheduler.forget_prefixes()
    store = driver.model.weights
    store.write([(name, -store.read(name)) for name in store.slots if name.endswith("mlp.gate.weight")])
    driver.run()
    found = replied(driver, request)
    assert found is not None
    np.testing.assert_array_equal(found[: len(before)], before)
    after = Driver(path)
    after.model.weights.write([(name, store.read(name)) for name in store.slots])
    same = ask(after, [*request.prompt.tolist(), *request.output_ids[:5]], 7)
    after.run()
    again = replied(after, same)
    assert again is not None
    np.testing.assert_array_equal(found[len(before) :], again[len(before) :])
    assert (again[: len(before)] != before).any()


def test_nothing_was_run(path: Path) -> None:
    driver = Driver(path)
    request = ask(driver, prompt_of(20))
    driver.scheduler.abort(lambda _: True, "enough")
    assert replied(driver, request) is None
    unasked = driver.generate(prompt_of(20), sampling=GREEDY | {"max_new_tokens": 2})
    assert replied(driver, unasked) is None
