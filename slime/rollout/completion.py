"""One completion: prompt ids and sampling parameters in, token ids with log-probs out.

Owns the request and the reading of its reply, for the single-turn function and for
``generate_single`` alike. Nothing that the engine produced is tokenised again. Tests hold the
budget arithmetic and the refusal of replies whose columns do not fit.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.data.templates import render_prompt
from slime.errors import DataError, EngineError
from slime.observability.trace import trace_span
from slime.rollout.context import RolloutContext
from slime.types import Sample

ROUTING_HEADER = "X-SMG-Routing-Key"
TRACED = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_time", "e2e_latency", "decode_throughput")


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine generated.

    Args:
        token_ids: ``[n]`` ids, the stop token included.
        log_probs: ``[n]`` log-probs of them.
        text: The engine's text.
        meta_info: The rest of the reply, with top-p sets and routed experts in ``Sample``'s form.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    meta_info: Mapping[str, Any]

    @property
    def finish_type(self) -> str:
        """``stop``, ``length`` or ``abort``."""
        return str((self.meta_info.get("finish_reason") or {}).get("type"))

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last id is the token that ended generation, and not part of the text."""
        reason = self.meta_info.get("finish_reason") or {}
        return bool(self.token_ids) and reason.get("type") == "stop" and reason.get("matched") == self.token_ids[-1]


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
    context: RolloutContext, sample: Sample, input_ids: Sequence[int], sampling_params: Mapping[str, Any]
) -> Completion:
    """Ask an engine for one completion.

    Args:
        context: The rollout's handle.
        sample: Its session id routes the request.
        input_ids: ``[n]`` prompt ids.
        sampling_params: In the engine's names.

    Raises:
        EngineError: The engine refused, or its reply does not fit together.
        WaitTimeoutError: No engine answered.
    """
    args = context.args
    evaluation = context.turn.evaluation
    params = {k: v for k, v in sampling_params.items() if v is not None}
    params.setdefault("sampling_seed", request_seed(args.rollout_seed, sample, len(input_ids), evaluation=evaluation))
    payload: dict[str, Any] = {"input_ids": list(input_ids), "sampling_params": params, "return_logprob": True}
    if args.use_rollout_routing_replay and not evaluation:
        payload["return_routed_experts"] = True
    if args.rollout_top_p != 1.0 and not evaluation:
        payload["return_sampling_mask"] = True
    base_url = None
    if len(payload) > 3:
        # The router drops these fields, so such requests go straight to a worker; the session
        # decides which one, for the sake of its prefix cache.
        workers = await context.client.healthy_worker_urls()
        base_url = workers[zlib.crc32((sample.session_id or "").encode()) % len(workers)]
    headers = None
    if sample.session_id and args.router_policy == "consistent_hashing":
        headers = {ROUTING_HEADER: sample.session_id}
    with trace_span(sample, "sglang_generate") as span:
        reply = await context.client.generate(payload, headers=headers, base_url=base_url)
        completion = _read_reply(args, reply, want_mask="return_sampling_mask" in payload)
        span.update({name: completion.meta_info[name] for name in TRACED if name in completion.meta_info})
    return completion


def request_seed(rollout_seed: int, sample: Sample, num_input_ids: int, *, evaluation: bool) -> int:
    """Seed of one request, the same in every run and after a resume, whenever and wherever it is served.

    Samples are told apart by their index, which counts on over the whole run, and the requests of one
    sample (turns, continuations) by how much stands before them. Engines that draw from one common
    stream of random numbers ignore it.
    """
    key = f"{rollout_seed}/{sample.index}/{num_input_ids}/{evaluation}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def _read_reply(args: Any, reply: Mapping[str, Any], *, want_mask: bool) -> Completion:
    meta: dict[str, Any] = dict(reply["meta_info"])
    # Pairs without the ids of top candidates, once read, would only be carried along.
    triples = meta.pop("output_token_logprobs", None)
    if triples is None:
        raise EngineError(f"the engine answered without output_token_logprobs; keys found: {sorted(meta)}")
    token_ids = [int(t[1]) for t in triples]
    output_ids = reply.get("output_ids")
    if output_ids is not None and len(output_ids) != len(token_ids):
        raise EngineError(f"the engine answered {len(output_ids)} output_ids with {len(token_ids)} log-probs")
    mask = meta.pop("output_token_sampling_mask", None)
    if mask is not None:
        if len(mask) != len(token_ids):
            raise EngineError(f"the engine answered {len(mask)} sampling masks with {len(token_ids)} tokens")
        meta["top_p_token_ids"] = [i for row in mask for i in row]
        meta["top_p_token_offsets"] = np.cumsum([0, *(len(row) for row in mask)]).tolist()
    elif want_mask and token_ids and meta.get("top_p_token_ids") is None:
        raise EngineError(
            f"the engine returned no sampling mask, which training with --rollout-top-p {args.rollout_top_p} needs; "
            "use --rollout-top-p 1.0 or an engine with return_sampling_mask"
        )
    experts = meta.get("routed_experts")
    if isinstance(experts, str):
        rows = np.frombuffer(base64.b64decode(experts), dtype=np.int32)
        meta["routed_experts"] = rows.reshape(-1, args.num_layers, args.moe_router_topk)
    return Completion(token_ids, [float(t[0]) for t in triples], str(reply.get("text") or ""), meta)
