"""What tests of the data package build on: a real, tiny byte-level tokenizer with two chat templates, and flags."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# A system message of its own is put first when the conversation has none.
AUTO_SYSTEM_TEMPLATE = (
    "{%- if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Thinking is kept in the last assistant turns only; consecutive tool answers share one user turn.
THINKING_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>{{ m.content }}</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- elif m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}"
    "<|im_start|>assistant\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def make_tokenizer(chat_template: str | None, extra: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """One token per byte, plus special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[1:], *extra]})
    tokenizer.chat_template = chat_template
    return tokenizer


def data_args(path: str | Path | None, checkpoint: str | None = None, **changes: Any) -> SimpleNamespace:
    """What the data package reads from ``args``, with the defaults of the flags."""
    values: dict[str, Any] = {
        "prompt_data": None if path is None else str(path),
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "tool_key": "tools",
        "multimodal_keys": None,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "rollout_max_prompt_len": None,
        "rollout_seed": 42,
        "rollout_shuffle": False,
        "rollout_global_dataset": True,
        "n_samples_per_prompt": 2,
        "num_data_workers": None,
        "streaming_data": False,
        "skip_bad_rows": False,
        "max_bad_row_fraction": 0.01,
        "hf_checkpoint": checkpoint,
        "buffer_filter_path": "slime.rollout.data_source.pop_first",
        "async_buffer_size": 1,
        "save": None,
        "load": None,
        "data_source_path": "slime.data.source.RolloutDataSourceWithBuffer",
    }
    return SimpleNamespace(**{**values, **changes})
