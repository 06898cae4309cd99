"""A cheap look at the prompt files while the command line is checked.

Reads the first rows of each file, without tokenizer, so that a wrong column or a broken line is
reported before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape, glob
from itertools import islice
from pathlib import Path

from slime.config import Config
from slime.config.data_paths import DATA_SUFFIXES, parse_sliced_path
from slime.config.rules.outputs import template_problems
from slime.config.rules.supervised import is_supervised
from slime.data.files import head_rows
from slime.data.rows import RowBuilder
from slime.data.templates import PromptFormat
from slime.errors import DataError
from slime.types import Sample

NUM_ROWS = 20

_ROLLOUT_ID = re.compile(r"\{rollout_id[^}]*\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    flag: str
    path: str
    fmt: PromptFormat
    conversations: bool = False


def preflight(config: Config) -> list[str]:
    """Faults of dumps to train on and of the data files' first rows, one sentence each; empty if there are none."""
    skip = config.data.skip_bad_rows
    return [*_dump_faults(config), *(fault for file in _files(config) for fault in _check(file, skip_bad_rows=skip))]


def _dump_faults(config: Config) -> list[str]:
    """Dumps of a run that was resumed begin later than at 0, so any one of them will do."""
    template = config.debug.load_debug_rollout_data
    if template is None or template_problems("", template):  # the rules report a template that is none
        return []
    pattern = _ROLLOUT_ID.sub("*", escape(template))
    if glob(pattern):  # noqa: PTH207 - the placeholder may stand in any part of the path
        return []
    problem = (
        f"--load-debug-rollout-data {template}: no such file; name what --save-debug-rollout-data wrote, with "
        "{rollout_id} in place of the number"
    )
    return [problem]


def _files(config: Config) -> Sequence[_File]:
    data = config.data
    files: list[_File] = []
    # A source of the user's may read files of its own kind, and a replay reads none.
    reads_prompts = data.rollout_global_dataset and data.data_source_path.startswith("slime.")
    if data.prompt_data is not None and reads_prompts and config.debug.load_debug_rollout_data is None:
        # Rendering needs the tokenizer and is left out.
        fmt = PromptFormat(
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            tool_key=data.tool_key,
            multimodal_keys=data.multimodal_keys,
        )
        supervised = is_supervised(config.rollout.rollout_function_path)
        files.append(_File(flag="--prompt-data", path=data.prompt_data, fmt=fmt, conversations=supervised))
    for dataset in config.eval.eval_datasets:
        fmt = PromptFormat(
            input_key=dataset.input_key or data.input_key,
            label_key=dataset.label_key,
            metadata_key=dataset.metadata_key,
            tool_key=dataset.tool_key,
            multimodal_keys=dataset.multimodal_keys,
            input_flag="--input-key or --eval-input-key",
            label_flag="--label-key or --eval-label-key",
        )
        files.append(_File(flag=f"--eval-prompt-data {dataset.name}", path=dataset.path, fmt=fmt))
    return files


def _check(file: _File, *, skip_bad_rows: bool) -> list[str]:
    plain, part = parse_sliced_path(file.path)
    if not Path(plain).is_file():
        return [f"{file.flag} {file.path}: no such file"]
    if Path(plain).suffix not in DATA_SUFFIXES:
        return [f"{file.flag} {file.path}: unsupported file type; accepted are {' and '.join(DATA_SUFFIXES)}"]
    builder = RowBuilder(fmt=file.fmt, tokenizer=None, max_length=None)
    start = part.start if part.start is not None and part.start >= 0 else 0
    num_rows = 0
    faults: list[str] = []
    for row, location in islice(head_rows(plain), start, start + NUM_ROWS):
        num_rows += 1
        built = builder.build(row, location)
        if isinstance(built, DataError):
            faults.append(f"{file.flag}: {built}")
        elif file.conversations and isinstance(built, Sample) and not isinstance(built.prompt, list):
            faults.append(
                f"{file.flag}: {location}: supervised fine-tuning needs a message list in {file.fmt.input_key!r}, "
                f"found {type(built.prompt).__name__}; name the column of conversations with --input-key"
            )
    if num_rows == 0:
        return [f"{file.flag} {file.path}: no rows; check the file and its slice suffix"]
    if skip_bad_rows and len(faults) < num_rows:
        return []
    return faults[:1]
