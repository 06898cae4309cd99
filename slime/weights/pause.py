"""What becomes of requests that run while the weights of an engine change.

Three ways, all with spans of weight versions in the replies. ``retract``: the engine forgets their keys and values and
computes them again with the new weights. ``abort``: the engine ends them, the rollout asks for the rest
(``slime.rollout.continuation``). ``in_place``: they go on with what the old weights computed; only for who asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime.config import Config
from slime.engines import api
from slime.engines.api import PauseMode
from slime.errors import EngineError
from slime.http_control import in_parallel, request
from slime.weights.endpoint import EngineEndpoint

FLAG = "--update-weight-pause-mode"

_FLUSHES_PAST_WAITING = (0, 5, 21)
"""SGLang version from which a paused engine empties its cache although retracted requests wait."""


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


def pause_mode_for(config: Config, endpoints: Sequence[EngineEndpoint]) -> PauseMode:
    """The mode for an update of all ``endpoints``, which are asked what they are.

    Raises:
        EngineError: An engine cannot be reached, or the mode that is asked for would give wrong results there.
        WaitTimeoutError: An engine did not answer in time.
    """
    asked = config.weights.update_weight_pause_mode
    seconds = config.engine.http_control_timeout_seconds

    def info(url: str) -> Any:
        return request(url + api.SERVER_INFO, timeout_seconds=seconds, waiter="the trainer")

    replies = in_parallel(info, [endpoint.url for endpoint in endpoints])
    facts = [_facts(endpoint, reply) for endpoint, reply in zip(endpoints, replies, strict=True)]
    replay = config.algorithm.use_rollout_routing_replay
    modes = [choose_pause_mode(asked, engine, routing_replay=replay) for engine in facts]
    return modes[0] if len(set(modes)) == 1 else "abort"  # what every engine can do


def _facts(endpoint: EngineEndpoint, info: Any) -> RetractionFacts:
    if endpoint.backend == "embedded":
        return RetractionFacts(name=endpoint.name, flushes_past_waiting=True, keeps_routes=True)
    version = str(cast("Mapping[str, Any]", info).get("version")) if isinstance(info, Mapping) else "unknown"
    digits = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    is_new = digits is not None and tuple(int(d) for d in digits.groups()) >= _FLUSHES_PAST_WAITING
    name = f"{endpoint.name} (SGLang {version})"
    return RetractionFacts(name=name, flushes_past_waiting=is_new, keeps_routes=False)
