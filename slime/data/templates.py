"""From a row's columns to the prompt that is generated from: messages, multimodal items, chat template.

Owns tokenizer loading and the shape of message lists. Leaves out reading files and filtering.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from slime.data.files import Row
from slime.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]


class Tokenizer(Protocol):
    """What this package uses of a transformers tokenizer."""

    chat_template: Any
    eos_token: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Ids to text."""
        ...

    def apply_chat_template(self, conversation: list[Message], **kwargs: Any) -> Any:
        """Render a conversation to text or ids."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Token string to id."""
        ...

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Text to an encoding with ids and, if asked for, character offsets."""
        ...


@dataclass(frozen=True, slots=True)
class MultimodalType:
    """A kind of non-text content and the placeholder that stands for one item of it."""

    name: str
    placeholder: str


class MultimodalTypes:
    """The known kinds of non-text content."""

    IMAGE = MultimodalType(name="image", placeholder="<image>")
    VIDEO = MultimodalType(name="video", placeholder="<video>")
    AUDIO = MultimodalType(name="audio", placeholder="<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """Every known kind."""
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        """The kind called ``name``, or None."""
        return next((kind for kind in cls.all() if kind.name == name), None)


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Load a Hugging Face tokenizer; keyword arguments go to ``from_pretrained``.

    Raises:
        DataError: The folder holds no usable tokenizer.
    """
    from transformers import AutoTokenizer  # seconds of import that parsing and replay need not pay

    kwargs.setdefault("trust_remote_code", True)
    try:
        return cast(Any, AutoTokenizer).from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError) as error:
        raise DataError(f"no tokenizer in {name_or_path} (--hf-checkpoint): {error}") from error


def load_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """Load the multimodal processor of a model; None for a text-only model."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    kwargs.setdefault("trust_remote_code", True)
    try:
        processor = cast(Any, AutoProcessor).from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError):
        return None
    # transformers answers with the bare tokenizer when a model has no processor
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """Which columns make a prompt, and how it is rendered.

    Args:
        input_key: Prompt column: a string or a message list.
        label_key: Label column; None when there is none.
        metadata_key: Column with a dict per row.
        tool_key: Column with the tools offered to the model.
        multimodal_keys: Kind of content -> column holding its items in placeholder order.
        apply_chat_template: Render messages to text.
        apply_chat_template_kwargs: Passed to every rendering; a row may override them.
        input_flag: Flag that sets ``input_key``, for messages.
        label_flag: Flag that sets ``label_key``, for messages.
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str | None = "metadata"
    tool_key: str | None = None
    multimodal_keys: Mapping[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    input_flag: str = "--input-key"
    label_flag: str = "--label-key"


def check_columns(row: Row, fmt: PromptFormat, location: str) -> None:
    """Raise DataError unless the prompt and label columns are there."""
    found = ", ".join(sorted(row)) or "none"
    for column, flag, what in (
        (fmt.input_key, fmt.input_flag, "prompt"),
        (fmt.label_key, fmt.label_flag, "label"),
    ):
        if column is not None and column not in row:
            raise DataError(
                f"{location}: no {what} column {column!r} ({flag} {column}); columns found: {found}. "
                f"Name the right one with {flag}"
            )


def read_metadata(row: Row, key: str | None, location: str) -> dict[str, Any]:
    """The metadata of a row as a dict of its own; an absent column or null gives an empty one."""
    value = row.get(key) if key is not None else None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"{location}: metadata column {key!r} must be an object, found {type(value).__name__} "
            f"(--metadata-key {key}); {value!r:.80}"
        )
    return copy.deepcopy(cast(dict[str, Any], value))


def read_tools(row: Row, key: str | None, location: str) -> list[Any] | None:
    """The tools of a row: a list, a JSON string of one, or an array; None when it offers none."""
    value: Any = row.get(key) if key is not None else None
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise DataError(f"{location}: tools column {key!r} is a string but not JSON: {error}") from None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        raise DataError(
            f"{location}: tools column {key!r} must be a list or a JSON list (--tool-key {key}), "
            f"found {type(value).__name__}"
        )
    return cast(list[Any], value)


def read_prompt(row: Row, fmt: PromptFormat, location: str) -> tuple[Prompt, dict[str, list[Any]] | None]:
    """The prompt of a row before rendering, and its multimodal items by kind (``images`` ...)."""
    prompt: Any = row[fmt.input_key]
    flag = f"({fmt.input_flag} {fmt.input_key})"
    if isinstance(prompt, str):
        if not fmt.apply_chat_template and not fmt.multimodal_keys:
            return prompt, None
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(
            f"{location}: the prompt must be a string or a list of messages {flag}, found {type(prompt).__name__}"
        )
    messages = copy.deepcopy(cast(list[Any], prompt))
    for message in messages:
        if not isinstance(message, dict) or not isinstance(cast(Message, message).get("role"), str):
            raise DataError(f'{location}: a message must be {{"role": ..., "content": ...}} {flag}: {message!r:.80}')
    if not messages:
        raise DataError(f"{location}: the message list is empty {flag}")
    if not fmt.multimodal_keys:
        return messages, None
    return messages, _fill_placeholders(messages, row, fmt.multimodal_keys, location)


def _fill_placeholders(
    messages: list[Message], row: Row, keys: Mapping[str, str], location: str
) -> dict[str, list[Any]]:
    """Replace placeholders by typed content items, in order; return the items by plural kind."""
    items: dict[str, list[Any]] = {}
    kinds: dict[str, MultimodalType] = {}
    for name, column in keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            known = ", ".join(k.name for k in MultimodalTypes.all())
            raise DataError(f"--multimodal-keys names {name!r}; known kinds are {known}")
        kinds[kind.placeholder] = kind
        items[kind.placeholder] = list(cast(Sequence[Any], row.get(column) or []))
    used: dict[str, int] = dict.fromkeys(items, 0)
    pattern = "(" + "|".join(re.escape(placeholder) for placeholder in items) + ")"
    for message in messages:
        if not isinstance(message.get("content"), str):
            continue
        content: list[dict[str, Any]] = []
        for segment in re.split(pattern, message["content"]):
            if segment in kinds:
                name = kinds[segment].name
                if used[segment] >= len(items[segment]):
                    raise DataError(f"{location}: more {segment} placeholders than items in column {keys[name]!r}")
                content.append({"type": name, name: items[segment][used[segment]]})
                used[segment] += 1
            elif segment:
                content.append({"type": "text", "text": segment})
        message["content"] = content
    for placeholder, count in used.items():
        left = len(items[placeholder]) - count
        if left and not _holds_typed_items(messages, kinds[placeholder].name):
            column = keys[kinds[placeholder].name]
            raise DataError(f"{location}: {left} items of column {column!r} have no {placeholder} in the prompt")
    return {f"{kinds[p].name}s" if kinds[p].name != "audio" else "audio": v for p, v in items.items()}


def _holds_typed_items(messages: list[Message], kind: str) -> bool:
    """Whether the row came with typed content items of this kind already in place."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    return any(item.get("type") == kind and kind not in item for content in contents for item in content)


def render_prompt(
    messages: list[Message], tokenizer: Tokenizer, tools: list[Any] | None, kwargs: Mapping[str, Any]
) -> str:
    """Messages to the text the model continues, with the generation prompt at its end.

    Raises:
        DataError: The tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "--apply-chat-template was given, but the tokenizer of --hf-checkpoint has no chat template; "
            "drop the flag, or add a chat_template to the checkpoint's tokenizer_config.json"
        )
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs)


def count_prompt_tokens(
    prompt: Prompt, tokenizer: Tokenizer, metadata: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> int:
    """Tokens of a prompt as it will be sent.

    A message list counts as its template renders it, or without a template as its texts alone. Items
    of a multimodal prompt count as their placeholder: their size is only known to the processor.
    """
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt, add_special_tokens=False))
    if tokenizer.chat_template:
        text = render_prompt(prompt, tokenizer, metadata.get("tools"), kwargs)
    else:
        text = "\n".join(_message_text(message) for message in prompt)
    return len(tokenizer.encode(text, add_special_tokens=False))


def _message_text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(item.get("text", "")) for item in cast(list[dict[str, Any]], content))
