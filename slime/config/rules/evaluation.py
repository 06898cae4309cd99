"""Evaluation sets and when they run."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from slime.config.draft import Draft
from slime.config.eval_datasets import build_eval_dataset_configs, pairs_from_flag, read_eval_file
from slime.config.rules.availability import UNAVAILABLE_EVAL_KEYS
from slime.config.rules.inputs import file_problem, first_row, reward_type_problem
from slime.errors import ConfigError


def resolve_evaluation(draft: Draft) -> None:
    """Build the evaluation sets and check that they can run."""
    evaluation = draft.eval
    if evaluation.eval_function_path is None:
        evaluation = replace(evaluation, eval_function_path=draft.rollout.rollout_function_path)
    if draft.reward.eval_reward_key is None:
        draft.reward = replace(draft.reward, eval_reward_key=draft.reward.reward_key)
    draft.eval = evaluation
    try:
        datasets = _build(draft)
    except ConfigError as error:
        draft.problems += error.problems
        return
    own_function = "eval_function_path" in draft.given
    if evaluation.eval_interval is not None and not datasets and not own_function:
        draft.eval = replace(evaluation, eval_interval=None)
        draft.notices.append(
            f"--eval-interval {evaluation.eval_interval} has no effect: no evaluation data; add "
            "--eval-prompt-data NAME PATH or --eval-config"
        )
        return
    if datasets and evaluation.eval_interval is None:
        draft.notices.append("evaluation data is given but never used; add --eval-interval")
    if evaluation.eval_interval is not None and draft.reward.group_rm:
        draft.problems.append("--group-rm cannot be used in evaluation; remove --eval-interval or --group-rm")
    draft.eval = replace(draft.eval, eval_datasets=datasets)


def _build(draft: Draft) -> tuple[Any, ...]:
    evaluation = draft.eval
    if evaluation.eval_config is not None:
        defaults, raw = read_eval_file(evaluation.eval_config)
        where = "--eval-config"
        if evaluation.eval_prompt_data:
            draft.notices.append("--eval-config replaces --eval-prompt-data")
    elif evaluation.eval_prompt_data:
        defaults, raw, where = dict[str, Any](), pairs_from_flag(evaluation.eval_prompt_data), "--eval-prompt-data"
    else:
        return ()
    unread = sorted(k for k in {*defaults, *(k for item in raw for k in item)} if k in UNAVAILABLE_EVAL_KEYS)
    if unread:
        raise ConfigError(
            [
                f"{where}: {key} is part of the interface but not available in this version; leave it out"
                for key in unread
            ]
        )
    names = [str(item.get("name")) for item in raw]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"{where}: the name {repeated[0]} is given twice; metrics need a name for each set")
    datasets = build_eval_dataset_configs(_FlatFlags(draft), raw, defaults)
    problems = [p for d in datasets if (p := file_problem(d.path, where)) is not None]
    problems += [
        p
        for d in datasets
        if d.rm_type is not None and (p := reward_type_problem(d.rm_type, f"{where} {d.name}: rm_type")) is not None
    ]
    if problems:
        raise ConfigError(problems)
    return tuple(_with_columns(draft, dataset) for dataset in datasets)


def _with_columns(draft: Draft, dataset: Any) -> Any:
    """Take ``prompt`` and ``label`` where no flag names a column and the first row has them."""
    row = first_row(dataset.path) or {}
    changes: dict[str, str] = {}
    named_input = {"input_key", "eval_input_key"} & draft.given
    if not named_input and dataset.input_key not in row and "prompt" in row:
        changes["input_key"] = "prompt"
    if dataset.label_key is None and "label" in row:
        changes["label_key"] = "label"
    return replace(dataset, **changes)


class _FlatFlags:
    """The flat names that the fall-back chains read, over a draft."""

    def __init__(self, draft: Draft) -> None:
        for section in (draft.eval, draft.rollout, draft.data, draft.reward):
            for f in fields(section):
                setattr(self, f.name, getattr(section, f.name))
