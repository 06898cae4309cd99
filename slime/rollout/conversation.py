"""The list form of a custom generate function: ``custom_generate(args, samples, evaluation=False)``.

The user holds a conversation with ``generate_single`` and knows nothing of tokens. This module
records each completion and builds the training columns from the records: ids and log-probs of
assistant turns are the engine's own, what stands between them is tokenised once, with mask 0.
The function is called with one sample at a time, so that samples run concurrently and a fault
costs one of them.

Tests hold, with a tokenizer whose encoding of a decoded text differs from the original ids, that
the ids of assistant turns are the engine's, and that the next turn's request starts with them.
"""

from __future__ import annotations

import copy
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from slime.data.masks import MultiTurnLossMaskGenerator
from slime.data.templates import render_prompt
from slime.errors import DataError, PluginError, SlimeError
from slime.rollout.completion import Completion, complete, render_ids, template_kwargs, token_budget
from slime.rollout.context import RolloutContext
from slime.rollout.failures import clear_response
from slime.rollout.hooks import GENERATE_FLAG, CustomGenerate
from slime.types import Sample, Status

Message = dict[str, Any]

# Survives every template: no markup, no blanks at the ends, nothing a strip or a filter removes.
_SENTINEL = "SLIMEASSISTANTTURN"

_current: ContextVar[Conversation] = ContextVar("slime_conversation")


class GenerationAbortedError(SlimeError, RuntimeError):
    """The rollout has all it needs and ends what still runs; not a fault of the function."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of the response: an assistant turn, or with ``completion`` None what stands between two."""

    token_ids: list[int]
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of ``generate_single``.

    Args:
        messages: The conversation it was called with.
        text: What it returned.
        prompt_ids: Ids in front of the first generated token of this branch.
        spans: Everything after them; the last one is this turn's completion.
    """

    messages: list[Message]
    text: str
    prompt_ids: list[int]
    spans: list[Span]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt_ids, *(i for span in self.spans for i in span.token_ids)]

    def is_continued_by(self, messages: list[Message]) -> bool:
        """Whether ``messages`` is this turn's conversation, its answer, and perhaps more."""
        n = len(self.messages)
        if len(messages) <= n or messages[:n] != self.messages:
            return False
        answer = messages[n]
        if answer.get("role") != "assistant":
            return False
        # An answer parsed into tool_calls, or stripped of blanks, is still the one that was generated.
        return bool(answer.get("tool_calls")) or str(answer.get("content") or "").strip() == self.text.strip()


async def generate_single(conversation: list[Message], **sampling_params: Any) -> str:
    """Generate the next assistant turn of a conversation.

    Provided to custom generate functions in list form, as a global of their module.

    Args:
        conversation: Messages with ``role`` and ``content``; not changed.
        **sampling_params: Override the rollout's, in the engine's names (``max_new_tokens=64``).

    Returns:
        The text, without the token that ended the turn. Empty when the context is full.

    Raises:
        RuntimeError: Called outside a custom generate function.
        GenerationAbortedError: The rollout is complete; let it pass.
    """
    current = _current.get(None)
    if current is None:
        raise RuntimeError(
            f"generate_single works inside a function of {GENERATE_FLAG} that takes (args, samples, evaluation)"
        )
    return await current.generate(conversation, sampling_params)


class Conversation:
    """Records the turns of one sample.

    Args:
        context: The rollout's handle.
        sample: The sample.
        sampling_params: The rollout's sampling parameters.
        start: The messages that the function starts from.
        start_ids: Their ids when the prompt was rendered before; None to render them.
    """

    def __init__(
        self,
        context: RolloutContext,
        sample: Sample,
        sampling_params: dict[str, Any],
        start: list[Message],
        start_ids: list[int] | None,
    ) -> None:
        self._context = context
        self._sample = sample
        self._sampling_params = sampling_params
        self._start = start
        self._start_ids = start_ids
        self.turns: list[Turn] = []
        self.aborted = False
        self.out_of_budget = False
        self.generation_seconds = 0.0

    async def generate(self, conversation: list[Message], overrides: dict[str, Any]) -> str:
        """One turn; see ``generate_single``."""
        if self._context.turn.aborted:
            self.aborted = True
            raise GenerationAbortedError("the rollout is complete")
        messages = copy.deepcopy(conversation)
        prompt_ids, spans = self._continue(messages)
        input_ids = [*prompt_ids, *(i for span in spans for i in span.token_ids)]
        params = {**self._sampling_params, **overrides}
        budget = token_budget(self._context, len(input_ids), params["max_new_tokens"])
        if budget <= 0:
            self.out_of_budget = True
            return ""
        started = time.monotonic()
        params["max_new_tokens"] = budget
        completion = await complete(
            self._context, self._sample, input_ids, params, routes_from=_num_routed(prompt_ids, spans)
        )
        self.generation_seconds += time.monotonic() - started
        if completion.finish_type == "abort":
            self.aborted = True
            raise GenerationAbortedError("the rollout is complete")
        text = self._text(completion, bool(params["skip_special_tokens"]))
        self.turns.append(Turn(messages, text, prompt_ids, [*spans, Span(completion.token_ids, completion)]))
        return text

    def _text(self, completion: Completion, skip_special_tokens: bool) -> str:
        """The text of a turn without its end marker, which the chat template adds again."""
        if not completion.ends_with_stop_token:
            return completion.text
        ids = completion.token_ids[:-1]
        return self._context.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _continue(self, messages: list[Message]) -> tuple[list[int], list[Span]]:
        """Prompt ids and response spans in front of the next turn."""
        for turn in sorted(self.turns, key=lambda t: len(t.messages), reverse=True):
            if turn.is_continued_by(messages):
                tail = self._tail_ids(messages, len(turn.messages), turn)
                if tail is not None:
                    return turn.prompt_ids, [*turn.spans, Span(tail)]
        if messages == self._start and self._start_ids is not None:
            return self._start_ids, []
        return self._render(messages), []

    def _render(self, messages: list[Message]) -> list[int]:
        return render_ids(self._context, self._sample, messages)

    def _tail_ids(self, messages: list[Message], position: int, turn: Turn) -> list[int] | None:
        """Ids of what the template puts after the assistant message at ``position``; None if it drops that one."""
        marked = [*messages[:position], {"role": "assistant", "content": _SENTINEL}, *messages[position + 1 :]]
        kwargs = template_kwargs(self._context.args, self._sample)
        text = render_prompt(marked, self._context.tokenizer, self._sample.metadata.get("tools"), kwargs)
        _, found, tail = text.rpartition(_SENTINEL)
        if not found:
            return None
        ids = self._context.tokenizer.encode(tail, add_special_tokens=False)
        completion = turn.spans[-1].completion
        if completion is not None and completion.ends_with_stop_token and ids[:1] == completion.token_ids[-1:]:
            return ids[1:]  # the engine generated the end marker already
        return ids

    def leaf(self, response: str, messages: list[Message]) -> Turn | None:
        """The turn that the sample ends with: the one whose text is the response, or that the conversation holds."""
        for turn in reversed(self.turns):
            if turn.text.strip() == response.strip():
                return turn
        for turn in sorted(self.turns, key=lambda t: len(t.messages), reverse=True):
            if turn.is_continued_by(messages):
                return turn
        return self.turns[-1] if self.turns else None

    def write(self, sample: Sample, messages: list[Message]) -> None:
        """Build the columns of ``sample`` from the turns that lead to its response.

        Raises:
            ValueError: There is nothing to train on.
        """
        response, reward = sample.response, sample.reward
        leaf = self.leaf(response, messages)
        if leaf is None:
            self._write_without_records(sample, messages)
            return
        clear_response(sample)
        sample.tokens = list(leaf.prompt_ids)
        for span in leaf.spans:
            if span.completion is None:
                sample.append_response_tokens(self._context.args, tokens=span.token_ids, trainable=False)
                continue
            sample.append_response_tokens(
                self._context.args,
                tokens=span.token_ids,
                log_probs=span.completion.log_probs,
                meta_info=span.completion.meta_info,
            )
        if self.out_of_budget:
            sample.status = Status.TRUNCATED
        sample.response, sample.reward = response or leaf.text, reward

    def _write_without_records(self, sample: Sample, messages: list[Message]) -> None:
        """Tokenise answers that did not come from ``generate_single``; the trainer recomputes their log-probs."""
        response, reward = sample.response, sample.reward
        start = len(self._start)
        turns = messages if messages[:start] == self._start else self._start
        if response and _last_answer(turns[start:]) != response:
            turns = [*turns, {"role": "assistant", "content": response}]
        if not _last_answer(turns[start:]):
            raise ValueError("the function neither called generate_single nor set sample.response")
        prompt_ids, response_ids, mask = self._tokenize(turns)
        clear_response(sample)
        sample.tokens, sample.loss_mask, sample.response_length = [*prompt_ids, *response_ids], mask, len(mask)
        sample.status = Status.COMPLETED
        sample.response, sample.reward = response or _last_answer(turns), reward

    def _tokenize(self, turns: list[Message]) -> tuple[list[int], list[int], list[int]]:
        """Prompt ids, and ids and mask from the first answer on."""
        tokenizer, start = self._context.tokenizer, len(self._start)
        if not tokenizer.chat_template:
            if self._start_ids is None or len(turns) != start + 1:
                raise DataError("several turns need a chat template, which the tokenizer of --hf-checkpoint lacks")
            ids = [*tokenizer.encode(str(turns[-1]["content"]), add_special_tokens=False), tokenizer.eos_token_id]
            return self._start_ids, ids, [1] * len(ids)
        # Answers that the prompt itself shows are not the model's.
        shown = [{**m, "step_loss_mask": 0} if m.get("role") == "assistant" else m for m in turns[:start]]
        generator = MultiTurnLossMaskGenerator(tokenizer, self._context.args.loss_mask_type)
        ids, mask = generator.get_loss_mask([*shown, *turns[start:]], self._sample.metadata.get("tools"))
        if 1 not in mask:
            raise ValueError("the chat template leaves nothing of the answers")
        first = mask.index(1)
        return self._start_ids or ids[:first], ids[first:], mask[first:]


def _num_routed(prompt_ids: list[int], spans: list[Span]) -> int:
    """Leading tokens that the turns so far were run on: all up to the last generated token, which never was."""
    count, routed = len(prompt_ids), 0
    for span in spans:
        count += len(span.token_ids)
        if span.completion is not None and span.token_ids:
            routed = count - 1
    return routed


def _last_answer(messages: list[Message]) -> str:
    answers = [m for m in messages if m.get("role") == "assistant"]
    return str(answers[-1].get("content") or "") if answers else ""


async def generate_with_list_form(
    context: RolloutContext, function: CustomGenerate, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample:
    """Call a list-form function for one sample and complete what it returns.

    Afterwards ``prompt`` is the original one again, and ``metadata["messages"]`` the conversation.

    Raises:
        PluginError: It returned something else than the list.
        ValueError: It produced nothing to train on.
    """
    args, original = context.args, sample.prompt
    if sample.response_length:  # an aborted conversation starts again: its function cannot resume in the middle
        clear_response(sample)
    start_ids = None
    if isinstance(original, str):
        start: list[Message] = [{"role": "user", "content": original}]
        if args.apply_chat_template or not context.tokenizer.chat_template:
            start_ids = context.tokenizer.encode(original, add_special_tokens=False)
    else:
        start = copy.deepcopy(original)
    conversation = Conversation(context, sample, sampling_params, copy.deepcopy(start), start_ids)
    sample.prompt = start
    function.module_globals().setdefault("generate_single", generate_single)
    token = _current.set(conversation)
    started = time.monotonic()
    try:
        result = await function.call(args, [sample], evaluation=evaluation)
    except GenerationAbortedError:
        conversation.aborted = True
        result = [sample]
    finally:
        _current.reset(token)
        left, sample.prompt = sample.prompt, original
    produced = _only_sample(result, sample, function.path)
    if produced is not sample:
        left, produced.prompt = produced.prompt, original
    messages = left if isinstance(left, list) else start
    if conversation.aborted:
        clear_response(produced)
        produced.status = Status.ABORTED
        return produced
    if conversation.turns or not produced.response_length:
        conversation.write(produced, messages)
        produced.metadata = {**produced.metadata, "messages": messages}
    if not produced.non_generation_time:
        produced.non_generation_time = time.monotonic() - started - conversation.generation_seconds
    return produced


def _only_sample(result: Any, sample: Sample, path: str) -> Sample:
    if result is None:  # mutated in place, nothing returned
        return sample
    if isinstance(result, list) and len(result) == 1 and isinstance(result[0], Sample):
        return result[0]
    found = f"a list of {len(result)}" if isinstance(result, list) else type(result).__name__
    raise PluginError(f"{GENERATE_FLAG} {path} was given one sample in a list and returned {found}; return the list")
