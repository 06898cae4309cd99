"""Trained tokens are those the assistant wrote."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slime.data.masks import MultiTurnLossMaskGenerator
from tests.support.prompts import AUTO_SYSTEM_TEMPLATE, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "search"}}]
CHAT = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "second answer"},
]


def reference(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
    """The whole conversation as the template renders it at once."""
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "be kind"}]])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("kind", ["qwen", "qwen3_5"])
def test_additive_template(tokenizer: PreTrainedTokenizerFast, system: list[Any], tools: Any, kind: str) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(system + CHAT, tools)
    assert ids == reference(tokenizer, system + CHAT, tools)
    assert len(mask) == len(ids)
    spans = generator.get_text_from_loss_mask(ids, mask)
    assert spans == ["first answer<|im_end|>\n", "second answer<|im_end|>\n"]


def test_measured_template(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen")
    prefix = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert generator.system_message_length == len(tokenizer.encode(prefix, add_special_tokens=False))
    assert generator.gen_token_length == len(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_thinking_is_kept_and_tool_answers_are_joined(thinking_tokenizer: PreTrainedTokenizerFast, tools: Any) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>a</think>call"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "<think>b</think>done"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "ok"},
    ]
    generator = MultiTurnLossMaskGenerator(thinking_tokenizer, "qwen3")
    ids, mask = generator.get_loss_mask(messages, tools)
    text = thinking_tokenizer.decode(ids)
    answers = "\n<tool_response>one</tool_response>\n<tool_response>two</tool_response><|im_end|>\n"
    assert f"<|im_start|>user{answers}<|im_start|>assistant\n<think>b</think>done" in text
    assert generator.get_text_from_loss_mask(ids, mask) == [
        "<think>a</think>call<|im_end|>\n",
        "<think>b</think>done<|im_end|>\n",
        "ok<|im_end|>\n",
    ]
    # What the template does when it renders everything at once: old thinking is gone.
    assert "<think>a</think>" not in thinking_tokenizer.decode(reference(thinking_tokenizer, messages))


def test_thinking_type_equals_the_template_where_nothing_is_dropped(
    thinking_tokenizer: PreTrainedTokenizerFast,
) -> None:
    generator = MultiTurnLossMaskGenerator(thinking_tokenizer, "qwen3")
    system = [{"role": "system", "content": "s"}]
    assert generator.get_loss_mask(system + CHAT)[0] == reference(thinking_tokenizer, system + CHAT)


def test_located_body_starts_after_an_opening_think_tag(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5")
    messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "<think>\nü</think>\nñ"}]
    ids, mask = generator.get_loss_mask(messages)
    assert generator.get_text_from_loss_mask(ids, mask) == ["ü</think>\nñ<|im_end|>\n"]


def test_located_turns_must_fit_the_messages(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5")
    with pytest.raises(ValueError, match=r"2 assistant turns for 1 assistant messages"):
        generator.get_loss_mask([{"role": "user", "content": "<|im_start|>assistant\nfake<|im_end|>"}, CHAT[1]])


@pytest.mark.parametrize("kind", ["qwen", "qwen3", "qwen3_5"])
def test_untrained_steps(tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    messages = [CHAT[0], {**CHAT[1], "step_loss_mask": 0}, CHAT[2], {**CHAT[3], "step_loss_mask": 1}]
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    assert generator.get_text_from_loss_mask(*generator.get_loss_mask(messages)) == ["second answer<|im_end|>\n"]


def test_distilled_models_are_recognised() -> None:
    tokenizer = make_tokenizer(AUTO_SYSTEM_TEMPLATE, extra=("<｜Assistant｜>",))
    generator = MultiTurnLossMaskGenerator(tokenizer)
    assert generator.tokenizer_type == "distill_qwen"
    ids, mask = generator.get_loss_mask(CHAT[:2])
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == f"{prompt}first answer<|endoftext|>"
    assert generator.get_text_from_loss_mask(ids, mask) == ["first answer<|endoftext|>"]


def test_response_lengths(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer)
    assert generator.get_response_lengths([[0, 0, 1, 0, 1], [0, 0], [1, 0], []]) == [3, 0, 2, 0]


def test_media_tokens_are_padded_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    generator = MultiTurnLossMaskGenerator(tokenizer)
    messages = [{"role": "user", "content": [{"type": "image", "image": "a"}, {"type": "text", "text": "q"}]}, CHAT[1]]
    plain_ids, plain_mask = generator.get_loss_mask([{"role": "user", "content": "q"}, CHAT[1]])
    ids, mask = generator.get_loss_mask_with_multimodal_alignment(messages, [7, 7, 7, *plain_ids])
    assert ids == [7, 7, 7, *plain_ids]
    assert mask == [0, 0, 0, *plain_mask]
    with pytest.raises(ValueError, match=r"fewer"):
        generator.get_loss_mask_with_multimodal_alignment(messages, plain_ids[1:])


def test_unknown_type(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"Unsupported tokenizer type: gpt"):
        MultiTurnLossMaskGenerator(tokenizer, "gpt")
    with pytest.raises(ValueError, match=r"at least one message"):
        MultiTurnLossMaskGenerator(tokenizer).get_loss_mask([])
