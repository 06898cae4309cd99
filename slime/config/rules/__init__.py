"""Rules that span fields, in the order they run.

A rule takes the ``Draft``, resolves what ``None`` means, and reports with ``draft.problems`` (the run
cannot start) or ``draft.notices`` (the operator should know). Rules never raise for a user's mistake.
"""

from __future__ import annotations

from collections.abc import Callable

from slime.config.draft import Draft
from slime.config.rules.availability import check_availability
from slime.config.rules.batches import resolve_batches
from slime.config.rules.checkpoints import resolve_checkpoints
from slime.config.rules.corrections import check_corrections
from slime.config.rules.deployment import resolve_deployment
from slime.config.rules.distillation import check_distillation
from slime.config.rules.engines import resolve_engines
from slime.config.rules.evaluation import resolve_evaluation
from slime.config.rules.external import resolve_external_engines
from slime.config.rules.idle import check_idle
from slime.config.rules.inputs import resolve_inputs
from slime.config.rules.lengths import resolve_lengths
from slime.config.rules.loop import check_loop
from slime.config.rules.model import resolve_model
from slime.config.rules.objective import check_objective
from slime.config.rules.outputs import resolve_outputs
from slime.config.rules.pausing import check_pausing
from slime.config.rules.placement import resolve_placement
from slime.config.rules.recovery import check_recovery
from slime.config.rules.release import resolve_release
from slime.config.rules.sampling import check_sampling
from slime.config.rules.supervised import resolve_supervised
from slime.config.rules.weight_files import check_weight_files

RULES: tuple[Callable[[Draft], None], ...] = (
    resolve_supervised,
    resolve_release,
    resolve_outputs,
    resolve_deployment,
    resolve_external_engines,
    resolve_placement,
    check_loop,
    resolve_model,
    resolve_checkpoints,
    resolve_inputs,
    resolve_batches,
    resolve_lengths,
    check_objective,
    check_corrections,
    check_distillation,
    resolve_engines,
    check_pausing,
    check_recovery,
    resolve_evaluation,
    check_sampling,
    check_weight_files,
    check_idle,
    check_availability,
)
