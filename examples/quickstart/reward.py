"""The quickstart's reward: 1 when the answer names the label and no other number, else 0.

With the last number of an answer as the criterion a model learns to repeat the question and where to break off.
"""

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
    return float(NUMBER.findall(sample.response) == [str(sample.label)])
