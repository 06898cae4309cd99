"""Passes of micro-batches through this rank's part of the model, by Megatron's own schedule.

Owns the forward step that all passes share, and the scoring of response tokens from its output. What
is done with the scores is the caller's: collect them (``scoring``) or make a loss of them (``step``).
Collective over tensor-, context- and pipeline-parallel groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.backends.megatron.batches import MicroBatch
from slime.backends.megatron.kept_tokens import KeptTokens
from slime.backends.megatron.logprobs import TokenScores, automatic_chunk, complete_over_context, score_tokens
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.routing_replay import RoutingReplay
from slime.backends.megatron.vocab_kernels import VocabKernels
from slime.backends.megatron.vocab_shard import VocabShard

# Elements of logits and of the scores' buffers together that a recomputed head has at a time when nothing else
# is asked: enough rows to keep a matrix product busy.
AUTO_HEAD_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 28}

# Shapes travel with the data (variable_seq_lengths); the schedule only wants some number here.
ANY_LENGTH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSettings:
    """How response tokens are scored.

    Args:
        vocab_size: Real tokens; padded columns of the head take part in nothing.
        temperature: Divides the logits.
        chunk_size: Rows of logits whose fp32 temporaries, and with ``recompute`` the logits themselves, may
            exist at a time; -1 picks a number.
        recompute: Never keep logits: run head and scores chunk by chunk, and again in the backward.
        half: The model computes in half precision (its outputs then stay in it).
    """

    vocab_size: int
    temperature: float
    chunk_size: int
    recompute: bool
    half: bool


class ModelPasses:
    """This rank's model chunks and how to run micro-batches through them.

    ``on_progress``, if set, is called with what is run, the micro-batches done and their number.
    ``routing`` says whether passes record or replay the choice of experts.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        parallel: ParallelState,
        settings: ScoreSettings,
        routing: RoutingReplay | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.parallel = parallel
        self.routing = routing or RoutingReplay(chunks, parallel)
        self._settings = settings
        self._kernels = VocabKernels(compiled=True) if parallel.device.type == "cuda" else None
        self._call_options: dict[str, Any] = {"fp32_output": False} if settings.half else {}
        self.on_progress: Callable[[str, int, int], None] | None = None

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Callable[[MicroBatch, Tensor], Any],
        *,
        forward_only: bool,
        fused_scores: bool = False,
        with_entropy: bool = False,
    ) -> list[Any]:
        """Run all micro-batches forward, and backward unless ``forward_only``.

        Args:
            micro_batches: The same number on every rank.
            finish: On the last stage, what becomes of a micro-batch's output. Backward passes: the
                loss, the number of tokens and a value to collect; else only the value.
            forward_only: No backward.
            fused_scores: Let the head return scores instead of logits, for ``fused``.
            with_entropy: Whether fused scores include the entropy.

        Returns:
            Collected values, one per micro-batch; empty on other stages.
        """

        def forward_step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(iterator)
            options = dict(self._call_options)
            if fused_scores:
                options["head"] = partial(self._head_scores, micro_batch, with_entropy)
            index = micro_batch.logit_index
            if fused_scores:
                index = index[micro_batch.rows]
            self.routing.enter(micro_batch)
            output = model(micro_batch.tokens, micro_batch.row, index, **options)
            self.routing.leave(micro_batch, output)
            return output, partial(_finish, finish, micro_batch)

        iterators = [iter(micro_batches) for _ in self.chunks]
        label = "log-probs" if forward_only else "training"
        iterators[0] = self._counted(micro_batches, label)
        with torch.set_grad_enabled(not forward_only):
            collected = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(micro_batches),
                seq_length=ANY_LENGTH,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        if self.on_progress is not None:
            self.on_progress(label, len(micro_batches), len(micro_batches))
        return collected

    def _counted(self, micro_batches: Sequence[MicroBatch], label: str) -> Iterator[MicroBatch]:
        """The micro-batches; asking for one tells that those before it are done."""
        for done, micro_batch in enumerate(micro_batches):
            if self.on_progress is not None:
                self.on_progress(label, done, len(micro_batches))
            yield micro_batch

    def score(
        self, micro_batch: MicroBatch, logits: Tensor, *, with_entropy: bool, reuse_logits: bool = False
    ) -> TokenScores:
        """Scores of all R response tokens of a micro-batch from its logits ``[U, V/tp]``.

        Collective over tensor- and context-parallel groups.
        """
        settings = self._settings
        scores = score_tokens(
            logits,
            micro_batch.targets,
            self._shard(logits.size(1)),
            rows=micro_batch.rows,
            temperature=settings.temperature,
            chunk_size=settings.chunk_size,
            with_entropy=with_entropy,
            reuse_logits=reuse_logits,
            kept=micro_batch.kept,
            kernels=self._kernels,
        )
        return self._complete(micro_batch, scores)

    def values(self, micro_batch: MicroBatch, output: Tensor) -> Tensor:
        """``[R]`` values of all response tokens from a value model's output ``[U, 1]``.

        A token's value is that of the state in which it is chosen, at the place that predicts it. Values are
        not scaled by the temperature. Collective over the context-parallel group.
        """
        found = output[:, 0].index_select(0, micro_batch.rows)
        if micro_batch.places is None:
            return found
        return complete_over_context(found, micro_batch.places, micro_batch.num_response_tokens, self.parallel.cp_group)

    def unpack_fused(self, micro_batch: MicroBatch, output: Tensor, *, with_entropy: bool) -> TokenScores:
        """Scores of all R response tokens from what a head with ``fused_scores`` returned."""
        return self._complete(
            micro_batch, TokenScores(log_probs=output[0], entropy=output[1] if with_entropy else None)
        )

    @property
    def keeps_no_logits(self) -> bool:
        """Whether passes are to let the head return scores: ``fused_scores``."""
        return self._settings.recompute

    def _shard(self, num_columns: int) -> VocabShard:
        parallel = self.parallel
        group = parallel.tp_group if parallel.tp_size > 1 else None
        return VocabShard.of(self._settings.vocab_size, num_columns, parallel.tp_rank, group)

    def _complete(self, micro_batch: MicroBatch, scores: TokenScores) -> TokenScores:
        if micro_batch.places is None:
            return scores
        places, total, group = micro_batch.places, micro_batch.num_response_tokens, self.parallel.cp_group
        entropy = scores.entropy
        return TokenScores(
            log_probs=complete_over_context(scores.log_probs, places, total, group),
            entropy=None if entropy is None else complete_over_context(entropy, places, total, group),
        )

    def _head_scores(
        self, micro_batch: MicroBatch, with_entropy: bool, hidden: Tensor, project: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """``[1 or 2, r]`` log-probs (and entropy) of hidden states ``[r, H]``, keeping no logits."""
        settings = self._settings
        size = self._head_rows(hidden.device)

        def score(states: Tensor, targets: Tensor, kept: KeptTokens | None) -> Tensor:
            logits = project(states)
            found = score_tokens(
                logits,
                targets,
                self._shard(logits.size(1)),
                temperature=settings.temperature,
                chunk_size=min(size, automatic_chunk(logits.device, logits.size(1))),
                with_entropy=with_entropy,
                reuse_logits=True,
                kept=kept,
                kernels=self._kernels,
            )
            return torch.stack([found.log_probs] if found.entropy is None else [found.log_probs, found.entropy])

        states, targets = hidden.split(size), micro_batch.targets.split(size)
        kept = [None] * len(states) if micro_batch.kept is None else micro_batch.kept.split(size)
        spans = zip(states, targets, kept, strict=True)
        return torch.cat([checkpoint(score, *span, use_reentrant=False) for span in spans], dim=1)

    def _head_rows(self, device: torch.device) -> int:
        """Rows per chunk of a head that keeps no logits; the logits are one half, the scores' buffers the other."""
        columns = -(-self._settings.vocab_size // self.parallel.tp_size)
        automatic = AUTO_HEAD_ELEMENTS.get(device.type, AUTO_HEAD_ELEMENTS["cuda"]) // columns
        chunk = self._settings.chunk_size if self._settings.chunk_size > 0 else automatic
        return max(1, chunk // 2)


def _finish(
    finish: Callable[[MicroBatch, Tensor], Any], micro_batch: MicroBatch, output: Tensor, non_loss_data: bool = False
) -> Any:
    # Megatron calls this with non_loss_data=True in a pass without a loss.
    del non_loss_data
    return finish(micro_batch, output)
