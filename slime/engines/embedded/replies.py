"""From a request's state to the JSON of its answer."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slime.engines.api import GenerateReply, LogProbTriple, MetaInfo
from slime.engines.embedded.request import Progress, Request
from slime.engines.embedded.text import Text, final_text


def build_reply(progress: Progress, text: Text, weight_version: str) -> GenerateReply:
    """Answer for the first ``progress.count`` tokens of a request.

    Args:
        progress: Where the request is.
        text: The tokenizer.
        weight_version: Name of the engine's weights now.

    Returns:
        Text, ids and meta information in the shape of the contract; ids include the stop token.
    """
    request, count = progress.request, progress.count
    params = request.item.sampling
    ids = request.output_ids[:count]
    finish = request.finish if progress.is_last else None
    matched = finish["matched"] if finish is not None and finish["type"] == "stop" else None
    meta: MetaInfo = {
        "id": request.rid,
        "finish_reason": finish,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": count,
        "cached_tokens": max(request.cached_tokens, 0),
        "num_retractions": request.num_retractions,
        "weight_version": weight_version,
        "weight_versions": list(progress.spans),
    }
    if request.item.return_logprob:
        _add_log_probs(meta, request, ids, text)
    _add_kept_tokens(meta, request, count)
    if progress.is_last and request.routes:
        meta["routed_experts"] = _packed(np.concatenate(request.routes)[request.item.routed_experts_start_len :])
    if progress.is_last:
        meta["e2e_latency"] = time.monotonic() - request.created
    return {"text": final_text(text, ids, params, matched), "output_ids": ids, "meta_info": meta}


def _add_kept_tokens(meta: MetaInfo, request: Request, count: int) -> None:
    """Kept token sets: as lists with the log-probs of the cut distribution, or packed as ids and offsets."""
    kept = request.output_kept[:count]
    if request.item.return_sampling_mask:
        is_whole = request.item.sampling_logprobs_mode == "support"
        meta["output_token_sampling_mask"] = [row.ids for row in kept]
        meta["output_token_sampling_logprobs"] = [row.log_probs if is_whole else row.drawn_log_prob for row in kept]
        meta["output_token_sampling_mask_length"] = count
    if request.item.sampling.returns_mask:
        ids = [token for row in kept for token in row.ids]
        meta["top_p_token_ids"] = _packed(np.array(ids, dtype=np.int32))
        meta["top_p_token_offsets"] = _packed(np.cumsum([0, *(len(row.ids) for row in kept)]).astype(np.int32))


def _packed(values: npt.NDArray[np.int32]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _add_log_probs(meta: MetaInfo, request: Request, ids: list[int], text: Text) -> None:
    item = request.item
    namer = text if item.return_text_in_logprobs else None
    start = min(item.logprob_start_len, len(request.prompt)) if item.logprob_start_len >= 0 else len(request.prompt)
    prompt: list[int] = request.prompt[start:].tolist()
    scores = request.input_log_probs or []
    meta["input_token_logprobs"] = _triples(scores, prompt[: len(scores)], namer)
    meta["output_token_logprobs"] = _triples(request.output_log_probs[: len(ids)], ids, namer)
    meta["output_token_logprobs_length"] = len(ids)
    if item.top_logprobs_num:
        meta["input_top_logprobs"] = [_top(row, namer) for row in request.input_top]
        meta["output_top_logprobs"] = [_top(row, namer) or [] for row in request.output_top[: len(ids)]]


def _triples(log_probs: Sequence[float | None], ids: Sequence[int], namer: Text | None) -> list[LogProbTriple]:
    if namer is None:
        return [(p, t, None) for p, t in zip(log_probs, ids, strict=True)]
    return [(p, t, namer.token(t)) for p, t in zip(log_probs, ids, strict=True)]


def _top(row: tuple[list[float], list[int]] | None, namer: Text | None) -> list[LogProbTriple] | None:
    return None if row is None else _triples(row[0], row[1], namer)
