"""One rank of the critic: a training rank whose model values states instead of choosing tokens.

Shares its life (groups, model, optimizer, checkpoints) with ``MegatronWorker``; it has no engines and no
reference. The configuration is the critic's own (``slime.config.roles``).
"""

from __future__ import annotations

from slime.backends.megatron import cpu

cpu.install()  # before the first import of megatron

from slime.backends.megatron.critic_rollout import CriticTrainer  # noqa: E402
from slime.backends.megatron.worker import MegatronWorker  # noqa: E402
from slime.data.columns import with_rows  # noqa: E402
from slime.types import Float32Array, RolloutBatch  # noqa: E402


class CriticWorker(MegatronWorker):
    """One rank of the value model. All methods are collective over the critic's ranks."""

    _trainer: CriticTrainer

    def score(self, batch: RolloutBatch) -> dict[int, Float32Array]:
        """Values of the response tokens under the present weights.

        Returns:
            Sample -> ``[R_i]``; each sample from one rank only.
        """
        return self._trainer.score(batch)

    def train(  # type: ignore[override]  # the actor's train takes no returns
        self, batch: RolloutBatch, values: dict[int, Float32Array], returns: dict[int, Float32Array]
    ) -> dict[str, float]:
        """Train one rollout.

        Args:
            batch: The whole rollout; every rank gets the same and takes its share.
            values: What ``score`` said, of all ranks together.
            returns: What the values are trained towards.

        Returns:
            ``critic-train/*`` of all optimizer steps together and ``perf/critic_*``; equal on every rank
            except ``perf/*``, which is this rank's.

        Raises:
            CheckpointError: A checkpoint written in the background failed.
        """
        self._complete_written_save()
        metrics = self._trainer.train(with_rows(batch, values=values, returns=returns))
        times = self._timer.perf_metrics()
        self._timer.reset()
        return metrics | {name.replace("perf/", "perf/critic_"): seconds for name, seconds in times.items()}

    def _build_trainer(self) -> CriticTrainer:  # type: ignore[override]
        passes, step = self._build_step()
        return CriticTrainer(self.config, passes, step, self.hooks, self._timer)
