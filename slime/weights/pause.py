"""What becomes of requests that run while the weights of an engine change.

Three ways, all with spans of weight versions in the replies. ``retract``: the engine forgets their keys and values and
computes them again with the new weights. ``abort``: the engine ends them, the rollout asks for the rest
(``slime.rollout.continuation``). ``in_place``: they go on with what the old weights computed; only for who asks for it.

Tests hold: no mode that would give wrong results is chosen without being asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.config import Config
from slime.engines.api import PauseMode
from slime.engines.features import EngineFeatures, ask_features
from slime.errors import EngineError
from slime.http_control import in_parallel
from slime.weights.endpoint import EngineEndpoint

FLAG = "--update-weight-pause-mode"


def pause_mode_for(config: Config, endpoints: Sequence[EngineEndpoint]) -> PauseMode:
    """The mode of updates of ``endpoints``, which are asked what they are; the same for all.

    Raises:
        EngineError: An engine cannot be reached, or the mode that is asked for would give wrong results there.
        WaitTimeoutError: An engine did not answer in time.
    """
    seconds = config.engine.http_control_timeout_seconds
    features = in_parallel(
        lambda url: ask_features(url, timeout_seconds=seconds, waiter="the trainer"), [e.url for e in endpoints]
    )
    asked = config.weights.update_weight_pause_mode
    replay = config.algorithm.use_rollout_routing_replay
    modes: set[PauseMode] = {
        choose_pause_mode(asked, engine, name=endpoint.name, routing_replay=replay)
        for endpoint, engine in zip(endpoints, features, strict=True)
    }
    return modes.pop() if len(modes) == 1 else "abort"  # what every engine can do


def choose_pause_mode(asked: str, engine: EngineFeatures, *, name: str, routing_replay: bool) -> PauseMode:
    """The mode for one engine.

    Args:
        asked: Value of ``--update-weight-pause-mode``.
        engine: What it can do.
        name: What it is called in messages.
        routing_replay: Whether training repeats the engine's routes.

    Raises:
        EngineError: A retraction was asked for, and would not give right results there.
    """
    obstacle = _obstacle(engine, routing_replay)
    if asked == "auto":
        return "retract" if obstacle is None else "abort"
    if asked == "retract" and obstacle is not None:
        raise EngineError(f"{FLAG} retract: {name} ({engine.backend} {engine.version}) {obstacle}; use auto or abort")
    modes: dict[str, PauseMode] = {"retract": "retract", "abort": "abort", "in_place": "in_place"}
    return modes[asked]


def _obstacle(engine: EngineFeatures, routing_replay: bool) -> str | None:
    """Why a retraction would not give right results; None if it would."""
    if not engine.flushes_past_waiting:
        return (
            "cannot empty its cache while retracted requests wait, and would go on with keys and values of the old "
            "weights"
        )
    if engine.is_disaggregated:
        return "keeps prompts that are half computed with the old weights"
    if routing_replay and not engine.keeps_routes:
        return "forgets the experts of tokens that it computes again, which --use-rollout-routing-replay needs"
    return None
