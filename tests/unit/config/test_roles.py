"""``--megatron-config-path`` and the critic's configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config import Config
from slime.config.roles import critic_config
from tests.unit.config.conftest import FakeMegatron, Run

PPO = "--advantage-estimator ppo"
Problems = Callable[..., list[str]]


@pytest.fixture
def roles(tmp_path: Path) -> Callable[[str], str]:
    """PPO's flags with a role file of this content."""

    def write(content: str) -> str:
        path = tmp_path / "roles.yaml"
        path.write_text(content)
        return f"{PPO} --megatron-config-path {path}"

    return write


def saved(root: Path, *iterations: int) -> Path:
    """A directory that looks like one of Megatron checkpoints."""
    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "metadata.json").write_text("{}")
    (root / "latest_checkpointed_iteration.txt").write_text(str(iterations[-1]))
    return root


def test_the_critic_has_the_actors_configuration_but_no_kl_and_a_head_of_its_own(run: Run) -> None:
    config = run(f"{PPO} --kl-coef 0.1 --value-clip 0.5 --lr 1e-5 --save-interval 1 --keep-checkpoints 2 --async-save")
    critic = critic_config(config)
    assert (config.role, critic.role, critic.critic) == ("actor", "critic", None)
    assert config.algorithm.kl_coef == 0.1
    assert (critic.algorithm.kl_coef, critic.algorithm.value_clip) == (0.0, 0.5)
    assert critic.megatron["lr"] == config.megatron["lr"] == "1e-5"
    assert critic.megatron.untie_embeddings_and_output_weights
    assert not config.megatron.untie_embeddings_and_output_weights
    assert critic.checkpoint.save == f"{config.checkpoint.save}/critic"
    assert critic.checkpoint.load == config.checkpoint.load
    assert critic.checkpoint.keep_checkpoints is None
    assert not critic.checkpoint.async_save  # complete before the actor's is begun
    assert (critic.cluster, critic.data) == (config.cluster, config.data)
    assert Config.from_json(config.to_json()) == config
    assert Config.from_json(critic.to_json()) == critic


def test_without_ppo_there_is_no_critic(run: Run, roles: Callable[[str], str]) -> None:
    file = roles("megatron: [{role: critic, overrides: {lr: 1}}, {role: actor, overrides: {lr: 2}}]")
    config = run(file.removeprefix(PPO) + " --num-critic-only-steps 3")
    assert config.critic is None
    assert config.megatron["lr"] == "2"
    notices = "\n".join(config.notices)
    assert "the overrides of the critic have no effect without --advantage-estimator ppo" in notices
    assert "--num-critic-only-steps 3 has no effect" in notices
    assert run("--debug-rollout-only " + PPO).critic is None


def test_each_role_overrides_the_command_line_for_itself(run: Run, roles: Callable[[str], str]) -> None:
    file = roles(
        """
megatron:
  - name: default
    role: actor
    overrides: {lr: 1e-6, entropy_coef: 0.01}
  - role: critic
    args:
      lr: 1e-5
      micro-batch-size: "4"
      value_clip: 1e-1
      tensor_model_parallel_size: 2
      recompute_activations: false
      num_nodes: 7
"""
    )
    config = run(f"{file} --micro-batch-size 2 --lr 1e-4 --recompute-activations")
    critic = critic_config(config)
    assert (config.megatron["lr"], critic.megatron["lr"]) == ("1e-6", "1e-5")
    assert (config.data.micro_batch_size, critic.data.micro_batch_size) == (2, 4)
    assert (config.algorithm.entropy_coef, critic.algorithm.entropy_coef) == (0.01, 0.0)
    assert critic.algorithm.value_clip == 0.1
    assert (config.megatron.tensor_model_parallel_size, critic.megatron.tensor_model_parallel_size) == (1, 2)
    assert config.megatron["recompute_activations"]
    assert critic.megatron.get("recompute_activations") is None


@pytest.mark.parametrize(
    ("content", "message"),
    {
        "no list": ("actor: {lr: 1}", "needs a top-level 'megatron' list"),
        "not a list": ("megatron: {role: actor}", "needs a top-level 'megatron' list"),
        "not YAML": ("megatron: [", "not YAML"),
        "no mapping": ("megatron: [actor]", "item 0: must be a mapping with role and overrides, found 'actor'"),
        "unknown role": ("megatron: [{role: critics}]", "unknown role 'critics'; did you mean critic?"),
        "no role": ("megatron: [{overrides: {lr: 1}}]", "unknown role None; roles are actor and critic"),
        "twice": ("megatron: [{role: critic}, {role: critic}]", "two items for the role critic"),
        "key of an item": ("megatron: [{role: critic, override: {}}]", "unknown key 'override'"),
        "both names": ("megatron: [{role: critic, overrides: {}, args: {}}]", "args is another name of overrides"),
        "no overrides": ("megatron: [{role: critic, overrides: 3}]", "overrides must be a mapping"),
        "misspelt": ("megatron: [{role: critic, overrides: {micro_batchsize: 3}}]", "did you mean micro_batch_size"),
        "unheard of": ("megatron: [{role: critic, overrides: {xyzzy: 3}}]", "unknown name xyzzy; see docs/flags.md"),
        "whole run": (
            "megatron: [{role: critic, overrides: {rollout_batch_size: 3}}]",
            "critic: --rollout-batch-size concerns the whole run; give it as a flag",
        ),
        "actor's": (
            "megatron: [{role: critic, overrides: {entropy_coef: 3}}]",
            "--entropy-coef concerns the whole run",
        ),
        "wrong type": (
            "megatron: [{role: critic, overrides: {micro_batch_size: few}}]",
            "micro_batch_size must be int",
        ),
        "out of range": ("megatron: [{role: critic, overrides: {value_clip: -1}}]", "--value-clip must be at least 0"),
        "critic's Megatron": ("megatron: [{role: critic, overrides: {lr: bad}}]", "critic: --lr: bad value"),
    }.values(),
)
def test_what_is_wrong_is_named(problems: Problems, roles: Callable[[str], str], content: str, message: str) -> None:
    assert any(message in problem for problem in problems(roles(content)))


def test_all_problems_are_reported_together(problems: Problems, roles: Callable[[str], str]) -> None:
    file = roles("megatron: [{role: critik}, {role: critic, overrides: {micro_batch_size: 0, lr: bad}}]")
    found = problems(f"{file} --n-samples-per-prompt 0 --no-such-flag")
    for part in ("critik", "--micro-batch-size must be at least 1", "--n-samples-per-prompt", "--no-such-flag"):
        assert sum(part in problem for problem in found) == 1, (part, found)
    assert sum("--lr: bad value" in problem for problem in found) == 1


def test_plugins_of_the_critic_are_checked_too(problems: Problems, roles: Callable[[str], str]) -> None:
    def check(config: Config) -> list[str]:
        return (
            [f"cannot load {config.train.custom_megatron_init_path}"] if config.train.custom_megatron_init_path else []
        )

    file = roles("megatron: [{role: critic, overrides: {custom_megatron_init_path: mine.py}}]")
    assert problems(file, preflights=(check,)) == ["critic: cannot load mine.py"]


def test_ppo_without_returns_is_refused(problems: Problems) -> None:
    (problem,) = problems(f"{PPO} --disable-compute-advantages-and-returns")
    assert "trains a critic on returns" in problem


def test_a_resumed_critic_is_the_one_saved_with_the_actor(run: Run, problems: Problems, tmp_path: Path) -> None:
    root = saved(tmp_path / "ckpt", 3, 5)
    (problem,) = problems(f"{PPO} --load {root}")
    assert f"the actor was saved at iteration 5, and {root}/critic holds no critic of it; --finetune" in problem
    # A save was killed after the critic's part of iteration 7 and before the actor's.
    saved(root / "critic", 5, 7)
    checkpoint = critic_config(run(f"{PPO} --load {root}")).checkpoint
    assert (checkpoint.load, checkpoint.ckpt_step, checkpoint.resume) == (f"{root}/critic", 5, True)
    (problem,) = problems(f"{PPO} --load {root} --ckpt-step 3")
    assert "iteration 3" in problem
    assert "--ckpt-step 5 continues a pair" in problem
    # Weights only: the critic's own if there are any, else the actor's under a fresh head.
    checkpoint = critic_config(run(f"{PPO} --load {root} --finetune", megatron=WithFinetune())).checkpoint
    assert (checkpoint.load, checkpoint.ckpt_step, checkpoint.resume) == (f"{root}/critic", 5, False)
    checkpoint = critic_config(run(f"{PPO} --load {root} --ckpt-step 3 --finetune", megatron=WithFinetune())).checkpoint
    assert (checkpoint.load, checkpoint.ckpt_step, checkpoint.resume) == (str(root), 3, False)


def test_own_directories_of_the_critic(
    run: Run, problems: Problems, roles: Callable[[str], str], tmp_path: Path, model_dir: Path
) -> None:
    own = saved(tmp_path / "values", 4)
    overrides = f"load: {own}, ckpt_step: 4, save: {tmp_path}/elsewhere, no_save_optim: true"
    file = roles(f"megatron: [{{role: critic, overrides: {{{overrides}}}}}]")
    config = run(f"{file} --save {tmp_path}/ckpt")
    checkpoint = critic_config(config).checkpoint
    assert (checkpoint.load, checkpoint.ckpt_step, checkpoint.resume) == (str(own), 4, False)
    assert (checkpoint.save, checkpoint.no_save_optim) == (f"{tmp_path}/elsewhere", True)
    assert (config.checkpoint.load, config.checkpoint.no_save_optim) == (str(model_dir), False)
    file = roles(f"megatron: [{{role: critic, overrides: {{save: {tmp_path}/ckpt, load: {tmp_path}/none}}}}]")
    found = problems(f"{file} --save {tmp_path}/ckpt")
    assert any("is the actor's --save" in problem for problem in found)
    assert any("no such directory" in problem for problem in found)
    assert any("needs --save" in problem for problem in problems(file))


class WithFinetune(FakeMegatron):
    NAMES = FakeMegatron.NAMES | {"--finetune"}
