"""Which reward types exist, and what each of them is.

Importable without any grader: configuration only needs the names. Tests hold that every row can
be loaded, or says why it cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

BOXED_PREFIX = "boxed_"


class GraderKind(Enum):
    """Where a reward type is computed."""

    INLINE = "inline"  # in the event loop for short responses; what may be slow it defers to a worker process
    POOL = "pool"  # work grows with the response: graded in a worker process
    REMOTE = "remote"  # one HTTP call
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderSpec:
    """One row of the registry.

    Args:
        kind: Where the reward is computed.
        function: ``module:attribute`` of ``fn(response, label, metadata) -> Grade | Deferred``;
            empty for the kinds that have none.
        boxed_function: The same for the ``boxed_`` form, given the content of the last box;
            empty if ``function`` does that as well.
        about: One sentence for help texts.
        reward_keys: Keys of the reward when it is a dict; empty for a number.
        unavailable_because: Why the type cannot be used, and what to do instead.
    """

    kind: GraderKind
    about: str
    function: str = ""
    boxed_function: str = ""
    reward_keys: tuple[str, ...] = ()
    unavailable_because: str = ""


REWARDS: dict[str, GraderSpec] = {
    "math": GraderSpec(
        kind=GraderKind.INLINE,
        function="slime.rewards.math:grade_math",
        boxed_function="slime.rewards.math:grade_answer",
        about="1 if the last \\boxed{} of the response equals the label, textually or symbolically, else 0",
    ),
    "deepscaler": GraderSpec(
        kind=GraderKind.INLINE,
        function="slime.rewards.math:grade_deepscaler",
        boxed_function="slime.rewards.math:grade_answer",
        about="like math, on what follows </think> or ###Response; 0 without such a marker",
    ),
    "dapo": GraderSpec(
        kind=GraderKind.INLINE,
        function="slime.rewards.rules:grade_dapo",
        boxed_function="slime.rewards.rules:grade_dapo_answer",
        about="+1 or -1 by the last 'Answer: ...' line within the last 300 characters",
        reward_keys=("score", "acc", "pred"),
    ),
    "f1": GraderSpec(
        kind=GraderKind.POOL,
        function="slime.rewards.rules:grade_f1",
        about="token F1 of response and label",
    ),
    "gpqa": GraderSpec(
        kind=GraderKind.POOL,
        function="slime.rewards.gpqa:grade_gpqa",
        about="1 if the chosen letter of a multiple-choice question is the right one, else 0",
    ),
    "random": GraderSpec(
        kind=GraderKind.INLINE,
        function="slime.rewards.rules:grade_random",
        about="0 or 1 with equal chance",
    ),
    "remote_rm": GraderSpec(
        kind=GraderKind.REMOTE,
        about="the JSON answer of a POST of {prompt, response, label} to --rm-url",
    ),
    "ifbench": GraderSpec(
        kind=GraderKind.UNAVAILABLE,
        about="instruction following checks",
        unavailable_because=(
            "its checker is not published as an installable package and nothing is fetched during a run; "
            "wrap your copy of the checker in a function and pass it with --custom-rm-path"
        ),
    ),
}
"""Reward type -> what it is. A new type is one row here."""

RM_TYPES: frozenset[str] = frozenset(REWARDS) | frozenset(
    BOXED_PREFIX + name for name, spec in REWARDS.items() if spec.kind is not GraderKind.UNAVAILABLE
)
"""Every accepted ``--rm-type`` and ``metadata["rm_type"]``, with the boxed_ forms."""
