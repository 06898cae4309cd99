"""Outputs in several parts: joined they are what one answer would have been, and they end where one would have."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from slime.rollout.completion import Completion
from slime.rollout.continuation import MAX_EMPTY_PARTS, Draft
from slime.rollout.stops import StopConditions, end_token_ids
from slime.types import Sample
from tests.support.tiny_models import EOS_ID, make_tiny_model

PROMPT = [5, 6, 7]
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ARGS: Any = type("Args", (), {"sglang_speculative_algorithm": None, "num_layers": 2, "moe_router_topk": 2})()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("tiny")))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


class Engine:
    """Answers every request with its part of one fixed output, as an engine that is interrupted at given places."""

    def __init__(self, tokenizer: Any, output: list[int], finish: dict[str, Any], cuts: list[int]) -> None:
        self.tokenizer = tokenizer
        self.output, self.finish, self.cuts = output, finish, cuts
        rng = np.random.default_rng(0)
        self.routes = rng.integers(0, 8, (len(PROMPT) + len(output) - 1, 2, 2)).astype(np.int32)
        self.kept = [[token, *range(300, 300 + i % 3)] for i, token in enumerate(output)]

    def answer(self, draft: Draft) -> Completion:
        """The next part."""
        start = len(draft.input_ids) - len(PROMPT)
        assert draft.input_ids == [*PROMPT, *self.output[:start]]
        end = next((cut for cut in self.cuts if cut > start), len(self.output))
        ids = self.output[start:end]
        spans = [
            {"version": str(i), "start": max(a, start) - start, "end": min(b, end) - start}
            for i, (a, b) in enumerate(zip([0, *self.cuts], [*self.cuts, len(self.output)], strict=True))
            if min(b, end) > max(a, start)
        ]
        kept = self.kept[start:end]
        meta = {
            "finish_reason": self.finish if end == len(self.output) else ABORT,
            "prompt_tokens": len(PROMPT) + start,
            "completion_tokens": len(ids),
            "cached_tokens": start,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "top_p_token_ids": [i for row in kept for i in row],
            "top_p_token_offsets": np.cumsum([0, *(len(row) for row in kept)]).tolist(),
            "routed_experts": self.routes[draft.routes_from : len(PROMPT) + end - 1],
            "routed_experts_start_len": draft.routes_from,
        }
        return Completion(ids, [-i / 10 for i in range(start, end)], self.tokenizer.decode(ids), meta)


def run(engine: Engine, params: dict[str, Any] | None = None) -> Completion:
    params = {"max_new_tokens": len(engine.output), "no_stop_trim": True, **(params or {})}
    stops = StopConditions.of(params, frozenset({EOS_ID}), engine.tokenizer)
    draft = Draft(PROMPT, params, stops, routes_from=0)
    draft.add(engine.answer(draft))
    while draft.is_interrupted:
        assert draft.params["max_new_tokens"] == params["max_new_tokens"] - len(draft.output_ids) > 0
        draft.add(engine.answer(draft))
    return draft.completion()


def as_sample(completion: Completion) -> dict[str, Any]:
    sample = Sample(tokens=list(PROMPT))
    sample.append_response_tokens(
        ARGS,
        tokens=completion.token_ids,
        log_probs=completion.log_probs,
        meta_info=completion.meta_info,
        text=completion.text,
    )
    return sample.to_dict()


# "\u00e9" is two byte-level tokens: some cuts lie within a character.
TEXT = "na\u00efve \u00e9t\u00e9"


@pytest.mark.parametrize("cuts", [[1], [3], [4], [11], [2, 3, 7], list(range(1, 12))])
def test_parts_give_what_one_answer_gives(tokenizer: Any, cuts: list[int]) -> None:
    output = ids_of(tokenizer, TEXT)
    assert len(output) == 12
    whole = as_sample(run(Engine(tokenizer, output, {"type": "length", "length": 12}, [])))
    parts = as_sample(run(Engine(tokenizer, output, {"type": "length", "length": 12}, cuts)))
    edges = [0, *cuts, 12]
    assert parts.pop("weight_version_spans") == [
        {"version": str(i), "start": a, "end": b} for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    assert parts.pop("weight_versions") == [str(i) for i in range(len(cuts) + 1)]
    assert whole.pop("weight_versions") == ["0"]
    del whole["weight_version_spans"]
    assert parts["response"] == TEXT
    np.testing.assert_equal(parts, whole)


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("trims", [False, True])
def test_a_stop_string_across_the_border_ends_the_output(tokenizer: Any, cut: int, trims: bool) -> None:
    # Each of the engine's parts holds only a piece of "<ab>", so that no engine stops at it.
    output = ids_of(tokenizer, "x<ab>yz")
    engine = Engine(tokenizer, output, {"type": "length", "length": 7}, [cut + 1])
    completion = run(engine, {"stop": ["<ab>"], "no_stop_trim": not trims})
    assert completion.token_ids == output[:5]
    assert completion.finish_type == "stop"
    assert completion.meta_info["finish_reason"]["matched"] == "<ab>"
    assert completion.text == ("x" if trims else "x<ab>")
    sample = as_sample(completion)
    assert sample["status"] == "completed"
    assert len(sample["rollout_routed_experts"]) == len(PROMPT) + 5 - 1
    np.testing.assert_array_equal(sample["rollout_routed_experts"], engine.routes[: len(PROMPT) + 4])
    assert [span["end"] for span in sample["weight_version_spans"]] == [cut + 1, 5]


@pytest.mark.parametrize(
    ("output", "params", "count", "finish"),
    [
        ("abc", {"stop": "c"}, 3, {"type": "stop", "matched": "c"}),
        ("abc", {"stop_token_ids": [66]}, 3, {"type": "stop", "matched": 66}),
        ("ab\0", {}, 3, {"type": "stop", "matched": EOS_ID}),
        ("ab\0", {"ignore_eos": True}, 4, {"type": "length", "length": 4}),
        ("a\0b", {"min_new_tokens": 3, "max_new_tokens": 3}, 3, {"type": "length", "length": 3}),
        ("abc", {"max_new_tokens": 3}, 3, {"type": "length", "length": 3}),
    ],
)
def test_an_output_that_ended_with_the_aborts_last_token(
    tokenizer: Any, output: str, params: dict[str, Any], count: int, finish: dict[str, Any]
) -> None:
    # SGLang reports one more token after an abort and does not ask whether the output ends with it.
    ids = [EOS_ID if char == "\0" else ids_of(tokenizer, char)[0] for char in output]
    engine = Engine(tokenizer, [*ids, 65], {"type": "length", "length": 4}, [3])
    completion = run(engine, {"max_new_tokens": 4, **params})
    assert len(completion.token_ids) == count
    assert completion.meta_info["finish_reason"] == finish


def test_a_stop_string_before_the_least_length_is_passed(tokenizer: Any) -> None:
    output = ids_of(tokenizer, "a<b>cde")
    engine = Engine(tokenizer, output, {"type": "length", "length": 7}, [2])
    completion = run(engine, {"stop": ["<b>"], "min_new_tokens": 6})
    assert completion.token_ids == output


def test_the_least_length_shrinks_with_the_budget(tokenizer: Any) -> None:
    stops = StopConditions.of({}, frozenset(), tokenizer)
    draft = Draft(PROMPT, {"max_new_tokens": 10, "min_new_tokens": 3}, stops, routes_from=0)
    for budget, least, ids in ((10, 3, [1, 2]), (8, 1, [1, 2]), (6, 0, [1])):
        assert (draft.params["max_new_tokens"], draft.params["min_new_tokens"]) == (budget, least)
        draft.add(Completion(ids, [-1.0] * len(ids), "", {"finish_reason": ABORT}))


def test_an_output_with_a_grammar_starts_again(tokenizer: Any) -> None:
    stops = StopConditions.of({}, frozenset(), tokenizer)
    draft = Draft(PROMPT, {"max_new_tokens": 10, "json_schema": "{}"}, stops, routes_from=0)
    draft.add(Completion([1, 2], [-1.0, -1.0], "..", {"finish_reason": ABORT, "weight_version": "1"}))
    assert draft.is_interrupted
    assert (draft.input_ids, draft.params["max_new_tokens"]) == (PROMPT, 10)
    draft.add(Completion([3], [-2.0], "x", {"finish_reason": {"type": "stop", "matched": 3}, "weight_version": "2"}))
    assert draft.completion().token_ids == [3]
    assert as_sample(draft.completion())["weight_versions"] == ["2"]


def test_an_engine_that_only_aborts_is_given_up(tokenizer: Any) -> None:
    stops = StopConditions.of({}, frozenset(), tokenizer)
    draft = Draft(PROMPT, {"max_new_tokens": 10}, stops, routes_from=0)
    draft.add(Completion([1], [-1.0], "a", {"finish_reason": ABORT}))
    for _ in range(MAX_EMPTY_PARTS):
        assert draft.is_interrupted
        draft.add(Completion([], [], "", {"finish_reason": ABORT}))
    assert not draft.is_interrupted
    assert draft.completion().finish_type == "abort"
    assert draft.completion().token_ids == [1]


def test_a_fault_of_the_engine_is_no_interruption(tokenizer: Any) -> None:
    stops = StopConditions.of({}, frozenset(), tokenizer)
    draft = Draft(PROMPT, {"max_new_tokens": 10}, stops, routes_from=0)
    draft.add(Completion([1], [-1.0], "a", {"finish_reason": {**ABORT, "status_code": 500}}))
    assert not draft.is_interrupted


def test_end_tokens_come_from_tokenizer_and_model(tokenizer: Any, tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 9}}')
    assert end_token_ids(str(tmp_path), tokenizer) == {3, 4, 9, EOS_ID}
