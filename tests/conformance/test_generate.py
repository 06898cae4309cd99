"""``/generate`` on both engines, directly and through the router, against transformers."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.targets import (
    OTHER_PROMPT,
    PROMPT,
    TOLERANCE,
    Reference,
    Stream,
    Target,
    exchange,
    log_probs_of,
)
from tests.support.tiny_models import EOS_ID

GREEDY = {"temperature": 0, "ignore_eos": True}


def sampled(count: int, **more: object) -> dict[str, object]:
    return {"max_new_tokens": count, "ignore_eos": True, **more}


def test_sampled_tokens_and_all_that_is_said_about_them(target: Target, reference: Reference) -> None:
    reply = target.generate(input_ids=PROMPT, sampling_params=sampled(24), return_logprob=True, rid="one-answer")
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == meta["completion_tokens"] == meta["output_token_logprobs_length"] == 24
    assert log_probs_of(reply) == pytest.approx(reference.log_probs(PROMPT, reply["output_ids"]), abs=TOLERANCE)
    assert reply["text"] == reference.text(reply["output_ids"])
    assert meta["id"] == "one-answer"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["input_token_logprobs"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 24}]
    assert isinstance(meta["cached_tokens"], int)
    assert meta["num_retractions"] == 0


def test_greedy_takes_the_most_likely_token(target: Target, reference: Reference) -> None:
    sampling = GREEDY | {"max_new_tokens": 24}
    reply = target.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
    rows = reference.rows(PROMPT, reply["output_ids"])
    assert log_probs_of(reply) == pytest.approx(rows.max(-1).values.tolist(), abs=TOLERANCE)


def test_text_is_the_same_as_its_tokens(target: Target, reference: Reference) -> None:
    text = "the sum of 2 and 5 is"
    ids = reference.tokenizer.encode(text)
    sampling = GREEDY | {"max_new_tokens": 8}
    by_text = target.generate(text=text, sampling_params=sampling)
    by_ids = target.generate(input_ids=ids, sampling_params=sampling)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == len(ids)


def test_batch_keeps_its_order(target: Target, reference: Reference) -> None:
    prompts = [PROMPT, OTHER_PROMPT, PROMPT[:3]]
    replies = target.generate(input_ids=prompts, sampling_params=sampled(8), return_logprob=True)
    assert len(replies) == 3
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply["meta_info"]["prompt_tokens"] == len(prompt)
        assert log_probs_of(reply) == pytest.approx(reference.log_probs(prompt, reply["output_ids"]), abs=TOLERANCE)


def test_batch_of_texts(direct: Target, reference: Reference) -> None:
    # Only directly: the router takes one text, or lists of token ids.
    texts = ["one", "the second of them"]
    replies = direct.generate(text=texts, sampling_params=sampled(4))
    counts = [len(reference.tokenizer.encode(text)) for text in texts]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == counts


def test_batch_with_parameters_of_its_own(direct: Target) -> None:
    sampling = [sampled(3), sampled(5)]
    replies = direct.generate(input_ids=[PROMPT, OTHER_PROMPT], sampling_params=sampling)
    assert [len(reply["output_ids"]) for reply in replies] == [3, 5]


def test_several_samples_of_several_prompts(target: Target) -> None:
    replies = target.generate(input_ids=[PROMPT, OTHER_PROMPT], sampling_params=sampled(12, n=2))
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [30, 30, 6, 6]
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 4
    assert len(target.generate(text="one prompt", sampling_params=sampled(2, n=3))) == 3


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_log_probs_are_those_at_the_temperature_before_cuts(
    target: Target, reference: Reference, cut: dict[str, float]
) -> None:
    sampling = sampled(16, temperature=0.6, **cut)
    reply = target.generate(input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
    rows = reference.rows(PROMPT, reply["output_ids"], 0.6)
    chosen = rows.gather(-1, torch.tensor(reply["output_ids"])[:, None])
    assert log_probs_of(reply) == pytest.approx(chosen[:, 0].tolist(), abs=TOLERANCE)
    better = (rows > chosen + 1e-4).sum(-1)
    mass = torch.where(rows > chosen + 1e-4, rows.exp(), 0).sum(-1)
    assert better.max() < cut.get("top_k", 264)
    assert mass.max() < cut.get("top_p", 1.0)
    assert (chosen[:, 0] - rows.max(-1).values).exp().min() >= cut.get("min_p", 0.0) - 1e-4


def test_prompt_log_probs(target: Target, reference: Reference) -> None:
    # A prompt of its own: an engine may take what it does not compute again from its cache without log-probs.
    prompt = [11, *range(90, 110)]
    body = {"sampling_params": sampled(2), "return_logprob": True, "logprob_start_len": 0}
    reply = target.generate(input_ids=prompt, **body)
    triples = reply["meta_info"]["input_token_logprobs"]
    assert [triple[1] for triple in triples] == prompt
    assert triples[0][0] is None
    expected = reference.log_probs(prompt[:1], prompt[1:])
    assert [triple[0] for triple in triples[1:]] == pytest.approx(expected, abs=TOLERANCE)


def test_most_likely_tokens(target: Target, reference: Reference) -> None:
    reply = target.generate(input_ids=PROMPT, sampling_params=sampled(6), return_logprob=True, top_logprobs_num=4)
    expected = reference.rows(PROMPT, reply["output_ids"]).topk(4, -1)
    columns = reply["meta_info"]["output_top_logprobs"]
    assert [[entry[1] for entry in column] for column in columns] == expected.indices.tolist()
    for column, values in zip(columns, expected.values.tolist(), strict=True):
        assert [entry[0] for entry in column] == pytest.approx(values, abs=TOLERANCE)


def test_text_of_each_token(target: Target, reference: Reference) -> None:
    body = {"sampling_params": GREEDY | {"max_new_tokens": 4}, "return_logprob": True}
    reply = target.generate(input_ids=PROMPT, **body, return_text_in_logprobs=True)
    texts = [triple[2] for triple in reply["meta_info"]["output_token_logprobs"]]
    assert texts == [reference.tokenizer.decode([token]) for token in reply["output_ids"]]
    reply = target.generate(input_ids=PROMPT, **body)
    assert {triple[2] for triple in reply["meta_info"]["output_token_logprobs"]} == {None}


def test_stop_token_is_kept_and_named(target: Target) -> None:
    free = target.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 12})["output_ids"]
    before_end = free[: free.index(EOS_ID)] if EOS_ID in free else free
    token = before_end[-1]
    first = free.index(token)
    sampling = {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [token]}
    reply = target.generate(input_ids=PROMPT, sampling_params=sampling)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert reply["output_ids"] == free[: first + 1]
    whole = target.generate(input_ids=PROMPT, sampling_params=sampling | {"ignore_eos": True})
    assert whole["output_ids"] == free


def test_stop_string_is_cut_off_unless_asked_for(target: Target, reference: Reference) -> None:
    letters = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # one of them comes soon in random text; no special token has any
    sampling = sampled(400, stop=letters)
    reply = target.generate(input_ids=PROMPT, sampling_params=sampling)
    reason = reply["meta_info"]["finish_reason"]
    assert reason["type"] == "stop"
    assert reason["matched"] in letters
    assert reference.text(reply["output_ids"]) == reply["text"] + reason["matched"]
    kept = target.generate(input_ids=PROMPT, sampling_params=sampling | {"no_stop_trim": True})
    assert kept["text"].endswith(kept["meta_info"]["finish_reason"]["matched"])
    assert not set(kept["text"][:-1]) & set(letters)


def test_fewest_tokens_delay_the_end(target: Target) -> None:
    free = target.generate(input_ids=PROMPT, sampling_params=GREEDY | {"max_new_tokens": 12})["output_ids"]
    sampling = {"temperature": 0, "max_new_tokens": 12, "stop_token_ids": [free[0]], "min_new_tokens": 5}
    reply = target.generate(input_ids=PROMPT, sampling_params=sampling)
    assert len(reply["output_ids"]) >= 5
    assert free[0] not in reply["output_ids"][:5]


def test_stream_grows_to_the_whole_answer(target: Target, reference: Reference) -> None:
    stream = Stream(target, {"input_ids": PROMPT, "sampling_params": sampled(40), "return_logprob": True})
    last = stream.result()
    sizes = [len(chunk["output_ids"]) for chunk in stream.chunks]
    assert sizes == sorted(sizes)
    assert len(sizes) > 3
    for chunk in stream.chunks:
        assert last["output_ids"][: len(chunk["output_ids"])] == chunk["output_ids"]
        assert last["text"].startswith(chunk["text"].rstrip("\ufffd"))
    assert [c["meta_info"]["finish_reason"] for c in stream.chunks[:-1]] == [None] * (len(sizes) - 1)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert log_probs_of(last) == pytest.approx(reference.log_probs(PROMPT, last["output_ids"]), abs=TOLERANCE)


def test_cached_prompts_give_the_same_answer(target: Target, reference: Reference) -> None:
    prompt = [77, *range(120, 180)]
    target.post("/flush_cache")
    body = {"input_ids": prompt, "sampling_params": sampled(8), "return_logprob": True}
    first, second = target.generate(**body), target.generate(**body)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] > 0
    expected = reference.log_probs(prompt, second["output_ids"])
    assert log_probs_of(second) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": list(range(100)) * 21, "sampling_params": {}}, "longer than the model's context length"),
        ({"input_ids": list(range(100)) * 20, "sampling_params": {"max_new_tokens": 100}}, "Requested token count"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "x", "sampling_params": {"top_p": 0}}, "top_p"),
        ({"text": "x", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"sampling_params": {}}, "text"),
        ({"text": ["a", "b"], "rid": ["same", "same"], "sampling_params": {}}, "uplicate"),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(target: Target, body: dict[str, object], words: str) -> None:
    status, content = exchange(target.generate_url, "/generate", body)
    if target.is_direct:
        assert status == 400, content
        assert words in content.decode()
    else:  # the router refuses by itself what does not have the types that it knows
        assert status in (400, 422), content


def test_unknown_sampling_parameter_is_refused(direct: Target) -> None:
    # Only directly: the router forwards the parameters that it knows and drops others.
    status, content = exchange(direct.url, "/generate", {"text": "x", "sampling_params": {"temprature": 1.0}})
    assert status == 400
    assert "temprature" in content.decode()
