"""What an engine generated, read out of its reply, which may be anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from slime.rollout.faults import BadReplyError


def read_output(reply: Mapping[str, Any], *, max_new_tokens: int | None) -> tuple[list[int], list[float]]:
    """Ids and log-probs of the generated tokens.

    Args:
        reply: A reply with ``meta_info``.
        max_new_tokens: How many tokens were asked for at most; None if that was not said.

    Returns:
        ``[n]`` ids and ``[n]`` log-probs; n is 0 only if the request was aborted.

    Raises:
        BadReplyError: The columns are missing, are not numbers, or do not fit each other or the request.
    """
    meta: Mapping[str, Any] = reply["meta_info"]
    triples = meta.get("output_token_logprobs")
    if triples is None:
        raise BadReplyError(f"the engine answered without output_token_logprobs; keys found: {sorted(meta)}")
    reason = meta.get("finish_reason")
    if not isinstance(reason, dict) or "type" not in reason:
        raise BadReplyError(f"the engine answered with the finish_reason {reason!r:.100}; expected one with a type")
    token_ids, log_probs = _columns(triples)
    count = len(token_ids)
    output_ids = reply.get("output_ids")
    if output_ids is not None and (not isinstance(output_ids, list) or len(cast("list[Any]", output_ids)) != count):
        found = len(cast("list[Any]", output_ids)) if isinstance(output_ids, list) else repr(output_ids)[:100]
        raise BadReplyError(f"the engine answered {found} output_ids with {count} log-probs")
    if max_new_tokens is not None and count > max_new_tokens:
        raise BadReplyError(f"the engine answered {count} tokens, at most {max_new_tokens} were asked for")
    if not count and reason["type"] != "abort":
        raise BadReplyError(f"the engine answered no token, and the finish_reason {reason!r:.100}")
    return token_ids, log_probs


def _columns(triples: Any) -> tuple[list[int], list[float]]:
    try:
        token_ids = [triple[1] for triple in triples]
        log_probs = [float(triple[0]) for triple in triples]
    except (TypeError, ValueError, LookupError) as error:
        raise BadReplyError(f"the engine answered output_token_logprobs of another form: {triples!r:.200}") from error
    wrong = next((i for i in token_ids if type(i) is not int or i < 0), None)
    if wrong is not None:
        raise BadReplyError(f"the engine answered {wrong!r:.100} as a token id")
    return token_ids, log_probs
