"""The prompt file, its columns, and where rewards come from."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from slime.config.data_paths import DATA_SUFFIXES, parse_sliced_path
from slime.config.draft import Draft
from slime.config.flags import flag_specs
from slime.config.sections import DataConfig, RolloutConfig

REWARD_TYPES = ("deepscaler", "dapo", "f1", "gpqa", "ifbench", "math", "random", "remote_rm")
"""Built-in graders; ``boxed_`` may be put before any of them."""


def resolve_inputs(draft: Draft) -> None:
    """Check files and grader, and fill in columns that the data makes obvious."""
    _prompt_file(draft)
    _columns(draft)
    _grader(draft)
    _workers(draft)


def needs_prompts(draft: Draft) -> bool:
    """Whether this run reads ``--prompt-data`` through our own data source."""
    data, debug = draft.data, draft.debug
    replays = debug.load_debug_rollout_data is not None or debug.load_forge_rollout_data is not None
    own = data.data_source_path != default_of(DataConfig, "data_source_path")
    return data.rollout_global_dataset and not own and not replays


def default_of(section: Any, dest: str) -> Any:
    """The declared default of a field."""
    return next(spec.default for spec in flag_specs(section, "") if spec.dest == dest)


def file_problem(path: str, flag: str) -> str | None:
    """Why a data file cannot be used, or None."""
    file, _ = parse_sliced_path(path)
    if "@[" in file:
        return f"{flag} {path}: a slice is written path@[start:end] with integers or nothing on each side"
    if not Path(file).exists():
        near = difflib.get_close_matches(Path(file).name, _siblings(file), n=1, cutoff=0.6)
        hint = f"; did you mean {Path(file).parent / near[0]}?" if near else ""
        return f"{flag} {path}: no such file{hint or '; check the path'}"
    if Path(file).is_dir():
        return f"{flag} {path}: is a directory; name a .jsonl or .parquet file"
    if Path(file).suffix not in DATA_SUFFIXES:
        return f"{flag} {path}: must be a .jsonl or .parquet file, found {Path(file).suffix or 'no extension'}"
    return None


def _siblings(file: str) -> list[str]:
    parent = Path(file).parent
    return [entry.name for entry in parent.iterdir() if entry.suffix in DATA_SUFFIXES] if parent.is_dir() else []


def _prompt_file(draft: Draft) -> None:
    if not needs_prompts(draft):
        return
    path = draft.data.prompt_data
    if path is None:
        if "prompt_data" not in draft.given:
            draft.problems.append(
                "--prompt-data is missing; name a .jsonl or .parquet file with one prompt per row "
                "(or --disable-rollout-global-dataset with a data source of your own)"
            )
        return
    problem = file_problem(path, "--prompt-data")
    if problem is not None:
        draft.problems.append(problem)


def _columns(draft: Draft) -> None:
    """Take ``prompt`` and ``label`` when the flags were left out and the first row has them."""
    data = draft.data
    row = first_row(data.prompt_data or "")
    if row is None:
        return
    if "input_key" not in draft.given and data.input_key not in row and "prompt" in row:
        draft.data = replace(draft.data, input_key="prompt")
        draft.notices.append(f"no --input-key and no column {data.input_key!r}: prompts are taken from 'prompt'")
    elif "input_key" not in draft.given and data.input_key not in row and "messages" in row:
        draft.data = replace(draft.data, input_key="messages")
        draft.notices.append(f"no --input-key and no column {data.input_key!r}: prompts are taken from 'messages'")
    if "label_key" not in draft.given and "label" in row:
        draft.data = replace(draft.data, label_key="label")
        draft.notices.append("no --label-key: labels are taken from the column 'label'")


def first_row(path: str) -> Mapping[str, Any] | None:
    """First row of a .jsonl file; None for other files or when it cannot be read (others report that)."""
    file = Path(parse_sliced_path(path)[0])
    if file.suffix != ".jsonl":
        return None
    try:
        with file.open(encoding="utf-8") as stream:
            line = next((text for text in stream if text.strip()), "")
        row = json.loads(line)
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", row) if isinstance(row, dict) else None


def _grader(draft: Draft) -> None:
    reward, rollout, algorithm = draft.reward, draft.rollout, draft.algorithm
    if reward.rm_type is not None:
        draft.reward = reward = replace(reward, rm_type=reward.rm_type.strip())
        problem = reward_type_problem(cast("str", reward.rm_type), "--rm-type")
        if problem is not None:
            draft.problems.append(problem)
        elif reward.rm_type == "remote_rm" and reward.rm_url is None:
            draft.problems.append("--rm-type remote_rm needs --rm-url, the address that grades")
        return
    own_reward = (
        reward.custom_rm_path is not None
        or rollout.custom_generate_function_path is not None
        or rollout.rollout_function_path != default_of(RolloutConfig, "rollout_function_path")
        or algorithm.loss_type == "sft_loss"
        or draft.debug.debug_train_only
        or not needs_prompts(draft)
    )
    if not own_reward and not _rows_name_graders(draft):
        draft.reward = replace(reward, rm_type="math")
        draft.notices.append(
            "no --rm-type and no --custom-rm-path: responses are graded with --rm-type math "
            "(the last \\boxed{} of the response against the label)"
        )


def _rows_name_graders(draft: Draft) -> bool:
    row = first_row(draft.data.prompt_data or "") or {}
    metadata = row.get(draft.data.metadata_key)
    return isinstance(metadata, Mapping) and "rm_type" in metadata


def reward_type_problem(name: str, where: str) -> str | None:
    """Why ``name`` is no built-in grader, or None."""
    base = name.removeprefix("boxed_")
    if base in REWARD_TYPES:
        return None
    near = difflib.get_close_matches(base, REWARD_TYPES, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]}?" if near else "."
    return (
        f"{where} {name}: unknown reward type{hint} Known are {', '.join(REWARD_TYPES)} "
        "(each also with the prefix boxed_); for a reward of your own use --custom-rm-path"
    )


def _workers(draft: Draft) -> None:
    data = draft.data
    if data.streaming_data and draft.rollout.rollout_shuffle:
        draft.notices.append(
            "--streaming-data with --rollout-shuffle: rows are shuffled within a window, not over the file"
        )
    if "max_bad_row_fraction" in draft.given and not data.skip_bad_rows:
        draft.notices.append("--max-bad-row-fraction has no effect without --skip-bad-rows")
