"""Choose the next token of every row of a step at once.

Order of operations: penalties and bans on the logits, temperature, then ``top_k``, ``top_p`` and ``min_p``, each judged
on the full distribution at that temperature, a token having to pass all three. ``top_p`` keeps the smallest set of
likeliest tokens that reaches it. The draw inverts the cumulative distribution at one number that is a hash of (seed,
output position): the same request with the same seed draws the same numbers in any batch.

Reported log-probs are those of the model at the row's temperature, before penalties and truncation: the number that a
trainer computes from the same logits. Rows that report the kept tokens also get the log-probs of the distribution that
the draw was really from: what a trainer computes that keeps the same tokens. Tests hold: each parameter against a
float64 reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime.engines.api import SamplingParams

_BLOCK = 256
_WIDTHS = (64, 1024)
"""Numbers of likeliest tokens to look at before falling back to sorting the whole vocabulary."""
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class SampleRow:
    """What the sampler needs to know about one row.

    Args:
        params: Of the request.
        seed: Of this row's draws.
        position: Index of the token to be drawn in the output.
        banned: Token ids that must not be drawn now (stop tokens before ``min_new_tokens``).
        counts: ``[V]`` float32, how often each token is in the output so far; only if the row penalises.
        seen: ``[V]`` bool, tokens in prompt or output; only if the row penalises.
        top: How many of the likeliest tokens to report.
        wants_kept: Whether to report the tokens that truncation kept.
    """

    params: SamplingParams
    seed: int
    position: int
    banned: Sequence[int] = ()
    counts: Tensor | None = None
    seen: Tensor | None = None
    top: int = 0
    wants_kept: bool = False


@dataclass(frozen=True, slots=True)
class KeptSet:
    """The tokens that one draw was from, likeliest first, and the log-prob of the drawn one among them.

    A draw that nothing was cut from has no list of tokens.
    """

    ids: list[int]
    log_probs: list[float]
    drawn_log_prob: float


@dataclass(slots=True)
class Sampled:
    """Result of one step, one entry per row."""

    tokens: list[int]
    log_probs: list[float]
    top: dict[int, tuple[list[float], list[int]]]
    """Row to (log-probs, token ids) of its likeliest tokens, for rows that ask for them."""
    kept: dict[int, KeptSet]
    """Row to what truncation kept, for rows that ask for it."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (splitmix64, twice)."""
    return (_mix(_mix(seed & _MASK64) ^ ((position + 1) * 0xD1342543DE82EF95 & _MASK64)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """Draw one token per row.

    Args:
        logits: ``[R, V]`` of any float dtype.
        rows: R descriptions.

    Returns:
        Tokens with their log-probs, and the extras that rows ask for.
    """
    raw = logits.float()
    temperatures = [row.params.temperature or 1.0 for row in rows]
    scaled = raw
    if any(t != 1.0 for t in temperatures):
        scaled = raw / torch.tensor(temperatures, device=raw.device)[:, None]
    log_probs = log_softmax(scaled)
    behaviour = _behaviour(raw, log_probs, temperatures, rows)
    tokens = torch.empty(len(rows), dtype=torch.long, device=raw.device)
    kept: dict[int, KeptSet] = {}
    greedy = [i for i, row in enumerate(rows) if row.params.temperature == 0.0]
    plain = [i for i, row in enumerate(rows) if row.params.temperature != 0.0 and not row.params.truncates]
    truncated = [i for i, row in enumerate(rows) if row.params.temperature != 0.0 and row.params.truncates]
    if greedy:
        index = torch.tensor(greedy, device=raw.device)
        tokens[index] = _select(behaviour, index, len(rows)).argmax(-1)
    if plain:
        index = torch.tensor(plain, device=raw.device)
        chosen = _select(behaviour, index, len(rows))
        tokens[index] = _draw(chosen.exp(), _uniforms([rows[i] for i in plain], raw.device))
    if truncated:
        index = torch.tensor(truncated, device=raw.device)
        subset = [rows[i] for i in truncated]
        picked, sets = _draw_truncated(_select(behaviour, index, len(rows)).exp(), subset)
        tokens[index] = picked
        kept = {truncated[j]: ids for j, ids in sets.items()}
    token_list: list[int] = tokens.tolist()
    kept |= {i: KeptSet([token_list[i]], [0.0], 0.0) for i in greedy if rows[i].wants_kept}
    kept |= {i: KeptSet([], [], float(behaviour[i, token_list[i]])) for i in plain if rows[i].wants_kept}
    return Sampled(
        tokens=token_list,
        log_probs=log_probs.gather(1, tokens[:, None])[:, 0].tolist(),
        top=_top(log_probs, rows),
        kept=kept,
    )


def _select(values: Tensor, index: Tensor, total: int) -> Tensor:
    return values if len(index) == total else values[index]


def _uniforms(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    return torch.tensor([uniform(row.seed, row.position) for row in rows], dtype=torch.float64, device=device)


def _behaviour(raw: Tensor, log_probs: Tensor, temperatures: Sequence[float], rows: Sequence[SampleRow]) -> Tensor:
    """Log-probs ``[R, V]`` to draw from: ``log_probs``, but penalised and banned where rows ask for it."""
    changed = [i for i, row in enumerate(rows) if row.params.penalises or row.banned]
    if not changed:
        return log_probs
    result = log_probs.clone()
    for i in changed:
        row = rows[i]
        line = raw[i].clone()
        if row.counts is not None and row.seen is not None:
            factor = row.params.repetition_penalty
            if factor != 1.0:
                line = torch.where(row.seen, torch.where(line > 0, line / factor, line * factor), line)
            line -= row.params.frequency_penalty * row.counts
            line -= row.params.presence_penalty * (row.counts > 0)
        if row.banned:
            line[torch.tensor(row.banned, device=raw.device)] = float("-inf")
        result[i] = log_softmax(line / temperatures[i])
    return result


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probs over the last dimension, ``[..., V]`` float32.

    torch's own sums a vocabulary front to back in float32, which shifts all log-probs of a row by up to 1e-5;
    ``sum`` adds pairwise.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log_()


def _draw(probs: Tensor, u: Tensor) -> Tensor:
    """Invert the cumulative distribution of ``probs`` ``[R, V]`` at ``u`` ``[R]``; returns ``[R]`` ids.

    First the block of tokens, then the token in it: sums of short blocks are exact enough in float32, and the long
    cumulative sum over a vocabulary, which is neither fast nor exact, is not needed.
    """
    rows, vocab = probs.shape
    blocks = -(-vocab // _BLOCK)
    if blocks * _BLOCK != vocab:
        probs = torch.nn.functional.pad(probs, (0, blocks * _BLOCK - vocab))
    parts = probs.view(rows, blocks, _BLOCK)
    outer = parts.sum(-1).double().cumsum(-1)
    target = (u * outer[:, -1]).unsqueeze(1)
    block = torch.searchsorted(outer, target, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, outer.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = parts.gather(1, block[:, :, None].expand(rows, 1, _BLOCK))[:, 0].double().cumsum(-1)
    # Rounding can put the target past the block's end: the last token with a positive probability is meant then.
    rest = torch.minimum(target - before, torch.nextafter(inner[:, -1:], torch.zeros_like(target)))
    return (block * _BLOCK + torch.searchsorted(inner, rest, right=True))[:, 0]


def _draw_truncated(probs: Tensor, rows: Sequence[SampleRow]) -> tuple[Tensor, dict[int, KeptSet]]:
    """Draw from the tokens of ``probs`` ``[R, V]`` that pass top-k, top-p and min-p."""
    device, vocab = probs.device, probs.shape[1]
    top_k = torch.tensor([r.params.top_k if r.params.top_k > 0 else vocab for r in rows], device=device)[:, None]
    top_p = torch.tensor([r.params.top_p for r in rows], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([r.params.min_p for r in rows], device=device)[:, None]
    # The largest k decides where to start looking; rows without top_k are cut by a probability instead.
    for width in (*(w for w in _WIDTHS if w < vocab), vocab):
        values, ids = torch.topk(probs, width, dim=-1)
        cumulative = values.double().cumsum(-1)
        rank = torch.arange(width, device=device)[None, :]
        keep = (rank < top_k) & ((cumulative - values < top_p) | (top_p >= 1.0)) & (values >= min_p * values[:, :1])
        if width == vocab or not bool(keep[:, -1].any()):
            break
    keep[:, 0] = True
    inside = torch.where(keep, values, 0.0).double().cumsum(-1)
    target = _uniforms(rows, device)[:, None] * inside[:, -1:]
    place = torch.searchsorted(inside, target, right=True)
    tokens = ids.gather(1, place)[:, 0]
    sets: dict[int, KeptSet] = {}
    for i in (i for i, row in enumerate(rows) if row.wants_kept):
        log_probs = (values[i].double() / inside[i, -1]).log()
        sets[i] = KeptSet(ids[i][keep[i]].tolist(), log_probs[keep[i]].tolist(), float(log_probs[place[i, 0]]))
    return tokens, sets


def _top(log_probs: Tensor, rows: Sequence[SampleRow]) -> dict[int, tuple[list[float], list[int]]]:
    result: dict[int, tuple[list[float], list[int]]] = {}
    for i, row in enumerate(rows):
        if row.top:
            values, ids = torch.topk(log_probs[i], min(row.top, log_probs.shape[1]))
            result[i] = (values.tolist(), ids.tolist())
    return result
