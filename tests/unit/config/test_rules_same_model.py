"""Weights that a flag names must be of the model that is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import QWEN3, Run, write_model


@pytest.mark.parametrize("flag", ["--load", "--ref-load"])
def test_weights_of_another_model_are_refused(
    run: Run, problems: Callable[..., list[str]], tmp_path: Path, model_dir: Path, flag: str
) -> None:
    # What is not written down means the same as what is written down as neutral.
    same = write_model(tmp_path / "same", {**QWEN3, "rope_scaling": None, "n_group": 1, "mlp_only_layers": []})
    run(f"{flag} {same}")
    other = write_model(tmp_path / "other", {**QWEN3, "hidden_size": 64, "head_dim": 16})
    (problem,) = problems(f"{flag} {other}")
    assert problem == (
        f"{flag} {other}: weights of another model than --hf-checkpoint {model_dir}: hidden_size 64 (there: 32), "
        "head_dim 16 (there: 8); name weights of that model, or this directory as --hf-checkpoint"
    )


def test_a_critic_may_start_from_a_model_with_another_head(run: Run, tmp_path: Path) -> None:
    reward_model = write_model(tmp_path / "reward", {**QWEN3, "tie_word_embeddings": False})
    file = tmp_path / "roles.yaml"
    file.write_text(f"megatron: [{{role: critic, overrides: {{load: {reward_model}}}}}]")
    config = run(f"--advantage-estimator ppo --megatron-config-path {file}")
    assert config.critic is not None
    assert config.critic.checkpoint.load == str(reward_model)


def test_a_critic_of_another_shape_is_refused(problems: Callable[..., list[str]], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", {**QWEN3, "num_hidden_layers": 3})
    file = tmp_path / "roles.yaml"
    file.write_text(f"megatron: [{{role: critic, overrides: {{load: {other}}}}}]")
    (problem,) = problems(f"--advantage-estimator ppo --megatron-config-path {file}")
    assert f"critic: --megatron-config-path: load {other}: weights of another model" in problem
    assert "num_hidden_layers 3 (there: 2)" in problem
