"""Log-probs of a teacher that is an inference server: on-policy distillation with ``--opd-type sglang``.

Two functions under the established path ``slime.rollout.on_policy_distillation``: the reward function
asks the server at ``--rm-url`` for the log-probs of prompt and response, the post-processing puts those
of the response into ``sample.teacher_log_probs``. Tests hold, against a real engine: what arrives are the
teacher's log-probs of exactly the sample's response tokens, or an error that says what is wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from slime.data.batch import baseline_rewards, flatten_groups
from slime.data.columns import fill_missing_ids
from slime.errors import ConfigError, DataError
from slime.rollout.established import post
from slime.types import Sample, Status

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6  # a server that restarts; --rm-timeout bounds the whole call


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """Ask the teacher for the log-probs of a finished sample.

    For a task reward besides, call it in a function of your own and add the reward to the reply under
    ``--reward-key``. Transient faults are retried; ``--rm-timeout`` bounds the call.

    Args:
        args: Flat arguments; reads ``rm_url`` and ``rollout_temperature``.
        sample: With ``tokens``.
        **kwargs: Accepted and not read.

    Returns:
        The server's reply, for ``post_process_rewards``.

    Raises:
        ConfigError: There is no ``--rm-url``.
        EngineError: The server refuses the request, e.g. because the sample is too long for it.
        WaitTimeoutError: It cannot be reached.
    """
    if not args.rm_url:
        raise ConfigError(
            "on-policy distillation from a server needs its address: give --rm-url http://host:port/generate"
        )
    payload = {
        "input_ids": [int(token) for token in sample.tokens],
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    reply = await post(args.rm_url, payload, max_retries=MAX_ATTEMPTS)
    if not isinstance(reply, dict):
        raise DataError(f"--rm-url {args.rm_url} answered with {reply!r:.200}; expected the reply of POST /generate")
    return cast("dict[str, Any]", reply)


def post_process_rewards(args: Any, samples: Sequence[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """Move the teacher's log-probs from the replies into the samples.

    A sample whose generation or reply failed, or came too late, is taken out of training and counted.

    Args:
        args: Flat arguments; reads ``reward_key`` and the group baseline's switches.
        samples: Their rewards are replies of ``reward_func``, possibly with a task reward inside.
        **kwargs: Accepted and not read.

    Returns:
        Rewards as graded and as trained on: 0.0 without a task reward, which is compared within its
        prompt group as usual.

    Raises:
        DataError: A reply does not hold the log-probs of the sample's tokens, or no sample has one.
    """
    replies = [_reply_of(sample) for sample in samples]
    missing = [i for i, reply in enumerate(replies) if reply is None]
    if samples and len(missing) == len(samples):
        raise DataError(
            f"none of {len(samples)} samples has a reply of the teacher at --rm-url {args.rm_url}; each may take "
            f"--rm-timeout {args.rm_timeout:g} s, and --custom-rm-path must be its reward_func"
        )
    if missing:
        logger.warning("%d of %d samples have no reply of the teacher and are not trained", len(missing), len(samples))
    for sample, reply in zip(samples, replies, strict=True):
        if reply is None:
            sample.teacher_log_probs = [0.0] * sample.response_length
            sample.remove_sample = True
        else:
            sample.teacher_log_probs = response_log_probs(reply, sample)
    raw = [_task_reward(args, sample) for sample in samples]
    _, group_ids = flatten_groups(samples)
    rollout_ids = fill_missing_ids([sample.rollout_id for sample in samples])
    graded = [i for i, reply in enumerate(replies) if reply is not None]
    return raw, baseline_rewards(args, raw, group_ids, rollout_ids, graded)


def response_log_probs(reply: Mapping[str, Any], sample: Sample) -> list[float]:
    """The teacher's log-probs of the response tokens of ``sample``, from a reply about all its tokens.

    Raises:
        DataError: There are fewer than the response has tokens, they belong to other tokens, or a
            trained one has none.
    """
    where = f"sample {sample.index}: the teacher's reply"
    meta: Any = reply.get("meta_info")
    triples: Any = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
    if not isinstance(triples, Sequence):
        raise DataError(f"{where} has no meta_info.input_token_logprobs: {str(dict(reply))[:200]}")
    length = sample.response_length
    if not length:
        return []
    # The first token has no log-prob: nothing comes before it.
    scored = cast("Sequence[Any]", triples)[1:]
    tail = scored[-length:]
    if len(tail) < length:
        raise DataError(
            f"{where} has the log-probs of {len(scored)} tokens, and the response alone has {length}; did the server "
            "cut the prompt, or ignore logprob_start_len?"
        )
    ids = [int(triple[1]) for triple in tail]
    if ids != [int(token) for token in sample.tokens[-length:]]:
        raise DataError(
            f"{where} is about other tokens than the sample's; does the address belong to a /generate route?"
        )
    mask = sample.loss_mask or [1] * length
    values = [math.nan if triple[0] is None else float(triple[0]) for triple in tail]
    for position, (value, trained) in enumerate(zip(values, mask, strict=True)):
        if trained and not math.isfinite(value):
            raise DataError(f"{where} says {tail[position][0]!r} for response token {position} (id {ids[position]})")
    return [value if math.isfinite(value) else 0.0 for value in values]


def _reply_of(sample: Sample) -> Mapping[str, Any] | None:
    """The reply; None when grading failed or ran out of time, which leaves a zero reward."""
    reward: Any = sample.reward
    if sample.status is Status.FAILED or not isinstance(reward, Mapping) or "meta_info" not in reward:
        return None
    return cast("Mapping[str, Any]", reward)


def _task_reward(args: Any, sample: Sample) -> float:
    reward: Any = sample.reward
    return float(reward.get(args.reward_key, 0.0)) if isinstance(reward, Mapping) and args.reward_key else 0.0
