"""Nothing that was computed with earlier weights, even in part, is used for a request that comes after an update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engines.api import PauseMode
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.request import Request
from tests.support.tiny_models import make_tiny_model
from tests.unit.engines.driver import GREEDY, Driver, prompt_of

SAMPLING = GREEDY | {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Old and new weights of one shape."""
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "old", "qwen3"), make_tiny_model(folder / "new", "qwen3", seed=1)


def in_chunks(driver: Driver) -> list[Request]:
    """A prompt of which the first part is computed."""
    requests = [driver.submit(prompt_of(60), sampling=SAMPLING)]
    driver.run(steps=2)
    assert not requests[0].output_ids
    return requests


def in_chunks_with_scores(driver: Driver) -> list[Request]:
    requests = [driver.submit(prompt_of(60), sampling=SAMPLING, logprob_start_len=0)]
    driver.run(steps=2)
    return requests


def running(driver: Driver) -> list[Request]:
    requests = [driver.submit(prompt_of(20, seed=i), sampling=SAMPLING) for i in range(3)]
    driver.run(steps=7)
    assert all(r.row is not None for r in requests)
    return requests


def group_over_one_prompt(driver: Driver) -> list[Request]:
    requests = [driver.submit(prompt_of(40), sampling=SAMPLING | {"max_new_tokens": n}) for n in (3, 8, 8)]
    driver.run(steps=5)
    return requests


def in_the_queue(driver: Driver) -> list[Request]:
    return [driver.submit(prompt_of(20), sampling=SAMPLING)]


def retracted_before(driver: Driver) -> list[Request]:
    requests = [driver.submit(prompt_of(20), sampling=SAMPLING)]
    driver.run(steps=5)
    driver.scheduler.retract()
    return requests


def finished(driver: Driver) -> list[Request]:
    requests = [driver.submit(prompt_of(20), sampling=SAMPLING)]
    driver.run()
    return requests


STATES: list[Callable[[Driver], list[Request]]] = [
    in_chunks, in_chunks_with_scores, running, group_over_one_prompt, in_the_queue, retracted_before, finished,
]  # fmt: skip


def update_in_pieces(engine: Engine, new: Driver, mode: PauseMode) -> None:
    tensors = [(name, new.model.weights.read(name)) for name in new.model.weights.slots]
    engine.begin_update()
    for start in range(0, len(tensors), 5):
        engine.write_weights(tensors[start : start + 5], version="new", flush=mode != "in_place", abort_all=False)
    engine.end_update()


def assert_as_new(driver: Driver, tokens: list[int], new: Path) -> None:
    """A prompt gets, alone and with its scores, what a fresh engine gives it."""
    for body in ({}, {"logprob_start_len": 0}):
        got = driver.submit(tokens, sampling=SAMPLING, **body)
        driver.run()
        expected = Driver(new).generate(tokens, sampling=SAMPLING, **body)
        assert got.output_ids == expected.output_ids
        for a, b in (
            (got.output_log_probs, expected.output_log_probs),
            (got.input_log_probs, expected.input_log_probs),
        ):
            torch.testing.assert_close(torch.tensor((a or [])[1:]), torch.tensor((b or [])[1:]), atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("share_from", [1, 10_000])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
@pytest.mark.parametrize("state", STATES, ids=lambda s: s.__name__)
def test_requests_after_an_update(
    state: Callable[[Driver], list[Request]], mode: PauseMode, share_from: int, paths: tuple[Path, Path]
) -> None:
    old, new = paths
    driver = Driver(old, prefill_tokens=16, share_from_tokens=share_from)
    engine = Engine(driver.model, driver.scheduler, weight_version="old")
    earlier = state(driver)
    engine.pause(mode)
    update_in_pieces(engine, Driver(new), mode)
    engine.resume()
    # The same prompt again while the earlier requests still run, which must not join them.
    joined = driver.submit(earlier[0].prompt.tolist(), sampling=SAMPLING)
    driver.run()
    expected = Driver(new).generate(earlier[0].prompt.tolist(), sampling=SAMPLING)
    assert joined.output_ids == expected.output_ids
    torch.testing.assert_close(
        torch.tensor(joined.output_log_probs), torch.tensor(expected.output_log_probs), atol=1e-5, rtol=1e-6
    )
    for request in earlier:
        sequence = [*request.prompt.tolist(), *request.output_ids]
        assert_as_new(driver, request.prompt.tolist(), new)
        assert_as_new(driver, [*sequence, 7], new)
    assert driver.scheduler.flush()
    assert driver.scheduler.budget.used == 0


def test_what_is_computed_after_the_update_is_found_again(paths: tuple[Path, Path]) -> None:
    old, new = paths
    driver = Driver(old)
    engine = Engine(driver.model, driver.scheduler, weight_version="old")
    running(driver)
    engine.pause("in_place")
    update_in_pieces(engine, Driver(new), "in_place")
    engine.resume()
    driver.run()
    driver.generate(prompt_of(20), sampling=SAMPLING)
    assert driver.generate(prompt_of(20), sampling=SAMPLING).cached_tokens == 19


@pytest.mark.parametrize("change", ["reset", "from disk"])
def test_other_ways_to_change_the_weights(change: str, paths: tuple[Path, Path]) -> None:
    from slime.engines.api import UpdateFromDiskMessage, parse_message

    old, new = paths
    driver = Driver(old)
    engine = Engine(driver.model, driver.scheduler, weight_version="old")
    driver.generate(prompt_of(20), sampling=SAMPLING)
    if change == "reset":
        engine.reset_weights()
    else:
        body: dict[str, Any] = {"model_path": str(new)}
        engine.load_from_disk(parse_message(UpdateFromDiskMessage, body))
    assert driver.generate(prompt_of(20), sampling=SAMPLING).cached_tokens == 0


def test_what_comes_during_a_pause_waits_for_its_end(paths: tuple[Path, Path]) -> None:
    driver = Driver(paths[0])
    engine = Engine(driver.model, driver.scheduler, weight_version="old")
    (early,) = in_the_queue(driver)
    engine.pause("in_place")
    late = driver.submit(prompt_of(20, seed=1), sampling=SAMPLING)
    engine.pause("abort")  # the update begins its own pause
    engine.resume()
    driver.run()
    assert early.finish is not None
    assert early.finish["type"] == "abort"
    assert late.finish == {"type": "length", "length": 8}
