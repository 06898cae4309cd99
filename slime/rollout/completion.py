"""One completion: prompt ids and sampling parameters in, token ids with log-probs out.

Owns the request and the reading of its reply, for the single-turn function and for
``generate_single`` alike. Nothing that the engine produced is tokenised again. Tests hold the
budget arithmetic and the refusal of replies whose columns do not fit.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from slime.data.templates import render_prompt
from slime.errors import DataError, EngineError
from slime.observability.trace import trace_span
from slime.replay_data import decode_int32
from slime.rollout.context import RolloutContext, RolloutTurn
from slime.rollout.continuation import Completion, Draft
from slime.rollout.faults import BadReplyError
from slime.rollout.replies import read_output
from slime.rollout.stops import StopConditions
from slime.types import Sample

__all__ = [
    "Completion", "complete", "prompt_token_ids", "render_ids", "request_seed", "template_kwargs", "token_budget",
]  # fmt: skip

ROUTING_HEADER = "X-SMG-Routing-Key"
KEYED_POLICIES = ("consistent_hashing", "manual")
"""Policies of the router that keep the requests of one key on one engine."""
TRACED = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_time", "e2e_latency", "decode_throughput")


def prompt_token_ids(context: RolloutContext, sample: Sample) -> list[int]:
    """Ids of a sample's prompt: text as it is, a message list through the chat template.

    Raises:
        DataError: A message list without a chat template, or a multimodal prompt.
    """
    if sample.multimodal_inputs:
        raise DataError(
            f"sample {sample.index} has {', '.join(sample.multimodal_inputs)}; the built-in generate function sends "
            "text only. Give a --custom-generate-function-path that encodes them, or drop --multimodal-keys"
        )
    if isinstance(sample.prompt, str):
        return context.tokenizer.encode(sample.prompt, add_special_tokens=False)
    return render_ids(context, sample, sample.prompt)


def render_ids(context: RolloutContext, sample: Sample, messages: list[dict[str, Any]]) -> list[int]:
    """Ids of a message list with the generation prompt at its end."""
    kwargs = template_kwargs(context.args, sample)
    text = render_prompt(messages, context.tokenizer, sample.metadata.get("tools"), kwargs)
    return context.tokenizer.encode(text, add_special_tokens=False)


def template_kwargs(args: Any, sample: Sample) -> dict[str, Any]:
    """Keywords of the chat template: the flag's, overridden by the sample's."""
    return {**args.apply_chat_template_kwargs, **sample.apply_chat_template_kwargs}


def token_budget(context: RolloutContext, num_input_ids: int, max_new_tokens: int) -> int:
    """Tokens that may be generated after ``num_input_ids``; not above 0 when the context is full."""
    max_context_len = context.turn.max_context_len
    return max_new_tokens if max_context_len is None else min(max_new_tokens, max_context_len - num_input_ids)


async def complete(
    context: RolloutContext,
    sample: Sample,
    input_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    *,
    routes_from: int = 0,
) -> Completion:
    """Ask the engines for one completion; what is aborted for a weight update is continued on the new weights.

    Where sampling cuts the distribution, a training request asks for the kept tokens too, and the log-probs are those
    of the cut distribution: what training computes with the same tokens kept.

    Args:
        context: The rollout's handle.
        sample: Its session id routes the request.
        input_ids: ``[n]`` prompt ids.
        sampling_params: In the engine's names, ``max_new_tokens`` among them.
        routes_from: Leading tokens whose routed experts are known already.

    Returns:
        The completion; its finish type is ``abort`` if the rollout ends what still runs, or an engine refuses.

    Raises:
        EngineError: The engine refused, or its reply does not fit together.
        WaitTimeoutError: No engine answered.
    """
    turn = context.turn
    params = {k: v for k, v in sampling_params.items() if v is not None}
    stops = StopConditions.of(params, context.end_token_ids, context.tokenizer)
    draft = Draft(input_ids, params, stops, routes_from=routes_from)
    while True:
        draft.add(await _request(context, turn, sample, draft))
        # Whoever ends the rollout says so before it aborts; every other abort is for new weights. An engine that is
        # paused for them holds the request until it goes on.
        if turn.aborted or not draft.is_interrupted:
            return draft.completion()


async def _request(context: RolloutContext, turn: RolloutTurn, sample: Sample, draft: Draft) -> Completion:
    """Send one request and read its reply."""
    args, input_ids, params = context.args, draft.input_ids, draft.params
    params["sampling_seed"] = _seed(args, sample, draft, evaluation=turn.evaluation)
    payload: dict[str, Any] = {"input_ids": input_ids, "sampling_params": params, "return_logprob": True}
    replay = {} if turn.evaluation else _replay_fields(args, params, draft.routes_from)
    base_url = None
    if replay:
        # The router drops these fields, so such requests go straight to a worker; the session
        # decides which one, for the sake of its prefix cache.
        workers = await context.client.healthy_worker_urls()
        base_url = workers[zlib.crc32((sample.session_id or "").encode()) % len(workers)]
    headers = None
    if sample.session_id and args.router_policy in KEYED_POLICIES:
        headers = {ROUTING_HEADER: sample.session_id}
    with trace_span(sample, "sglang_generate") as span:
        read = partial(_read_reply, args, replay, params.get("max_new_tokens"))
        completion = await context.client.generate_and_read(payload | replay, read, headers=headers, base_url=base_url)
        span.update({name: completion.meta_info[name] for name in TRACED if name in completion.meta_info})
    return completion


def _seed(args: Any, sample: Sample, draft: Draft, *, evaluation: bool) -> int:
    """Seed of the next request: the caller's for an output's first part, and one that depends on it for the others."""
    given = draft.params.get("sampling_seed")
    if given is not None and not draft.output_ids:
        return given
    base = args.rollout_seed if given is None else given
    return request_seed(base, sample, len(draft.input_ids), evaluation=evaluation)


def _replay_fields(args: Any, params: Mapping[str, Any], routes_from: int) -> dict[str, Any]:
    """What a training request asks for besides, so that training can repeat the engine's choices."""
    fields: dict[str, Any] = {}
    if args.use_rollout_routing_replay:
        fields["return_routed_experts"] = True
        fields["routed_experts_start_len"] = routes_from
    if params.get("top_p", 1.0) != 1.0 or params.get("top_k", -1) != -1 or params.get("min_p", 0.0) > 0.0:
        fields["return_sampling_mask"] = True
    return fields


def request_seed(rollout_seed: int, sample: Sample, num_input_ids: int, *, evaluation: bool) -> int:
    """Seed of one request, the same in every run and after a resume, whenever and wherever it is served.

    Samples are told apart by their index, which counts on over the whole run, and the requests of one
    sample (turns, continuations) by how much stands before them. Engines that draw from one common
    stream of random numbers ignore it.
    """
    key = f"{rollout_seed}/{sample.index}/{num_input_ids}/{evaluation}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def _read_reply(
    args: Any, replay: Mapping[str, Any], max_new_tokens: int | None, reply: Mapping[str, Any]
) -> Completion:
    meta: dict[str, Any] = dict(reply["meta_info"])
    # Pairs without the ids of top candidates, once read, would only be carried along.
    triples = meta.pop("output_token_logprobs", None)
    if _lacks_records(meta, triples, replay):  # aborted in the queue: the output is asked for again
        return Completion([], [], "", meta)
    token_ids, log_probs = read_output(reply, max_new_tokens=max_new_tokens)
    if "return_sampling_mask" in replay and token_ids:
        log_probs = _read_kept_tokens(args, meta, len(token_ids))
    if "return_routed_experts" in replay and (token_ids or meta.get("routed_experts") is not None):
        _read_routes(args, meta, replay["routed_experts_start_len"])
    return Completion(token_ids, log_probs, str(reply.get("text") or ""), meta)


def _lacks_records(meta: Mapping[str, Any], triples: Any, replay: Mapping[str, Any]) -> bool:
    """Whether an aborted answer comes without what training needs of its tokens."""
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or cast("dict[str, Any]", reason).get("type") != "abort":
        return False
    mask = meta.get("output_token_sampling_mask")
    routes = meta.get("routed_experts")
    return (
        triples is None
        or ("return_sampling_mask" in replay and mask is None)
        or ("return_routed_experts" in replay and routes is None)
    )


def _read_kept_tokens(args: Any, meta: dict[str, Any], count: int) -> list[float]:
    """Bring kept token sets into ``Sample``'s form; return the log-probs of the cut distribution."""
    mask = meta.pop("output_token_sampling_mask", None)
    log_probs = meta.pop("output_token_sampling_logprobs", None)
    if mask is None or log_probs is None:
        raise EngineError(
            "the engine returned no sampling mask with log-probs, which training with --rollout-top-p "
            f"{args.rollout_top_p} and --rollout-top-k {args.rollout_top_k} needs; use --rollout-top-p 1.0 and "
            "--rollout-top-k -1, or an engine with return_sampling_mask"
        )
    if len(mask) != count or len(log_probs) != count:
        raise BadReplyError(
            f"the engine answered {len(mask)} sampling masks and {len(log_probs)} log-probs with {count} tokens"
        )
    meta["top_p_token_ids"] = [i for row in mask for i in row]
    meta["top_p_token_offsets"] = np.cumsum([0, *(len(row) for row in mask)]).tolist()
    return [float(p) for p in log_probs]


def _read_routes(args: Any, meta: dict[str, Any], start: int) -> None:
    """Bring routed experts into ``Sample``'s form."""
    if meta.get("routed_experts") is None:
        raise EngineError(
            "the engine returned no routed experts, which --use-rollout-routing-replay needs; drop that flag for a "
            "model without experts, or use an engine with return_routed_experts"
        )
    rows = decode_int32(meta["routed_experts"])
    if rows.size % (args.num_layers * args.moe_router_topk):
        raise EngineError(
            f"the engine answered {rows.size} routed experts, no multiple of --num-layers {args.num_layers} x "
            f"--moe-router-topk {args.moe_router_topk}; the engine's model is not the one that is trained"
        )
    meta["routed_experts"] = rows.reshape(-1, args.num_layers, args.moe_router_topk)
    meta["routed_experts_start_len"] = start
