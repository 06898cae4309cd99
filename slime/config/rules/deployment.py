"""Several engine groups, models and kinds of engines: ``--sglang-config`` and ``--prefill-num-servers``.

``resolve_deployment`` runs before processes are counted and ``check_deployment`` after the engine was chosen.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from slime.config.deployment import ModelDeployment, ServerGroup, read_deployment
from slime.config.draft import Draft
from slime.config.engine_plan import DEFAULT_MODEL, gets_weights
from slime.config.rules.checkpoints import weights_problems
from slime.errors import ConfigError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_deployment(draft: Draft) -> None:
    """Read the deployment file; without ``--rollout-num-gpus`` it says how many GPUs generate."""
    engine = draft.engine
    shortcuts = [
        flag
        for flag, value in (
            ("--prefill-num-servers", engine.prefill_num_servers),
            ("--sglang-config", engine.sglang_config),
        )
        if value is not None
    ]
    if len(shortcuts) == 2:
        draft.problems.append("--prefill-num-servers and --sglang-config exclude each other")
    if shortcuts and draft.rollout.rollout_external_engine_addrs is not None:
        draft.problems.append(
            f"{' and '.join(shortcuts)} and --rollout-external-engine-addrs exclude each other: engines that already "
            "run are grouped by what they are"
        )
        return
    if engine.sglang_config is None or draft.debug.debug_train_only:
        return
    draft.deployment = read_deployment(engine.sglang_config, draft.problems)
    total = sum(model.num_gpus for model in draft.deployment)
    found = draft.cluster.rollout_num_gpus
    if not draft.deployment:
        return
    if found is not None and found != total:
        draft.problems.append(
            f"--sglang-config {engine.sglang_config}: its groups have {total} GPUs in total, --rollout-num-gpus is "
            f"{found}; make them equal or leave the flag out"
        )
    draft.cluster = replace(draft.cluster, rollout_num_gpus=total)


def check_deployment(draft: Draft) -> None:
    """Expand ``--prefill-num-servers`` and check every group."""
    if draft.debug.debug_train_only:
        return
    if draft.engine.prefill_num_servers is not None and not draft.deployment:
        draft.deployment = _prefill_and_decode(draft)
    for model in draft.deployment:
        _check_model(draft, model)
        _check_path(draft, model)
    hf_checkpoint = draft.rollout.hf_checkpoint
    frozen = [model for model in draft.deployment if not gets_weights(model, hf_checkpoint)]
    if draft.deployment and len(frozen) == len(draft.deployment) and not draft.debug.debug_rollout_only:
        draft.problems.append(
            "--sglang-config: no model gets the trainer's weights; set update_weights: true on the one that is "
            "trained, or leave its model_path out"
        )
    for model in frozen:
        if model.update_weights is None:
            draft.notices.append(
                f"model {model.name} is served from {model.model_path}, not --hf-checkpoint, so it keeps its weights; "
                "update_weights in --sglang-config says so or changes it"
            )


def _prefill_and_decode(draft: Draft) -> tuple[ModelDeployment, ...]:
    servers, cluster = draft.engine.prefill_num_servers or 0, draft.cluster
    per_engine = cluster.rollout_num_gpus_per_engine
    total = cluster.rollout_num_gpus or 0
    prefill, flag = servers * per_engine, f"--prefill-num-servers {servers}"
    if total - prefill < 1:
        draft.problems.append(
            f"{flag} of {per_engine} GPUs each leave no GPU of --rollout-num-gpus {total} for "
            "decode engines; raise the latter"
        )
        return ()
    groups = (
        ServerGroup(worker_type="prefill", num_gpus=prefill, num_gpus_per_engine=per_engine, place=flag),
        ServerGroup(worker_type="decode", num_gpus=total - prefill, num_gpus_per_engine=per_engine, place=flag),
    )
    return (ModelDeployment(name=DEFAULT_MODEL, server_groups=groups),)


def _check_model(draft: Draft, model: ModelDeployment) -> None:
    types = model.worker_types
    where = f"model {model.name}"
    if "prefill" in types or "decode" in types:
        missing = sorted({"prefill", "decode"} - types)
        if missing:
            draft.problems.append(f"{where}: prefill and decode groups need each other; it has no {missing[0]} group")
        if "regular" in types:
            draft.problems.append(
                f"{where}: its router sends requests to prefill and decode engines only, so a regular group would "
                "stay idle; list it as a model of its own"
            )
        _check_replay(draft, where)
    elif "encoder" in types and "regular" not in types:
        draft.problems.append(f"{where}: an encoder group needs prefill or regular engines that use it")
    elif "regular" not in types:
        draft.problems.append(f"{where}: it has placeholders only, so nothing could answer; add a regular group")
    for group in model.server_groups:
        _check_group(draft, where, group)


def _check_path(draft: Draft, model: ModelDeployment) -> None:
    """A model's own weights: they are there, and those of the trained model where they are to be replaced by them."""
    if model.model_path is None:
        return
    where = f"--sglang-config {draft.engine.sglang_config}: model {model.name}: model_path"
    path, is_sglang = Path(model.model_path), draft.engine.rollout_backend == "sglang"
    if not path.exists():
        if not (is_sglang and _HUB_NAME.fullmatch(model.model_path)):
            draft.problems.append(f"{where} {path}: does not exist; name a Hugging Face model directory")
    elif path.is_dir() or not is_sglang:  # SGLang reads some models from one file
        try:
            differing = weights_problems(draft, where, model.model_path)
        except ConfigError as error:
            draft.problems += [f"{where} {path}: {problem}" for problem in error.problems]
        else:
            draft.problems += differing if model.update_weights else []


def _check_replay(draft: Draft, where: str) -> None:
    """Requests for what the engine chose go past the router, and only a regular engine serves such a request."""
    rollout = draft.rollout
    needs = "--use-rollout-routing-replay" if draft.algorithm.use_rollout_routing_replay else None
    if rollout.rollout_top_p != 1.0:
        needs = f"--rollout-top-p {rollout.rollout_top_p:g}"
    elif rollout.rollout_top_k > 0:
        needs = f"--rollout-top-k {rollout.rollout_top_k}"
    if needs is not None:
        draft.problems.append(
            f"{where}: {needs} asks engines for more than the router passes on, which takes engines that prefill and "
            "decode; use regular groups"
        )


def _check_group(draft: Draft, where: str, group: ServerGroup) -> None:
    if group.worker_type == "placeholder":
        return
    per_engine = group.per_engine(draft.cluster.rollout_num_gpus_per_engine)
    place = f"{where}, {group.worker_type} group"
    if group.num_gpus % per_engine:
        draft.problems.append(f"{place}: num_gpus {group.num_gpus} is not a multiple of its {per_engine} per engine")
    per_node = draft.cluster.num_gpus_per_node
    if per_engine > per_node and per_engine % per_node:
        draft.problems.append(
            f"{place}: an engine of {per_engine} GPUs spans nodes, so that must be a multiple of "
            f"--num-gpus-per-node {per_node}"
        )
    if draft.engine.rollout_backend != "embedded":
        return
    if group.worker_type != "regular":
        draft.problems.append(
            f"{place}: the embedded engine has no {group.worker_type} form; use --rollout-backend sglang, or regular"
        )
    if per_engine != 1:
        draft.problems.append(f"{place}: {per_engine} GPUs per engine, but the embedded engine runs in one process")
