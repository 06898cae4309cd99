"""Continuous batching: results never depend on what else is in the batch, and memory is always accounted for."""

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engines.embedded.request import Request
from tests.support.tiny_models import make_tiny_model
from tests.unit.engines.driver import GREEDY, Driver, prompt_of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def assert_same(a: Request, b: Request) -> None:
    assert a.output_ids == b.output_ids
    torch.testing.assert_close(torch.tensor(a.output_log_probs), torch.tensor(b.output_log_probs), atol=1e-5, rtol=1e-6)


def assert_idle(driver: Driver) -> None:
    """Nothing holds memory but kept prompts, which a flush gives back."""
    assert not driver.scheduler.has_work
    assert driver.scheduler.flush()
    assert driver.scheduler.budget.used == 0


@pytest.mark.parametrize("share_from", [1, 10_000])
@pytest.mark.parametrize("sampling", [GREEDY, {"ignore_eos": True, "sampling_seed": 5, "top_p": 0.9}])
def test_a_request_gets_the_same_alone_and_among_others(path: Path, share_from: int, sampling: dict[str, Any]) -> None:
    lengths = [(5, 30), (70, 90), (33, 1), (33, 60), (200, 20), (1, 40)]
    prompts = [prompt_of(length, seed=i) for i, (length, _) in enumerate(lengths)]
    bodies = [{"sampling": sampling | {"max_new_tokens": new}} for _, new in lengths]
    alone = [Driver(path).generate(p, **b) for p, b in zip(prompts, bodies, strict=True)]
    driver = Driver(path, share_from_tokens=share_from, prefill_tokens=64)
    together: list[Request] = []
    for prompt, body in zip(prompts * 2, bodies * 2, strict=True):  # each prompt twice, joining at different steps
        together.append(driver.submit(prompt, **body))
        driver.run(steps=3)
    driver.run()
    for i, request in enumerate(together):
        assert_same(request, alone[i % len(alone)])
    assert_idle(driver)


def test_a_group_computes_its_prompt_once(path: Path) -> None:
    for share_from in (1, 10_000):
        driver = Driver(path, share_from_tokens=share_from)
        computed = []
        forward = driver.model.forward

        def counted(tokens: torch.Tensor, *rest: Any, forward: Any = forward, computed: list[int] = computed) -> Any:
            computed.append(len(tokens))
            return forward(tokens, *rest)

        driver.model.forward = counted  # type: ignore[method-assign]
        prompt = prompt_of(100)
        group = [driver.submit(prompt, sampling=GREEDY | {"max_new_tokens": 5}) for _ in range(8)]
        driver.run()
        late = driver.generate(prompt, sampling=GREEDY | {"max_new_tokens": 5})
        assert computed == [100, 8, 8, 8, 8, 1, 1, 1, 1]
        assert [r.cached_tokens for r in group] == [0] + [99] * 7
        assert late.cached_tokens == 99
        for request in (*group[1:], late):
            assert_same(request, group[0])
        assert_idle(driver)


def test_a_later_turn_reuses_the_conversation(path: Path) -> None:
    driver = Driver(path)
    first = driver.generate(prompt_of(50), sampling=GREEDY | {"max_new_tokens": 20})
    conversation = [*first.prompt.tolist(), *first.output_ids, *prompt_of(10, seed=9)]
    second = driver.generate(conversation, sampling=GREEDY | {"max_new_tokens": 8})
    assert second.cached_tokens == 69  # the last token drawn was never run
    assert_same(second, Driver(path).generate(conversation, sampling=GREEDY | {"max_new_tokens": 8}))
    assert_idle(driver)


def test_without_the_prefix_cache_nothing_is_found_again(path: Path) -> None:
    driver = Driver(path, enable_prefix_cache=False)
    first = driver.generate(prompt_of(50), sampling=GREEDY | {"max_new_tokens": 3})
    again = driver.generate(prompt_of(50), sampling=GREEDY | {"max_new_tokens": 3})
    assert again.cached_tokens == 0
    assert_same(first, again)
    assert driver.scheduler.flush()
    assert driver.scheduler.budget.used == 0


def test_short_memory_retracts_and_still_gives_the_same(path: Path) -> None:
    body = {"sampling": {"ignore_eos": True, "sampling_seed": 3, "max_new_tokens": 100}}
    prompts = [prompt_of(30, seed=i) for i in range(6)]
    alone = [Driver(path).generate(p, **body) for p in prompts]
    driver = Driver(path, max_total_tokens=700)
    requests = [driver.submit(p, **body) for p in prompts]
    driver.run()
    for request, expected in zip(requests, alone, strict=True):
        assert_same(request, expected)
    assert_idle(driver)


def test_growing_rows_are_retracted_when_memory_ends(path: Path) -> None:
    body = {"sampling": GREEDY | {"max_new_tokens": 400}}
    prompts = [prompt_of(20, seed=i) for i in range(3)]
    alone = [Driver(path).generate(p, **body) for p in prompts]
    driver = Driver(path, max_total_tokens=1300)
    requests = [driver.submit(p, **body) for p in prompts]
    driver.run()
    assert sum(r.num_retractions for r in requests) > 0
    for request, expected in zip(requests, alone, strict=True):
        assert_same(request, expected)
    assert_idle(driver)


def test_one_that_never_fits_ends_with_the_reason(path: Path) -> None:
    driver = Driver(path, max_total_tokens=200)
    request = driver.generate(prompt_of(100), sampling=GREEDY | {"max_new_tokens": 90})
    assert request.finish is not None
    assert request.finish["type"] == "abort"
    assert "--max-total-tokens" in request.finish["message"]
    assert_idle(driver)


def test_retract_continues_where_it_was(path: Path) -> None:
    sampling = {"ignore_eos": True, "sampling_seed": 8, "max_new_tokens": 40, "frequency_penalty": 0.5}
    expected = Driver(path).generate(prompt_of(30), sampling=sampling)
    driver = Driver(path)
    request = driver.submit(prompt_of(30), sampling=sampling)
    driver.run(steps=15)
    driver.scheduler.retract()
    assert driver.scheduler.num_running == 0
    assert driver.scheduler.flush()
    assert driver.scheduler.budget.used == 0
    driver.run()
    assert request.num_retractions == 1
    assert_same(request, expected)


def test_abort_keeps_what_there_is(path: Path) -> None:
    driver = Driver(path)
    stopped = driver.submit(prompt_of(20, seed=1), sampling=GREEDY | {"max_new_tokens": 30})
    kept = driver.submit(prompt_of(20), sampling=GREEDY | {"max_new_tokens": 30})
    driver.run(steps=10)
    waiting = driver.submit(prompt_of(20, seed=2), sampling=GREEDY | {"max_new_tokens": 30})
    assert driver.scheduler.abort(lambda r: r in (stopped, waiting), "enough") == 2  # the other row moves up
    driver.run()
    assert stopped.finish == {"type": "abort", "message": "enough", "status_code": None, "err_type": None}
    assert len(stopped.output_ids) == len(stopped.output_log_probs) == 10
    assert waiting.output_ids == []
    assert_same(kept, Driver(path).generate(prompt_of(20), sampling=GREEDY | {"max_new_tokens": 30}))
    assert_idle(driver)


def test_version_spans_follow_a_change_in_the_middle(path: Path) -> None:
    driver = Driver(path)
    request = driver.submit(prompt_of(20), sampling=GREEDY | {"max_new_tokens": 10})
    driver.run(steps=4)
    driver.scheduler.weight_version = "next"
    driver.run()
    assert request.spans == [
        {"version": "default", "start": 0, "end": 4},
        {"version": "next", "start": 4, "end": 10},
    ]


def test_weight_updates_make_kept_prompts_unfindable(path: Path) -> None:
    driver = Driver(path)
    before = driver.generate(prompt_of(30), sampling=GREEDY | {"max_new_tokens": 5})
    name = "model.layers.0.mlp.down_proj.weight"
    driver.scheduler.forget_prefixes()
    driver.model.weights.write([(name, -driver.model.weights.read(name))])
    after = driver.generate(prompt_of(30), sampling=GREEDY | {"max_new_tokens": 5})
    assert after.cached_tokens == 0
    assert after.output_log_probs != before.output_log_probs


def test_finish_reasons(path: Path) -> None:
    driver = Driver(path)
    free = driver.generate(prompt_of(20), sampling=GREEDY | {"max_new_tokens": 20})
    assert free.finish == {"type": "length", "length": 20}
    stop = free.output_ids[7]
    first = free.output_ids.index(stop)
    stopped = driver.generate(prompt_of(20), sampling=GREEDY | {"max_new_tokens": 20, "stop_token_ids": [stop]})
    assert stopped.finish == {"type": "stop", "matched": stop}
    assert stopped.output_ids == free.output_ids[: first + 1]
    later = driver.generate(
        prompt_of(20), sampling=GREEDY | {"max_new_tokens": 20, "stop_token_ids": [stop], "min_new_tokens": 20}
    )
    assert stop not in later.output_ids[:-1]
    nothing = driver.generate(prompt_of(20), sampling={"max_new_tokens": 0}, logprob_start_len=0)
    assert nothing.finish == {"type": "length", "length": 0}
    assert nothing.input_log_probs is not None
    assert len(nothing.input_log_probs) == 20


def test_prompt_scores_start_where_asked(path: Path) -> None:
    driver = Driver(path, prefill_tokens=7)
    prompt = prompt_of(30)
    whole = driver.generate(prompt, sampling={"max_new_tokens": 1, "temperature": 0.7}, logprob_start_len=0)
    assert whole.input_log_probs is not None
    for start in (1, 6, 7, 8, 29, 30):
        part = driver.generate(prompt, sampling={"max_new_tokens": 1, "temperature": 0.7}, logprob_start_len=start)
        assert part.input_log_probs == pytest.approx(whole.input_log_probs[start:], abs=1e-5)
    assert_idle(driver)


def test_repetition_penalty_equals_transformers(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = torch.tensor([prompt_of(20)])
    expected = model.generate(
        prompt, max_new_tokens=24, do_sample=False, repetition_penalty=1.3, eos_token_id=None, pad_token_id=0
    )[0, 20:].tolist()
    request = Driver(path).generate(
        prompt[0].tolist(), sampling=GREEDY | {"max_new_tokens": 24, "repetition_penalty": 1.3}
    )
    assert request.output_ids == expected
