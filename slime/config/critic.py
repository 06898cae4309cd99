"""How the critic's configuration follows from the command line and the overrides of its role.

The critic is given the same command line as the actor, with its own overrides, and the same rules. Owns
what is different for every critic: it knows no KL and no distillation, its output layer is its own, and
its checkpoints lie beside the actor's. Tests hold: of a pair of checkpoints both are continued or neither.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.config.draft import Draft
from slime.config.families import MegatronConfig
from slime.config.roles import RoleConfig
from slime.config.rules.checkpoints import TRACKER_FILE, classify_checkpoint, weights_problems
from slime.config.sections import AlgorithmConfig, CheckpointConfig

CRITIC_DIR = "critic"
"""Directory of the critic's checkpoints below the actor's."""

WHERE = "--megatron-config-path"


def role_config(draft: Draft, megatron: MegatronConfig, actor: CheckpointConfig, own: dict[str, Any]) -> RoleConfig:
    """The critic's sections.

    Args:
        draft: The command line with the critic's overrides, after the rules; gets further problems.
        megatron: Megatron's values with the critic's overrides.
        actor: The actor's checkpoints, settled.
        own: The critic's overrides of the section ``checkpoint``.
    """
    values = {**megatron.values, "untie_embeddings_and_output_weights": True}
    checkpoint = _checkpoint(draft, actor, own)
    values |= {"load": checkpoint.load, "save": checkpoint.save, "no_save_optim": checkpoint.no_save_optim}
    return RoleConfig(
        train=draft.train,
        data=draft.data,
        algorithm=_algorithm(draft.algorithm),
        checkpoint=checkpoint,
        megatron=replace(megatron, values=values) if megatron.values else megatron,
    )


def _algorithm(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """The KL penalty reaches the critic in the returns, which are the actor's."""
    return replace(
        algorithm,
        kl_coef=0.0,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        use_opd=False,
        custom_advantage_function_path=None,
        use_routing_replay=False,
        use_rollout_routing_replay=False,
    )


def _checkpoint(draft: Draft, actor: CheckpointConfig, own: dict[str, Any]) -> CheckpointConfig:
    save = own.get("save") or (None if actor.save is None else str(Path(actor.save) / CRITIC_DIR))
    if save is not None and actor.save is None:
        draft.problems.append(f"{WHERE}: save {save} needs --save: actor and critic are saved together")
    if save is not None and actor.save is not None and Path(save).absolute() == Path(actor.save).absolute():
        draft.problems.append(f"{WHERE}: save {save} is the actor's --save; name another directory, or leave it out")
    load, step = _start(draft, actor, own)
    return replace(
        actor,
        load=load,
        ckpt_step=step,
        save=save,
        no_save_optim=own.get("no_save_optim", actor.no_save_optim),
        ref_load=None,
        save_hf=None,
        # The driver removes a critic's checkpoint after the actor's, without which it is of no use.
        keep_checkpoints=None,
        # Complete before the actor's, which makes the pair count, is even begun.
        async_save=False,
    )


def _start(draft: Draft, actor: CheckpointConfig, own: dict[str, Any]) -> tuple[str | None, int | None]:
    """Directory and iteration of the critic's first weights."""
    step = _iteration(actor)
    beside = None if step is None else str(Path(actor.load or "") / CRITIC_DIR)
    load: str | None = own.get("load")
    if actor.resume:
        assert step is not None, "what is resumed has an iteration"
        if "ckpt_step" in own:
            draft.problems.append(
                f"{WHERE}: ckpt_step cannot be given: the critic continues at the actor's iteration {step}"
            )
        load = load or beside
        _check_pair(draft, actor, str(load), step)
        return load, step
    if load is not None:
        kind = classify_checkpoint(load)
        if kind == "huggingface":
            draft.problems += weights_problems(draft, f"{WHERE}: load", load, own_head=True)
        if kind in ("megatron", "huggingface"):
            return load, own.get("ckpt_step")
        if load != own.get("save"):
            draft.problems.append(
                f"{WHERE}: load {load}: "
                + ("no such directory" if kind == "missing" else "holds neither a Megatron nor a Hugging Face model")
            )
    elif beside is not None and _has(beside, step):
        return beside, step
    return actor.load, actor.ckpt_step


def _iteration(actor: CheckpointConfig) -> int | None:
    """Iteration of the Megatron checkpoint that the actor starts from; None for other weights."""
    tracker = Path(actor.load or "") / TRACKER_FILE
    if actor.load is None or not tracker.is_file():
        return None
    if actor.ckpt_step is not None:
        return actor.ckpt_step
    text = tracker.read_text(encoding="utf-8").strip()
    return int(text) if text.isdigit() else None


def _has(root: str, step: int | None) -> bool:
    return step is not None and (Path(root) / f"iter_{step:07d}" / "metadata.json").is_file()


def _check_pair(draft: Draft, actor: CheckpointConfig, load: str, step: int) -> None:
    if _has(load, step):
        return
    pairs = sorted(
        int(entry.name.removeprefix("iter_"))
        for entry in Path(load).glob("iter_*")
        if entry.name.removeprefix("iter_").isdigit()
        and _has(load, int(entry.name.removeprefix("iter_")))
        and _has(actor.load or "", int(entry.name.removeprefix("iter_")))
    )
    either = f"--ckpt-step {pairs[-1]} continues a pair, " if pairs else ""
    draft.problems.append(
        f"--load {actor.load}: the actor was saved at iteration {step}, and {load} holds no critic of it; "
        f"{either}--finetune starts anew from the actor's weights"
    )
