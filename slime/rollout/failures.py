"""Failed samples: recorded as data, and counted against a limit.

Owns what becomes of a sample whose plug-in or request failed. A failed sample stays in its
group, so that batch sizes hold, with a zero loss mask, reward 0 and the reason in
``metadata["error"]``. It has no part in the baseline of its group nor in reward metrics. Tests
hold that one failure costs one sample and that too many stop the run.
"""

from __future__ import annotations

import logging
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from slime.errors import SlimeError
from slime.rewards.grade import zero_reward
from slime.types import Sample, Status

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 500

_PACKAGE_DIR = str(Path(__file__).resolve().parents[1])
_LIBRARY_DIRS = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])


class TooManyFailuresError(SlimeError, RuntimeError):
    """More samples of one rollout failed than may; the message shows the last failure."""


class FailureBudget:
    """Counts the failed samples of one rollout.

    Args:
        num_samples: Samples that the rollout is to deliver.
        max_share: Share of them that may fail; one always may.
    """

    def __init__(self, num_samples: int, max_share: float) -> None:
        self._num_samples = num_samples
        self._max_share = max_share
        self._max_failed = max(1, int(num_samples * max_share))
        self.num_failed = 0

    def record(self, args: Any, sample: Sample, error: Exception, *, stage: str) -> None:
        """Turn ``sample`` into a failed one and count it.

        Args:
            args: Flat argument view (reward keys).
            sample: The sample; its response is kept if its columns are consistent.
            error: What was raised.
            stage: What was being done, such as ``generate`` or ``reward``.

        Raises:
            TooManyFailuresError: The limit is exceeded.
        """
        self.num_failed += 1
        where = describe_failure(error, stage)
        sample.status = Status.FAILED
        sample.metadata = {**sample.metadata, "error": where}
        sample.remove_sample = True
        sample.reward = zero_reward(args.reward_key, args.eval_reward_key)
        place = f"{where['file']}:{where['line']}"
        # The stack of the first failure is enough to act on; the rest would flood the log.
        logger.warning(
            "sample %s failed in %s at %s: %s: %s (kept without loss; %d failed so far)",
            *(sample.index, stage, place, where["type"], where["message"], self.num_failed),
            exc_info=error if self.num_failed == 1 else None,
        )
        if self.num_failed > self._max_failed:
            raise TooManyFailuresError(
                f"{self.num_failed} samples failed while the rollout delivers {self._num_samples}; "
                f"--max-failed-sample-share {self._max_share:g} allows {self._max_failed}. The last one failed in "
                f"{stage} at {place}: {where['type']}: {where['message']}"
            ) from error


def describe_failure(error: Exception, stage: str) -> dict[str, Any]:
    """Stage, type, message, and the file and line of the innermost frame that is the user's.

    Frames of slime and of installed libraries are passed over when any other exists.
    """
    frames = traceback.extract_tb(error.__traceback__)
    library = (_PACKAGE_DIR, *_LIBRARY_DIRS)
    own = [f for f in frames if not f.filename.startswith(library)]
    frame = (own or list(frames) or [None])[-1]
    return {
        "stage": stage,
        "type": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE_CHARS],
        "file": frame.filename if frame else "",
        "line": frame.lineno if frame else 0,
    }


def reset_response(sample: Sample, prompt_ids: list[int], filler_id: int) -> None:
    """Empty the response of a failed sample down to one masked filler token.

    One token, because a sequence without any response token has no place in a packed batch.

    Args:
        sample: The sample.
        prompt_ids: Tokens of its prompt; empty if the prompt could not be tokenised.
        filler_id: Any valid token id.
    """
    clear_response(sample)
    sample.tokens = [*(prompt_ids or [filler_id]), filler_id]
    sample.response_length = 1
    sample.loss_mask = [0]
    sample.rollout_log_probs = [0.0]


def clear_response(sample: Sample) -> None:
    """Take a sample back to its prompt: no tokens, no response, pending."""
    sample.tokens = []
    sample.response = ""
    sample.response_length = 0
    sample.loss_mask = None
    sample.rollout_log_probs = None
    sample.teacher_log_probs = None
    sample.rollout_top_p_token_ids = None
    sample.rollout_top_p_token_offsets = None
    sample.rollout_routed_experts = None
    sample.weight_versions = []
    sample.weight_version_spans = []
    sample.reward = None
    sample.status = Status.PENDING
