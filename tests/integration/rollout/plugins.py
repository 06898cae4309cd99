"""User functions for the rollout tests, found by module path."""

from __future__ import annotations

from typing import Any

from slime.utils.types import Sample


async def two_turns(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """A per-sample function in the established style: two requests with an observation between them."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post

    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    params = {**sampling_params, "max_new_tokens": args.tokens_per_turn}
    for turn in range(2):
        payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        reply = await post(url, payload)
        triples = reply["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[t[1] for t in triples],
            log_probs=[t[0] for t in triples],
            meta_info=reply["meta_info"],
            text=reply["text"],
        )
        if turn == 0:
            observation = "<obs>"
            ids = state.tokenizer.encode(observation, add_special_tokens=False)
            sample.append_response_tokens(args, tokens=ids, trainable=False, text=observation)
    return sample


async def length_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """A reward that differs within a group."""
    return float(sum(sample.tokens) % 97)
