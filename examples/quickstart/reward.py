"""The quickstart's reward: 1 when the last number of the answer is the label, else 0."""

import re
from typing import Any

from slime.types import Sample

NUMBER = re.compile(r"\d+")


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Score one answer.

    Args:
        args: the run's flags; not needed here.
        sample: a finished sample with ``response`` and ``label``.
        **kwargs: accepted so that later callers may pass more.

    Returns:
        1.0 or 0.0.
    """
    numbers = NUMBER.findall(sample.response)
    return float(bool(numbers) and numbers[-1] == str(sample.label))
