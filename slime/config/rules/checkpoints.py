"""Initial and reference weights, resuming, saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from slime.config.draft import Draft
from slime.config.hf import LOADABLE_MODEL_TYPES, normalize_config, read_config_json
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
    elif needs_reference and draft.rollout.hf_checkpoint is not None:
        flag = "--use-kl-loss" if algorithm.use_kl_loss else "--kl-coef"
        draft.checkpoint = replace(checkpoint, ref_load=draft.rollout.hf_checkpoint)
        draft.notices.append(
            f"{flag} without --ref-load: the reference is the initial weights of --hf-checkpoint "
            f"{draft.rollout.hf_checkpoint}"
        )


def _load(draft: Draft) -> None:
    """Follow the established order: a Megatron checkpoint resumes; else start from given weights."""
    checkpoint = draft.checkpoint
    start = checkpoint.ref_load or draft.rollout.hf_checkpoint
    if checkpoint.load is None:
        draft.checkpoint = replace(checkpoint, load=start)
        return
    kind = classify_checkpoint(checkpoint.load)
    if kind in ("megatron", "huggingface"):
        draft.checkpoint = replace(checkpoint, resume=kind == "megatron")
        return
    same = checkpoint.save is not None and Path(checkpoint.save).absolute() == Path(checkpoint.load).absolute()
    if kind == "missing" and not same:
        draft.problems.append(
            f"--load {checkpoint.load}: no such directory; name a checkpoint, or leave --load out to start from "
            "--ref-load or --hf-checkpoint (a directory that does not exist yet is accepted when --save names it too)"
        )
        return
    draft.checkpoint = replace(checkpoint, load=start)
    draft.notices.append(f"--load {checkpoint.load} holds no checkpoint yet: training starts from {start}")


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
    if checkpoint.save_hf is not None and "{rollout_id}" not in checkpoint.save_hf:
        draft.notices.append(
            f"--save-hf {checkpoint.save_hf}: has no {{rollout_id}}, so each save replaces the one before"
        )
    if checkpoint.keep_checkpoints is not None and draft.checkpoint.save is None:
        draft.notices.append("--keep-checkpoints has no effect: nothing is saved; add --save and --save-interval")
