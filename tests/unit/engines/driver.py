"""Drives a scheduler without threads or HTTP: submit requests, step until they are done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.engines.api import parse_generate
from slime.engines.embedded.model import Decoder
from slime.engines.embedded.request import Progress, Request
from slime.engines.embedded.scheduler import Scheduler
from slime.engines.embedded.shape import read_shape
from slime.engines.embedded.text import StopScanner, Text


class Driver:
    """One model with its scheduler; keyword arguments replace the scheduler's defaults."""

    def __init__(self, path: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.shape = read_shape(path)
        self.model = Decoder(self.shape, dtype=dtype, device=torch.device("cpu"))
        self.model.weights.load(path)
        self.text = Text(str(path))
        defaults = {"max_total_tokens": 100_000, "max_running_requests": 64, "prefill_tokens": 512}
        self.scheduler = Scheduler(self.model, **(defaults | {"share_from_tokens": 256} | options))
        self.events: list[Progress] = []

    def submit(self, prompt: Sequence[int], **body: Any) -> Request:
        """Queue one sample; ``body`` has sampling keys under ``sampling`` and other ``/generate`` fields."""
        sampling = body.pop("sampling", {})
        fields = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True} | body
        item = parse_generate(fields).items[0]
        params = item.sampling
        number = len(self.events) + self.scheduler.num_running + len(self.scheduler.waiting)
        request = Request(
            rid=f"r{number}",
            parent_rid=f"r{number}",
            item=item,
            prompt=np.array(prompt, dtype=np.int32),
            seed=params.sampling_seed if params.sampling_seed is not None else number,
            stop_ids=frozenset(params.stop_token_ids) | (set() if params.ignore_eos else set(self.shape.eos_token_ids)),
            scanner=StopScanner(self.text, params) if params.stop or params.stop_regex else None,
            notify=self.events.append,
        )
        self.scheduler.submit(request)
        return request

    def run(self, steps: int | None = None) -> None:
        """Step until nothing is left, or ``steps`` times."""
        done = 0
        while self.scheduler.has_work and (steps is None or done < steps):
            self.scheduler.step()
            done += 1
            assert done < 5000, "the scheduler does not come to an end"

    def generate(self, prompt: Sequence[int], **body: Any) -> Request:
        """One sample on its own."""
        request = self.submit(prompt, **body)
        self.run()
        assert request.finish is not None
        return request


GREEDY = {"temperature": 0.0, "ignore_eos": True}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny models' byte range."""
    return np.random.default_rng(seed).integers(0, 256, length).tolist()
