"""What only one of the two loops can do: training in turn with generation, or while rollouts are generated ahead."""

from __future__ import annotations

from slime.config.draft import Draft

_OF_AHEAD = ("update_weights_during_rollout", "async_buffer_size")


def check_loop(draft: Draft) -> None:
    """Refuse what needs turns where there are none, and name what is for generation ahead where there is none."""
    if draft.surroundings.loop == "ahead":
        _ahead(draft)
    elif draft.surroundings.loop == "in turn":
        draft.notices += [
            f"{draft.flag_of(name)} has no effect in train.py; use train_async.py"
            for name in _OF_AHEAD
            if name in draft.given
        ]


def _ahead(draft: Draft) -> None:
    if draft.cluster.colocate:
        draft.problems.append("train_async.py generates while it trains, so --colocate is not possible; use train.py")
    if draft.cluster.offload_rollout and draft.given & {"offload", "offload_rollout"}:  # not as --colocate implies it
        draft.problems.append(
            "train_async.py generates while it trains, so the engines keep their memory: remove --offload-rollout "
            "(--offload implies it), or use train.py"
        )
