"""Which tokens of a conversation are trained: those the assistant wrote.

Owns the ways to find assistant tokens in what a chat template renders. Tests hold: for every type, the
trained text is exactly the assistant's, and tokens equal the template's rendering where it is additive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from slime.data.templates import Message, Tokenizer

_DUMMY: Message = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}
_DISTILL_MARKER = "<｜Assistant｜>"
_HEADER = "<|im_start|>assistant\n"
_THINK = "<think>\n"
_END = "<|im_end|>"

TokensAndMask = tuple[list[int], list[int]]


class MultiTurnLossMaskGenerator:
    """Token ids and loss mask of a conversation.

    A message whose ``step_loss_mask`` is not 1 is never trained.

    Args:
        tokenizer: With a chat template.
        tokenizer_type: ``qwen`` (each message rendered alone), ``qwen3`` (each message after a fixed
            one, so that thinking is kept), ``qwen3_5`` (rendered once, assistant bodies located in
            the text; needs a fast tokenizer) or ``distill_qwen`` (one prompt, one response).
    """

    def __init__(self, tokenizer: Tokenizer, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        if tokenizer_type == "qwen" and _DISTILL_MARKER in tokenizer.get_vocab():
            tokenizer_type = "distill_qwen"
        makers: dict[str, Callable[[list[Message], list[Any] | None], TokensAndMask]] = {
            "qwen": self._each_alone,
            "qwen3": self._each_after_dummy,
            "qwen3_5": self._located_in_text,
            "distill_qwen": self._prompt_and_response,
        }
        if tokenizer_type not in makers:
            raise ValueError(f"Unsupported tokenizer type: {tokenizer_type}; accepted are {', '.join(makers)}")
        self.tokenizer_type = tokenizer_type
        self._make = makers[tokenizer_type]
        if tokenizer_type in ("qwen", "qwen3"):
            one, two = len(self._render([_DUMMY])), len(self._render([_DUMMY, _DUMMY]))
            # A message of m tokens after an automatic system prefix of s: one is s + m, two is s + 2m.
            self.system_message_length = 2 * one - two
            self.gen_token_length = len(self._render([_DUMMY], add_generation_prompt=True)) - one

    def get_loss_mask(self, messages: list[Message], tools: list[Any] | None = None) -> TokensAndMask:
        """Ids of the whole conversation and a mask of equal length, 1 on what the assistant wrote.

        Args:
            messages: The conversation.
            tools: Tools shown to the model in the prompt.

        Raises:
            ValueError: No messages, or assistant texts cannot be located.
        """
        if not messages:
            raise ValueError("a loss mask needs at least one message")
        return self._make(messages, tools)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: list[Message], input_ids: Sequence[int], tools: list[Any] | None = None
    ) -> TokensAndMask:
        """The mask for ids in which the processor has expanded image, video or audio placeholders.

        The text mask is padded on the left with zeros, so the media must come before the first
        trained token.
        """
        texts: list[Message] = [{**message, "content": _text_of(message)} for message in messages]
        _, mask = self.get_loss_mask(texts, tools)
        missing = len(input_ids) - len(mask)
        if missing < 0:
            raise ValueError(f"the processor's {len(input_ids)} tokens are fewer than the text's {len(mask)}")
        return list(input_ids), [0] * missing + mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Tokens from the first trained one to the end, per mask; 0 if none is trained."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The trained spans as text, in order."""
        spans = groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1])
        return [self.tokenizer.decode([token for token, _ in span]) for trained, span in spans if trained == 1]

    def _render(self, messages: list[Message], tools: list[Any] | None = None, **kwargs: Any) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _mask_message(self, message: Message, num_tokens: int) -> list[int]:
        if message["role"] != "assistant" or message.get("step_loss_mask", 1) != 1:
            return [0] * num_tokens
        return [0] * self.gen_token_length + [1] * (num_tokens - self.gen_token_length)

    def _each_alone(self, messages: list[Message], tools: list[Any] | None) -> TokensAndMask:
        ids: list[int] = []
        mask: list[int] = []
        for position, message in enumerate(messages):
            rendered = self._render([message], tools if position == 0 else None)
            if position > 0 and message["role"] != "system":
                rendered = rendered[self.system_message_length :]
            ids += rendered
            mask += self._mask_message(message, len(rendered))
        return ids, mask

    def _each_after_dummy(self, messages: list[Message], tools: list[Any] | None) -> TokensAndMask:
        dummy = self._render([_DUMMY])
        # The first message carries the tools and the system text; what follows it is cut off again.
        ids = self._render([messages[0], _DUMMY], tools)[: -(len(dummy) - self.system_message_length)]
        mask = self._mask_message(messages[0], len(ids))
        for is_tool, run in groupby(messages[1:], key=lambda message: message["role"] == "tool"):
            for part in [list(run)] if is_tool else [[message] for message in run]:
                rendered = self._render([_DUMMY, *part])[len(dummy) :]
                ids += rendered
                mask += self._mask_message(part[0], len(rendered))
        return ids, mask

    def _located_in_text(self, messages: list[Message], tools: list[Any] | None) -> TokensAndMask:
        text: str = self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        spans = _assistant_spans(text)
        assistants = [message for message in messages if message["role"] == "assistant"]
        if len(spans) != len(assistants):
            raise ValueError(
                f"the chat template renders {len(spans)} assistant turns for {len(assistants)} assistant messages; "
                "use another --loss-mask-type for this model"
            )
        trained = [s for s, m in zip(spans, assistants, strict=True) if m.get("step_loss_mask", 1) == 1]
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = cast(Sequence[tuple[int, int]], encoding["offset_mapping"])
        mask = [0] * len(offsets)
        current = 0
        for position, (start, stop) in enumerate(offsets):
            while current < len(trained) and start >= trained[current][1]:
                current += 1
            if current < len(trained) and stop > start >= trained[current][0]:
                mask[position] = 1
        return list(encoding["input_ids"]), mask

    def _prompt_and_response(self, messages: list[Message], tools: list[Any] | None) -> TokensAndMask:
        prompt = self._render(messages[:1], tools, add_generation_prompt=True)
        text = f"{messages[-1]['content']}{self.tokenizer.eos_token}"
        response = self.tokenizer.encode(text, add_special_tokens=False)
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt + response, [0] * len(prompt) + [trained] * len(response)


def _assistant_spans(text: str) -> list[tuple[int, int]]:
    """Character ranges of assistant bodies: after the header and an opening think tag, through the end mark."""
    spans: list[tuple[int, int]] = []
    header = text.find(_HEADER)
    while header >= 0:
        start = header + len(_HEADER)
        if text.startswith(_THINK, start):
            start += len(_THINK)
        end = text.find(_END, start)
        stop = len(text) if end < 0 else end + len(_END)
        if text.startswith("\n", stop):
            stop += 1
        spans.append((start, stop))
        header = text.find(_HEADER, stop)
    return spans


def _text_of(message: Mapping[str, Any]) -> str:
    content: Any = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(item["text"]) for item in cast(list[dict[str, Any]], content) if item.get("type") == "text")
