"""Configurations and models for tests of the training backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.backends.megatron import cpu

cpu.install()

import torch  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402

from slime.backends.megatron import parallel  # noqa: E402
from slime.backends.megatron.args import MegatronFlagFamily  # noqa: E402
from slime.backends.megatron.export import load_hf  # noqa: E402
from slime.backends.megatron.model import build_model  # noqa: E402
from slime.backends.megatron.parallel import ParallelState  # noqa: E402
from slime.config import Config, MegatronContext  # noqa: E402
from slime.config.critic import role_config  # noqa: E402
from slime.config.draft import Draft, Surroundings  # noqa: E402
from slime.config.hf import read_hf_model  # noqa: E402
from slime.config.roles import critic_config  # noqa: E402
from tests.support.checkpoints import with_start_settled  # noqa: E402
from tests.support.gloo import Rank, free_port  # noqa: E402


def make_config(
    model_dir: str | Path, megatron_argv: Sequence[str] = (), *, num_processes: int = 1, **sections: dict[str, Any]
) -> Config:
    """A resolved configuration for training a checkpoint on the CPU, its start settled as by the command line.

    Args:
        model_dir: Hugging Face directory.
        megatron_argv: Megatron's tokens.
        num_processes: Training processes.
        **sections: Per section of ``Config`` the fields to replace, e.g. ``train={"precision": "bf16"}``.
    """
    defaults = {
        "cluster": {"device": "cpu", "actor_num_gpus_per_node": num_processes, "distributed_timeout_minutes": 1},
        "train": {"precision": "fp32"},
        "data": {"num_rollout": 4},
    }
    base = Config(hf=read_hf_model(str(model_dir)))
    changed = {
        name: replace(getattr(base, name), **{**defaults.get(name, {}), **sections.get(name, {})})
        for name in {*defaults, *sections}
    }
    config = with_start_settled(replace(base, **changed), megatron_argv)
    context = MegatronContext(
        hf=config.hf,
        cluster=config.cluster,
        train=config.train,
        data=config.data,
        rollout=config.rollout,
        algorithm=config.algorithm,
        checkpoint=config.checkpoint,
    )
    return replace(config, megatron=MegatronFlagFamily().parse(list(megatron_argv), context))


def make_critic_config(
    model_dir: str | Path, megatron_argv: Sequence[str] = (), *, num_processes: int = 1, **sections: dict[str, Any]
) -> Config:
    """As ``make_config``, for the critic of a PPO run on the same command line."""
    algorithm = {"advantage_estimator": "ppo"} | sections.pop("algorithm", {})
    config = make_config(model_dir, megatron_argv, num_processes=num_processes, algorithm=algorithm, **sections)
    draft = Draft(
        surroundings=Surroundings(), **{name: getattr(config, name) for name in ("train", "data", "algorithm")}
    )
    critic = role_config(draft, config.megatron, config.checkpoint, {})
    assert not draft.problems
    return critic_config(replace(config, critic=critic))


def start(config: Config, rank: Rank | None = None) -> ParallelState:
    """Join the ranks, or start a group of one."""
    rank = rank or Rank(0, 1, free_port())
    return parallel.initialize(
        config, rank=rank.rank, world_size=rank.world_size, master_addr="127.0.0.1", master_port=rank.port
    )


def place(**changes: Any) -> ParallelState:
    """One rank of a layout; no process group is needed to cut rows."""
    sizes = dict.fromkeys(("tp", "pp", "dp", "cp", "ep"), 1)
    values: dict[str, Any] = {"rank": 0, "world_size": 1, "device": torch.device("cpu"), "vpp_size": 1}
    values |= {f"{name}_{kind}": size - (kind == "rank") for name, size in sizes.items() for kind in ("rank", "size")}
    values |= dict.fromkeys(("tp_group", "pp_group", "dp_group", "cp_group", "dp_cp_group"))
    return ParallelState(**(values | changes))


def loaded_model(config: Config, state: ParallelState, *, wrap_with_ddp: bool = False) -> list[MegatronModule]:
    """The configured model with the weights of its checkpoint."""
    assert config.hf is not None
    path = config.hf.path
    return build_model(
        config, parallel=state, pre_wrap=lambda chunks: load_hf(chunks, config, path), wrap_with_ddp=wrap_with_ddp
    )
