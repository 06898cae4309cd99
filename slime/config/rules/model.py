"""The Hugging Face model directory."""

from __future__ import annotations

from slime.config.draft import Draft
from slime.config.hf import LOADABLE_MODEL_TYPES, read_hf_model
from slime.errors import ConfigError


def resolve_model(draft: Draft) -> None:
    """Read ``--hf-checkpoint`` and check that its family can be trained."""
    path = draft.rollout.hf_checkpoint
    if path is None:
        if "hf_checkpoint" not in draft.given:
            draft.problems.append(
                "--hf-checkpoint is missing; name a local Hugging Face model directory "
                "(it gives tokenizer, model configuration and the engines' weights)"
            )
        return
    try:
        draft.hf = read_hf_model(path)
    except ConfigError as error:
        draft.problems += error.problems
        return
    if draft.hf.model_type not in LOADABLE_MODEL_TYPES and draft.train.custom_model_provider_path is None:
        draft.problems.append(
            f"--hf-checkpoint {path}: Unsupported HuggingFace model type {draft.hf.model_type!r}; "
            f"supported are {', '.join(sorted(LOADABLE_MODEL_TYPES))}"
        )
