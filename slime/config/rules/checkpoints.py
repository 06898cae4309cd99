"""Initial and reference weights, resuming, saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from slime.config.draft import Draft
from slime.config.hf import LOADABLE_MODEL_TYPES, normalize_config, read_config_json
from slime.config.rules.outputs import template_problems
from slime.config.rules.same_model import other_model
from slime.config.sections import CheckpointConfig
from slime.errors import ConfigError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Marks a directory of Megatron checkpoints and names the newest iteration."""


def classify_checkpoint(path: str) -> Literal["megatron", "huggingface", "empty", "missing"]:
    """What a ``--load`` style directory holds."""
    folder = Path(path)
    if not folder.is_dir():
        return "missing"
    if (folder / TRACKER_FILE).is_file():
        return "megatron"
    if (folder / "config.json").is_file():
        try:
            model_type = normalize_config(read_config_json(folder / "config.json"))["model_type"]
        except ConfigError:
            return "empty"
        return "huggingface" if model_type in LOADABLE_MODEL_TYPES else "empty"
    return "empty"


def iteration_problems(flag: str, step: int | None, where: str, path: str) -> list[str]:
    """Whether a Megatron checkpoint directory has the iteration that a flag asks for.

    Args:
        flag: The flag that names the iteration.
        step: The iteration; None for the newest.
        where: The flag that names the directory.
        path: The directory.
    """
    if step is None or (Path(path) / f"iter_{step:07d}").is_dir():
        return []
    names = sorted(entry.name.removeprefix("iter_") for entry in Path(path).glob("iter_*"))
    there = ", ".join(str(int(name)) for name in names if name.isdigit()) or "none"
    return [f"{flag} {step}: {where} {path} has no such iteration; there: {there}"]


def resolve_checkpoints(draft: Draft) -> None:
    """Settle ``load``, ``ref_load``, ``resume`` and ``save``."""
    _reference(draft)
    if draft.debug.debug_rollout_only:
        return
    _load(draft)
    _save(draft)


def _reference(draft: Draft) -> None:
    checkpoint, algorithm = draft.checkpoint, draft.algorithm
    needs_reference = algorithm.use_kl_loss or algorithm.kl_coef != 0
    if checkpoint.ref_load is not None:
        kind = classify_checkpoint(checkpoint.ref_load)
        if kind == "missing":
            draft.problems.append(f"--ref-load {checkpoint.ref_load}: no such directory; name the reference weights")
        elif kind == "empty":
            draft.problems.append(
                f"--ref-load {checkpoint.ref_load}: holds neither a Megatron checkpoint ({TRACKER_FILE}) "
                "nor a Hugging Face model of a supported family"
            )
        elif kind == "huggingface":
            draft.problems += weights_problems(draft, "--ref-load", checkpoint.ref_load)
        else:
            draft.problems += iteration_problems(
                "--ref-ckpt-step", checkpoint.ref_ckpt_step, "--ref-load", checkpoint.ref_load
            )
    elif needs_reference and draft.rollout.hf_checkpoint is not None:
        flag = "--use-kl-loss" if algorithm.use_kl_loss else "--kl-coef"
        draft.checkpoint = replace(checkpoint, ref_load=draft.rollout.hf_checkpoint)
        draft.notices.append(
            f"{flag} without --ref-load: the reference is the initial weights of --hf-checkpoint "
            f"{draft.rollout.hf_checkpoint}"
        )


def _load(draft: Draft) -> None:
    """Settle where training starts, for everyone: a Megatron ``--load`` resumes, anything else starts at 0."""
    checkpoint = draft.checkpoint
    kind = None if checkpoint.load is None else classify_checkpoint(checkpoint.load)
    if checkpoint.load is None or kind in ("empty", "missing"):
        start = checkpoint.ref_load or draft.rollout.hf_checkpoint
        if checkpoint.load is not None and not _may_start(draft, checkpoint.load, kind, start):
            return
        step = checkpoint.ref_ckpt_step if start == checkpoint.ref_load else None
        draft.checkpoint = _from_the_start(replace(checkpoint, load=start, ckpt_step=step))
        return
    if kind == "megatron":
        draft.problems += iteration_problems("--ckpt-step", checkpoint.ckpt_step, "--load", checkpoint.load)
    if kind == "megatron" and "--finetune" not in draft.megatron_flags and not _is_release(checkpoint):
        draft.checkpoint = replace(checkpoint, resume=True)
    else:
        if kind == "huggingface":
            draft.problems += weights_problems(draft, "--load", checkpoint.load)
        draft.checkpoint = _from_the_start(checkpoint)


def weights_problems(draft: Draft, where: str, path: str, *, own_head: bool = False) -> list[str]:
    """Why the weights of a Hugging Face directory cannot be those of the trained model.

    Args:
        draft: Knows ``--hf-checkpoint``.
        where: The flag that names the directory.
        path: The directory.
        own_head: Whether the trained model has an output layer of its own.
    """
    differing = other_model(draft, path, ours="there", own_head=own_head)
    if draft.hf is None or not differing:
        return []
    problem = (
        f"{where} {path}: weights of another model than --hf-checkpoint {draft.hf.path}: {', '.join(differing)}; "
        "name weights of that model, or this directory as --hf-checkpoint"
    )
    return [problem]


def _from_the_start(checkpoint: CheckpointConfig) -> CheckpointConfig:
    first = 0 if checkpoint.start_rollout_id is None else checkpoint.start_rollout_id
    return replace(checkpoint, resume=False, start_rollout_id=first)


def _is_release(checkpoint: CheckpointConfig) -> bool:
    """Whether ``--load`` holds weights without an iteration, as Megatron's converters write them."""
    tracker = Path(checkpoint.load or "") / TRACKER_FILE
    return checkpoint.ckpt_step is None and tracker.read_text(encoding="utf-8").strip() == "release"


def _may_start(draft: Draft, load: str, kind: str | None, start: str | None) -> bool:
    """Whether a ``--load`` without a checkpoint is the directory that this run will fill."""
    save = draft.checkpoint.save
    same = save is not None and Path(save).absolute() == Path(load).absolute()
    if kind == "missing" and not same:
        draft.problems.append(
            f"--load {load}: no such directory; name a checkpoint, or leave --load out to start from "
            "--ref-load or --hf-checkpoint (a directory that does not exist yet is accepted when --save names it too)"
        )
        return False
    if draft.checkpoint.ckpt_step is not None:
        draft.problems.append(f"--ckpt-step {draft.checkpoint.ckpt_step}: --load {load} holds no checkpoint")
        return False
    draft.notices.append(f"--load {load} holds no checkpoint yet: training starts from {start}")
    return True


def _save(draft: Draft) -> None:
    checkpoint = draft.checkpoint
    if checkpoint.save is None and checkpoint.save_interval is not None:
        save = str(Path(draft.logging.output_dir or "outputs") / "checkpoints")
        draft.checkpoint = replace(checkpoint, save=save)
        draft.notices.append(f"--save-interval without --save: checkpoints go to {save}")
    elif checkpoint.save is not None:
        path = Path(checkpoint.save)
        if path.exists() and not path.is_dir():
            draft.problems.append(f"--save {checkpoint.save}: is a file; name a directory")
        if checkpoint.save_interval is None:
            draft.notices.append("--save without --save-interval: only the last rollout is saved")
    if checkpoint.save is not None:
        draft.problems += template_problems("--save", checkpoint.save, accepted=())
    if checkpoint.save_hf is not None:
        draft.problems += template_problems("--save-hf", checkpoint.save_hf)
    if checkpoint.save_hf is not None and "{rollout_id}" not in checkpoint.save_hf:
        draft.notices.append(
            f"--save-hf {checkpoint.save_hf}: has no {{rollout_id}}, so each save replaces the one before"
        )
    if checkpoint.keep_checkpoints is not None and draft.checkpoint.save is None:
        draft.notices.append("--keep-checkpoints has no effect: nothing is saved; add --save and --save-interval")
