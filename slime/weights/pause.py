"""What becomes of requests that run while the weights of an engine change.

Three ways, all with spans of weight versions in the replies. ``retract``: the engine forgets their keys and values and
computes them again with the new weights. ``abort``: the engine ends them, the rollout asks for the rest
(``slime.rollout.continuation``). ``in_place``: they go on with what the old weights computed; only for who asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.engines.api import PauseMode
from slime.errors import EngineError

FLAG = "--update-weight-pause-mode"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetractionFacts:
    """What an engine does with requests that it takes back.

    Args:
        name: Of the engine, for messages.
        flushes_past_waiting: Whether its cache can be emptied while they wait. Engines that cannot either keep the
            prefixes of the old weights or die of the refused flush.
        keeps_routes: Whether the experts of tokens that it computes again stay those of the first time, which training
            with ``--use-rollout-routing-replay`` repeats.
    """

    name: str
    flushes_past_waiting: bool
    keeps_routes: bool


def choose_pause_mode(asked: str, engine: RetractionFacts, *, routing_replay: bool) -> PauseMode:
    """The mode for one engine.

    Args:
        asked: Value of ``--update-weight-pause-mode``.
        engine: What a retraction would do there.
        routing_replay: Whether training repeats the engine's routes.

    Raises:
        EngineError: A retraction was asked for, and the engine would not survive it with right results.
    """
    if asked == "retract" and not engine.flushes_past_waiting:
        raise EngineError(
            f"{FLAG} retract: {engine.name} cannot empty its cache while retracted requests wait, so it would go on "
            "with keys and values of the old weights (SGLang can from 0.5.21 on); use auto or abort"
        )
    if asked == "retract" and routing_replay and not engine.keeps_routes:
        raise EngineError(
            f"{FLAG} retract: {engine.name} forgets the experts of tokens that it computes again, which "
            "--use-rollout-routing-replay needs; use auto or abort"
        )
    if asked == "auto":
        return "retract" if engine.flushes_past_waiting and (engine.keeps_routes or not routing_replay) else "abort"
    modes: dict[str, PauseMode] = {"retract": "retract", "abort": "abort", "in_place": "in_place"}
    return modes[asked]
