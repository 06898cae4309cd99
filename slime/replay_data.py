"""What an engine chose besides the tokens, kept so that training can repeat the choice.

Two records, both per token. *Kept tokens*: the ids that top-k, top-p and min-p left to draw from, for each response
token; a ragged list of ids with offsets. An empty set means that nothing was cut: environment tokens have it.
*Routes*: the experts that each layer sent a token to, for every token that was run; ``UNROUTED`` where no engine did.

Pure functions on arrays; who owns the arrays is ``Sample`` and ``RolloutBatch``. Tests hold: records stay aligned with
the tokens under any order of appends, and a record that is not one is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

UNROUTED = -1
"""Expert id of a token that no engine has routed; training routes it by its own router."""


def append_kept_tokens(
    ids: Int32Array | None,
    offsets: Int32Array | None,
    *,
    earlier: int,
    count: int,
    trainable: bool,
    meta_info: Mapping[str, Any],
) -> tuple[Int32Array | None, Int32Array | None]:
    """Kept sets of a response after ``count`` more tokens.

    Args:
        ids: ``[K]`` ids of the sets so far, None without a record.
        offsets: ``[earlier + 1]`` where each set starts, from 0 to K; None without a record.
        earlier: Response tokens so far.
        count: New tokens.
        trainable: Whether an engine drew them; others get empty sets.
        meta_info: The engine's reply: ids and offsets of the new tokens as base64, bytes or a list.

    Raises:
        ValueError: The reply's record does not fit ``count`` tokens.
    """
    new_ids = _int32_column(meta_info, "top_p_token_ids", "top_p_kept_token_ids")
    new_offsets = _int32_column(meta_info, "top_p_token_offsets", "top_p_kept_token_offsets")
    if (new_ids is None) != (new_offsets is None):
        raise ValueError("top-p token ids and offsets come together or not at all")
    if new_ids is None or new_offsets is None:
        if offsets is not None and not trainable:
            offsets = np.concatenate([offsets, np.full(count, offsets[-1], dtype=np.int32)])
        return ids, offsets
    if len(new_offsets) != count + 1 or new_offsets[0] != 0 or new_offsets[-1] != len(new_ids):
        raise ValueError(
            f"top-p offsets must start at 0, end at {len(new_ids)} and have {count + 1} entries; "
            f"found {len(new_offsets)} entries, {new_offsets[:1].tolist()} to {new_offsets[-1:].tolist()}"
        )
    if ids is None or offsets is None:
        ids, offsets = no_kept_tokens(earlier)
    return np.concatenate([ids, new_ids]), np.concatenate([offsets, new_offsets[1:] + offsets[-1]])


def no_kept_tokens(count: int) -> tuple[Int32Array, Int32Array]:
    """Ids and offsets of ``count`` tokens whose draw nothing restricted."""
    return np.zeros(0, dtype=np.int32), np.zeros(count + 1, dtype=np.int32)


def check_kept_tokens(ids: Int32Array, offsets: Int32Array, response: Int32Array) -> None:
    """Raise ValueError unless the sets fit the response and each that is not empty holds the token drawn from it."""
    if len(offsets) != len(response) + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or np.any(np.diff(offsets) < 0):
        raise ValueError(
            f"offsets must be {len(response) + 1} that rise from 0 to {len(ids)}; found {len(offsets)}, "
            f"{offsets[:1].tolist()} to {offsets[-1:].tolist()}"
        )
    lengths = np.diff(offsets)
    owner = np.repeat(np.arange(len(response)), lengths)
    holds = np.zeros(len(response), dtype=bool)
    holds[owner[ids == response[owner]]] = True
    lacking = np.flatnonzero((lengths > 0) & ~holds)
    if len(lacking):
        i = int(lacking[0])
        raise ValueError(f"the kept set of response token {i} lacks the drawn token {int(response[i])}")


def splice_routes(
    routes: Int32Array | None, *, num_tokens: int, meta_info: Mapping[str, Any], args: Any
) -> Int32Array | None:
    """Routes ``[num_tokens - 1, layers, top-k]`` of a sequence that has grown to ``num_tokens``.

    A reply replaces the rows from its ``routed_experts_start_len`` on, so that earlier tokens keep the routes they were
    generated with. Rows that no reply covers are ``UNROUTED``.

    Args:
        routes: ``[n, layers, top-k]`` so far, None without a record.
        num_tokens: Prompt and response tokens now.
        meta_info: The engine's reply; ``routed_experts`` is an array of three dimensions, or flat values (base64,
            bytes, list) whose layers and top-k ``args`` knows.
        args: Flat argument view; ``num_layers`` and ``moe_router_topk`` are read for flat values.

    Raises:
        ValueError: The reply has another number of rows than the sequence has tokens after its start, minus one.
    """
    found: Any = meta_info.get("routed_experts")
    if found is not None:
        rows = found if isinstance(found, np.ndarray) else decode_int32(found)
        if rows.ndim != 3:
            rows = rows.reshape(-1, args.num_layers, args.moe_router_topk)
        start = int(meta_info.get("routed_experts_start_len") or 0)
        if len(rows) != max(num_tokens - 1 - start, 0):
            raise ValueError(f"routed experts have {len(rows)} rows from token {start} on, of {num_tokens} tokens")
        held = no_routes(start, rows.shape[1:]) if routes is None else routes[:start]
        if len(held) < start:
            raise ValueError(f"routed experts start at token {start}, but only the first {len(held)} are known")
        return np.concatenate([held, rows.astype(np.int32)])
    if routes is None or len(routes) == num_tokens - 1:
        return routes
    return np.concatenate([routes, no_routes(num_tokens - 1 - len(routes), routes.shape[1:])])


def no_routes(count: int, layers_and_topk: tuple[int, ...]) -> Int32Array:
    """Rows of ``count`` tokens that no engine has routed."""
    return np.full((count, *layers_and_topk), UNROUTED, dtype=np.int32)


def num_routed(routes: Int32Array | None) -> int:
    """Number of leading tokens whose routes are known: where a continuation's record has to start."""
    if routes is None:
        return 0
    known = (routes != UNROUTED).all(axis=(1, 2))
    return len(known) if known.all() else int(known.argmin())


def decode_int32(value: Any) -> Int32Array:
    """Flat int32 values from base64, bytes or a list."""
    if isinstance(value, str):
        value = base64.b64decode(value)
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.int32).copy()
    return np.asarray(value, dtype=np.int32)


def _int32_column(meta_info: Mapping[str, Any], *names: str) -> Int32Array | None:
    """First present column of ``names``."""
    return next((decode_int32(meta_info[name]) for name in names if meta_info.get(name) is not None), None)
