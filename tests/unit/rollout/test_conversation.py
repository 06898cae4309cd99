"""The list form of a custom generate function, the seed's snippet first of all."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from slime.data.templates import load_tokenizer
from slime.errors import PluginError
from slime.rollout.pipeline import generate_rollout
from slime.types import Status
from tests.support.fake_engine import Answer, FakeEngine
from tests.support.rollout_args import ListSource, open_context
from tests.support.tiny_models import EOS_ID

# The function of the documentation, word for word; the tool functions are its module's own.
SEED = '''
async def custom_generate(args, samples, evaluation=False):
    """Multi-turn generation with tool calling."""
    for sample in samples:
        conversation = sample.prompt

        for turn in range(args.max_turns):
            # Generate response
            response = await generate_single(conversation)

            # Check for tool call
            tool_call = extract_tool_call(response)
            if tool_call:
                tool_result = execute_tool(tool_call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": tool_result})
            else:
                break

        sample.response = response
        sample.reward = compute_reward(sample)

    return samples


def extract_tool_call(response):
    return response if response.startswith("call") else None


def execute_tool(tool_call):
    return "result of " + tool_call


def compute_reward(sample):
    return float(sample.response == "done")
'''

# Bytes 99 97 108 108 spell "call"; a 195 without its second byte decodes to U+FFFD, so text does not give ids back.
CALL = [99, 97, 108, 108, 32, 195, EOS_ID]
DONE = [100, 111, 110, 101, EOS_ID]


class Scripted:
    """Answers by the number of tool results that the prompt holds."""

    def __init__(self, tokenizer, answers: list[list[int]]) -> None:
        self.tokenizer, self.answers = tokenizer, answers

    def __call__(self, input_ids, sampling_params) -> Answer:
        turn = self.tokenizer.decode(input_ids).count("result of")
        ids = self.answers[min(turn, len(self.answers) - 1)]
        return Answer(ids, self.tokenizer.decode(ids), {"type": "stop", "matched": EOS_ID})


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return load_tokenizer(str(model_path))


@pytest.fixture(scope="module")
def ids_of(tokenizer):
    """Byte values to ids of the byte-level tokenizer; special ids stay."""
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    ids = {byte_of[tokenizer.convert_ids_to_tokens(i)]: i for i in range(256)}
    return lambda raw: [ids.get(value, value) for value in raw]


def write(folder, text: str):
    path = folder / "custom_generate.py"
    path.write_text(text)
    return path


def run(model_path, engine, path, prompt, *, rollout_id=0, **flags):
    flags = {"rollout_batch_size": 2, "custom_generate_function_path": str(path), "max_turns": 3, **flags}
    with open_context(model_path, engine.url, **flags) as context:
        source = ListSource([prompt], 2, label="x")
        output = context.generate(generate_rollout, rollout_id, source)
        return output, source


PROMPT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]


def template(*messages, end="<|im_start|>assistant\n") -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + end


def test_the_snippet_of_the_documentation(model_path, tmp_path, tokenizer, ids_of):
    call, done = ids_of(CALL), ids_of(DONE)
    with FakeEngine() as engine:
        engine.answer = Scripted(tokenizer, [call, call, done])
        output, _ = run(model_path, engine, write(tmp_path, SEED), PROMPT)
        requests = engine.requests
    sample = output.samples[0][0]
    prompt_ids = tokenizer.encode(template(*PROMPT))
    tool = {"role": "tool", "content": "result of " + tokenizer.decode(call[:-1])}
    between = tokenizer.encode("\n" + template(tool))
    assert sample.tokens == [*prompt_ids, *call, *between, *call, *between, *done]
    assert sample.loss_mask == [1] * 7 + [0] * len(between) + [1] * 7 + [0] * len(between) + [1] * 5
    assert sample.response_length == len(sample.loss_mask)
    per_call = [-0.5 - i / 100 for i in range(7)]
    zeros = [0.0] * len(between)
    assert sample.rollout_log_probs == [*per_call, *zeros, *per_call, *zeros, *per_call[:5]]
    assert sample.status is Status.COMPLETED
    assert sample.response == "done"
    assert sample.reward == 1.0
    assert sample.prompt == PROMPT, "the prompt is the original one again"
    assert [m["role"] for m in sample.metadata["messages"]] == [*("system", "user"), *("assistant", "tool") * 2]
    assert sample.weight_versions == ["1"] * 3
    assert sample.non_generation_time >= 0
    # What the engine generated reaches the next turn as it was: decoding and encoding would have changed it.
    assert tokenizer.encode(tokenizer.decode(call)) != call
    own = [r["input_ids"] for r in requests if r["input_ids"][: len(prompt_ids)] == prompt_ids]
    assert [*prompt_ids, *call, *between] in own
    assert len(requests) == 4 * 3


def test_replay_data_of_several_turns(model_path, tmp_path, tokenizer, ids_of):
    call, done = ids_of(CALL), ids_of(DONE)
    flags = {"rollout_top_p": 0.9, "use_rollout_routing_replay": True, "rollout_batch_size": 1}
    custom = {"num_layers": 3, "moe_router_topk": 2}
    with FakeEngine(sampling_masks=True, routes=(3, 2)) as engine:
        engine.answer = Scripted(tokenizer, [call, call, done])
        output, _ = run(model_path, engine, write(tmp_path, SEED), PROMPT, custom=custom, **flags)
        requests = engine.requests
    sample = output.samples[0][0]
    routes = sample.rollout_routed_experts
    assert routes.shape == (len(sample.tokens) - 1, 3, 2)
    assert routes[:, 0, 0].tolist() == list(range(len(routes))), "every row is the one of its token"
    starts = sorted({r["routed_experts_start_len"] for r in requests})
    prompt, between = len(tokenizer.encode(template(*PROMPT))), sample.loss_mask.count(0) // 2
    first = prompt + len(call) - 1  # the last generated token was never run
    assert starts == [0, first, first + between + len(call)]
    # Each row comes from the request that ran its token first.
    changes = [i for i in range(1, len(routes)) if routes[i, 0, 1] != routes[i - 1, 0, 1]]
    assert changes == starts[1:]
    lengths = [len(row) for row in np.split(sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets[1:-1])]
    assert lengths == [2 * trained for trained in sample.loss_mask]


def test_the_last_turn_may_be_a_tool_call(model_path, tmp_path, tokenizer, ids_of):
    call = ids_of(CALL)
    with FakeEngine() as engine:
        engine.answer = Scripted(tokenizer, [call])
        output, _ = run(model_path, engine, write(tmp_path, SEED), PROMPT, max_turns=2)
    sample = output.samples[0][0]
    assert sample.tokens[-len(call) :] == call, "the tool result nobody answered is not part of the sequence"
    assert sum(sample.loss_mask) == 14
    assert sample.reward == 0.0
    assert sample.response == tokenizer.decode(call[:-1])


@pytest.mark.parametrize("rendered", [True, False])
def test_text_prompts_become_a_user_message(model_path, tmp_path, rendered, tokenizer, ids_of):
    done = ids_of(DONE)
    with FakeEngine() as engine:
        engine.answer = lambda ids, params: Answer(done, "done<|im_end|>", {"type": "stop", "matched": EOS_ID})
        text = template({"role": "user", "content": "go"}) if rendered else "go"
        output, _ = run(model_path, engine, write(tmp_path, SEED), text, apply_chat_template=rendered)
        sent = engine.requests[0]["input_ids"]
    sample = output.samples[0][0]
    assert sample.prompt == text
    assert sent == tokenizer.encode(template({"role": "user", "content": "go"}))
    assert sample.tokens == [*sent, *done]
    assert sample.response == "done"


def test_an_existing_generate_single_is_left_alone(model_path, engine, tmp_path, tokenizer):
    path = write(
        tmp_path,
        "async def generate_single(conversation):\n    return 'mine'\n"
        + SEED.replace('float(sample.response == "done")', "2.0"),
    )
    output, _ = run(model_path, engine, path, PROMPT)
    sample = output.samples[0][0]
    assert not engine.requests
    # Not generated by us: tokenised here, log-probs left to the trainer.
    assert sample.rollout_log_probs is None
    assert tokenizer.decode(sample.tokens) == template(*PROMPT) + "mine<|im_end|>\n"
    answer = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
    assert tokenizer.decode(answer).startswith("mine<|im_end|>")
    assert (sample.response, sample.reward, sample.status) == ("mine", 2.0, Status.COMPLETED)


def test_answers_of_a_foreign_client_are_masked_like_ours(model_path, engine, tmp_path, tokenizer):
    path = write(
        tmp_path,
        "async def custom_generate(args, samples, evaluation=False):\n"
        "    for s in samples:\n"
        "        s.prompt.append({'role': 'assistant', 'content': 'one'})\n"
        "        s.prompt.append({'role': 'user', 'content': 'more'})\n"
        "        s.response, s.reward = 'two', 1.0\n"
        "    return samples\n",
    )
    shown = [{"role": "assistant", "content": "shown"}, {"role": "user", "content": "go"}]
    output, _ = run(model_path, engine, path, shown)
    sample = output.samples[0][0]
    pieces = {1: [], 0: []}
    for token, mask in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True):
        pieces[mask].append(token)
    assert tokenizer.decode(pieces[1]).replace("\n", "") == "one<|im_end|>two<|im_end|>"
    assert "more" in tokenizer.decode(pieces[0])
    assert "shown" not in tokenizer.decode(sample.tokens[-sample.response_length :])


def test_copied_conversations_edited_history_and_overrides(model_path, tmp_path, tokenizer, ids_of):
    path = write(
        tmp_path,
        "async def custom_generate(args, samples, evaluation=False):\n"
        "    (sample,) = samples\n"
        "    talk = list(sample.prompt)\n"
        "    first = await generate_single(talk, max_new_tokens=9, temperature=0.5)\n"
        "    talk += [{'role': 'assistant', 'content': ' ' + first + ' '}, {'role': 'user', 'content': 'result of'}]\n"
        "    second = await generate_single(talk)\n"
        "    sample.response, sample.reward = second, 0.0\n"
        "    edited = [*sample.prompt, {'role': 'assistant', 'content': 'EDITED'}, {'role': 'user', 'content': 'hm'}]\n"
        "    await generate_single(edited)\n"
        "    return samples\n",
    )
    call, done = ids_of(CALL), ids_of(DONE)
    with FakeEngine() as engine:
        engine.answer = Scripted(tokenizer, [call, done])
        output, _ = run(model_path, engine, path, PROMPT, rollout_batch_size=1)
        first = engine.requests[0]["sampling_params"]
        edited = [r["input_ids"] for r in engine.requests if "EDITED" in tokenizer.decode(r["input_ids"])]
    sample = output.samples[0][0]
    assert (first["max_new_tokens"], first["temperature"]) == (9, 0.5)
    between = tokenizer.encode("\n" + template({"role": "user", "content": "result of"}))
    assert sample.tokens == [*tokenizer.encode(template(*PROMPT)), *call, *between, *done]
    assert len(edited) == 2
    assert call[5] not in edited[0], "an edited answer is not continued from the engine's ids"


def test_a_full_context_ends_the_conversation(model_path, tmp_path, tokenizer, ids_of):
    call = ids_of(CALL)
    with FakeEngine() as engine:
        engine.answer = Scripted(tokenizer, [call])
        length = len(tokenizer.encode(template(*PROMPT))) + 20
        output, _ = run(model_path, engine, write(tmp_path, SEED), PROMPT, rollout_max_context_len=length)
    sample = output.samples[0][0]
    assert sample.status is Status.TRUNCATED
    assert len(sample.tokens) <= length
    assert sum(sample.loss_mask) == 7


def test_an_abort_passes_through_the_function_and_the_sample_starts_again(model_path, tmp_path, tokenizer, ids_of):
    done = ids_of(DONE)
    path = write(tmp_path, SEED)
    flags = {"rollout_batch_size": 1, "custom_generate_function_path": str(path), "max_turns": 3}
    with (
        FakeEngine() as engine,
        open_context(model_path, engine.url, partial_rollout=True, over_sampling_batch_size=2, **flags) as context,
    ):
        slow = [{"role": "user", "content": "slow"}]

        def answer(input_ids, params):
            engine.latency_seconds = 30.0 if "slow" in context.tokenizer.decode(input_ids) else 0.05
            return Answer(done, "done<|im_end|>", {"type": "stop", "matched": EOS_ID})

        engine.answer = answer
        source = ListSource([PROMPT, slow], 2)
        context.generate(generate_rollout, 0, source)
        (group,) = source.returned
        assert {s.status for s in group} == {Status.ABORTED}
        assert all(s.prompt == slow and not s.tokens and s.response_length == 0 for s in group)
        engine.answer = lambda input_ids, params: Answer(done, "done<|im_end|>", {"type": "stop", "matched": EOS_ID})
        engine.latency_seconds = 0.0
        output = context.generate(generate_rollout, 1, source)
    assert {s.status for s in output.samples[0]} == {Status.COMPLETED}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return samples * 2", PluginError),
        ("return samples[0]", PluginError),
        ("return samples", None),
        ("raise ConnectionError('tool server')", None),
    ],
)
def test_what_a_function_may_not_do(model_path, engine, tmp_path, body, error, caplog):
    caplog.set_level(logging.WARNING)
    path = write(
        tmp_path,
        "async def custom_generate(args, samples, evaluation=False):\n"
        f"    if samples[0].index == 0:\n        {body}\n"
        "    samples[0].response = await generate_single(samples[0].prompt)\n"
        "    return samples\n",
    )
    if error:
        with pytest.raises(error, match="return the list"):
            run(model_path, engine, path, PROMPT)
        return
    output, _ = run(model_path, engine, path, PROMPT)
    failed, other = output.samples[0]
    assert failed.status is Status.FAILED
    assert failed.prompt == PROMPT
    assert other.status is Status.COMPLETED
    assert failed.reward == 0
    assert json.dumps(failed.metadata["error"])


async def test_generate_single_outside_says_where_it_works():
    from slime.rollout.generate import generate_single

    with pytest.raises(RuntimeError, match="--custom-generate-function-path"):
        await generate_single([])
