"""Debug modes, dumps, output directory, trackers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter

from slime.config.draft import Draft


def resolve_outputs(draft: Draft) -> None:
    """Settle what kind of run this is and where it writes."""
    _debug_modes(draft)
    _output_dir(draft)
    log = draft.logging
    if log.use_tensorboard is None:
        draft.logging = replace(log, use_tensorboard=draft.surroundings.tensorboard_installed)
    elif log.use_tensorboard and not draft.surroundings.tensorboard_installed:
        draft.problems.append("--use-tensorboard: the package tensorboard is not installed; pip install tensorboard")


def _debug_modes(draft: Draft) -> None:
    debug = draft.debug
    if debug.dump_details is not None:
        folder = Path(debug.dump_details)
        if folder.exists() and not folder.is_dir():
            draft.problems.append(f"--dump-details {folder}: is a file; name a directory")
        replaced = [n for n in ("save_debug_rollout_data", "save_debug_train_data") if n in draft.given]
        draft.notices += [f"{draft.flag_of(n)} has no effect: --dump-details {folder} decides" for n in replaced]
        debug = replace(
            debug,
            save_debug_rollout_data=str(folder / "rollout_data" / "{rollout_id}.pt"),
            save_debug_train_data=str(folder / "train_data" / "{rollout_id}.pt"),
        )
    if debug.load_debug_rollout_data is not None:
        debug = replace(debug, debug_train_only=True)
    draft.debug = debug
    if debug.debug_rollout_only and debug.debug_train_only:
        other = "--load-debug-rollout-data" if "debug_train_only" not in draft.given else "--debug-train-only"
        draft.problems.append(f"--debug-rollout-only and {other} exclude each other; remove one")
    if debug.save_debug_train_data is not None and debug.save_debug_train_data == debug.save_debug_rollout_data:
        draft.problems.append("--save-debug-train-data must not be equal to --save-debug-rollout-data.")
    for name in ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data"):
        template: str | None = getattr(debug, name)
        if template is None:
            continue
        draft.problems += template_problems(draft.flag_of(name), template)
        if "{rollout_id}" not in template:
            draft.notices.append(
                f"{draft.flag_of(name)} {template}: has no {{rollout_id}}, so every rollout uses this file"
            )


def template_problems(flag: str, template: str, *, accepted: Sequence[str] = ("rollout_id",)) -> list[str]:
    """Why a path with placeholders cannot be filled in; it is tried once, as it will be for each rollout."""
    wanted = " and ".join(f"{{{name}}}" for name in accepted) or "nothing"
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
        unknown = [name for name in names if name not in accepted]
        if not unknown:
            template.format(**dict.fromkeys(accepted, 0))
            return []
        found = f"unknown placeholder {{{unknown[0]}}}"
    except ValueError as error:
        found = str(error)
    return [f"{flag} {template}: {found}; {wanted} is filled in here"]


def _output_dir(draft: Draft) -> None:
    log = draft.logging
    if log.output_dir is None:
        name = log.tb_experiment_name or log.wandb_group or draft.surroundings.start_time
        draft.logging = replace(log, output_dir=str(Path("outputs") / name.replace("/", "_")))
        return
    path = Path(log.output_dir)
    if path.exists() and not path.is_dir():
        draft.problems.append(f"--output-dir {path}: is a file; name a directory")
