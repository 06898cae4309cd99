"""Engines that already run: asked before anything starts, and held against this command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slime.config.draft import Draft
from slime.config.engine_flags import SGLANG_SECRETS
from slime.config.external import ExternalEngine, external_url, is_address, read_external
from slime.config.flags import words
from slime.config.sglang_checks import stage_problems
from slime.errors import SlimeError

_FLAG = "--rollout-external-engine-addrs"
_OWN_BUSINESS = frozenset({"host", "log_level", "log_level_http", *SGLANG_SECRETS})
"""Engine arguments that may differ without changing an answer."""


def resolve_external_engines(draft: Draft) -> None:
    """Ask every engine what it is; the answers say how many GPUs generate."""
    addresses = draft.rollout.rollout_external_engine_addrs
    if addresses is None or draft.debug.debug_train_only:
        return
    if draft.cluster.colocate:
        draft.problems.append(f"{_FLAG} and --colocate exclude each other: those engines have GPUs of their own")
    draft.problems += [
        f"{_FLAG} {address}: not HOST:PORT (port 1 to 65535), optionally with http:// or https:// in front"
        for address in addresses
        if not is_address(address)
    ]
    urls = [external_url(address) for address in addresses if is_address(address)]
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        draft.problems.append(f"{_FLAG} names {url} {urls.count(url)} times")
    _ask(draft, list(dict.fromkeys(urls)))
    _count(draft)


def _ask(draft: Draft, urls: list[str]) -> None:
    query = draft.surroundings.query_engines
    assert query is not None, "the caller of parse() gives no way to ask engines"
    for url, answer in zip(urls, query(urls), strict=True):
        if isinstance(answer, SlimeError):  # which names the address
            draft.problems.append(f"{_FLAG}: {answer}; start it first, or correct the address")
            continue
        try:
            draft.external_engines += (read_external(url, answer),)
            draft.external_info[url] = answer
        except ValueError as error:
            draft.problems.append(f"{_FLAG} {url}: {error}; start it first, or correct the address")


def _count(draft: Draft) -> None:
    engines = draft.external_engines
    sizes = sorted({engine.num_gpus for engine in engines})
    total = sum(engine.num_gpus for engine in engines)
    cluster, given = draft.cluster, draft.given
    if not engines:
        return
    if "rollout_num_gpus" in given and cluster.rollout_num_gpus != total:
        draft.problems.append(
            f"--rollout-num-gpus {cluster.rollout_num_gpus}: the engines of {_FLAG} have {total}; leave it out"
        )
    if "rollout_num_gpus_per_engine" in given:
        draft.problems += [
            f"--rollout-num-gpus-per-engine {cluster.rollout_num_gpus_per_engine}: {engine.url} has {engine.num_gpus}"
            for engine in engines
            if engine.num_gpus != cluster.rollout_num_gpus_per_engine
        ]
    backends = sorted({engine.backend for engine in engines})
    if len(backends) > 1:
        draft.problems.append(f"{_FLAG}: engines of different kinds, {' and '.join(backends)}; use one kind")
    backend = draft.engine.rollout_backend
    if backend == "auto":
        draft.engine = replace(draft.engine, rollout_backend=backends[0])
    elif backends != [backend]:
        draft.problems.append(f"--rollout-backend {backend}: the engines of {_FLAG} are {' and '.join(backends)}")
    if cluster.offload_rollout or cluster.offload:
        draft.notices.append(f"--offload-rollout has no effect: the engines of {_FLAG} share no GPU with the trainer")
    draft.cluster = replace(
        cluster, rollout_num_gpus=total, rollout_num_gpus_per_engine=sizes[0], offload=False, offload_rollout=False
    )


def check_external_engines(draft: Draft, values: Mapping[str, Any]) -> None:
    """Report everything in which an engine differs from this command line, for all engines together.

    Args:
        draft: With the engines' answers; gets the problems.
        values: The engine's values that the user gave, by attribute name.
    """
    for engine in draft.external_engines:
        found = _differences(draft, engine, draft.external_info[engine.url], values)
        if found:
            draft.problems.append(
                f"{engine.url} does not fit this command line: {'; '.join(found)}. Start it with the same settings, "
                "or change them here"
            )
        draft.problems += [f"{engine.url}: {p}" for p in stage_problems(draft, draft.external_info[engine.url])]
    types = {engine.worker_type for engine in draft.external_engines}
    if types & {"prefill", "decode"} and types != {"prefill", "decode"}:
        draft.problems.append(f"{_FLAG}: prefill and decode engines need each other and nothing else, found {types}")


def _differences(draft: Draft, engine: ExternalEngine, info: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    model = draft.rollout.hf_checkpoint
    if model is not None and os.path.realpath(model) != os.path.realpath(engine.model_path):
        found.append(f"it serves {engine.model_path}, --hf-checkpoint is {model}")
    wants_routes = draft.algorithm.use_rollout_routing_replay and engine.backend == "sglang"
    if wants_routes and not info.get("enable_return_routed_experts"):
        found.append("it returns no routed experts, which --use-rollout-routing-replay needs")
    for name, value in values.items():
        if name in _OWN_BUSINESS or name not in info or info[name] == value:
            continue
        found.append(f"it has {name} {words(info[name])}, --sglang-{name.replace('_', '-')} is {words(value)}")
    return found
