"""``args`` for rollout tests: a real ``Config`` with the given flags, and a ``RolloutContext`` on a given engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.config import ArgsView, Config
from slime.config.eval_datasets import EvalDatasetConfig
from slime.config.schema import SECTIONS
from slime.rollout.context import RolloutContext
from slime.types import Sample

QUICK = {
    "http_connect_timeout_seconds": 2.0,
    "http_request_timeout_seconds": 20.0,
    "http_control_timeout_seconds": 5.0,
    "abort_timeout_seconds": 3.0,
}


def make_args(model_path: Path, url: str, *, custom: dict[str, Any] | None = None, **flags: Any) -> ArgsView:
    """Flat arguments with ``flags`` by their attribute names; ``url`` is the router's."""
    values: dict[str, Any] = {
        "hf_checkpoint": str(model_path),
        "rollout_max_response_len": 16,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rm_type": "random",
        "rollout_num_gpus": 1,
        **QUICK,
        **flags,
    }
    sections = {}
    for name, section in SECTIONS.items():
        own = {key: values.pop(key) for key in list(values) if key in section.__dataclass_fields__}
        sections[name] = section(**own)
    assert not values, f"no such flags: {sorted(values)}"
    config = dataclasses.replace(Config(**sections), custom=custom or {})
    address = urlsplit(url)
    return ArgsView(config).with_facts(sglang_router_ip=address.hostname, sglang_router_port=address.port)


@contextmanager
def open_context(model_path: Path, url: str, **flags: Any) -> Iterator[RolloutContext]:
    """An open context that is active, as around a rollout function."""
    with RolloutContext.open(make_args(model_path, url, **flags)) as context, context.activate():
        yield context


def eval_set(name: str, path: Path, **settings: Any) -> EvalDatasetConfig:
    """An evaluation set with every setting resolved as the command line would."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_response_len": 8, "input_key": "input"}
    return EvalDatasetConfig(name=name, path=str(path), **{**defaults, "metadata_key": "metadata", **settings})


class ListSource:
    """A data source over a list of prompts, endless unless told otherwise; remembers what is put back."""

    def __init__(self, prompts: Sequence[Any], n_samples: int, *, label: Any = None, limit: int | None = None) -> None:
        self.prompts = list(prompts)
        self.n_samples = n_samples
        self.label = label
        self.limit = limit
        self.drawn = 0
        self.returned: list[list[Sample]] = []

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        """Returned groups first, then the next prompts."""
        groups, self.returned = self.returned[:num_groups], self.returned[num_groups:]
        while len(groups) < num_groups and (self.limit is None or self.drawn < self.limit):
            prompt = self.prompts[self.drawn % len(self.prompts)]
            first = self.drawn * self.n_samples
            groups.append(
                [
                    Sample(
                        prompt=[dict(m) for m in prompt] if isinstance(prompt, list) else prompt,
                        label=self.label,
                        group_index=self.drawn,
                        index=first + i,
                    )
                    for i in range(self.n_samples)
                ]
            )
            self.drawn += 1
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Keep unfinished groups for the next call."""
        self.returned.extend(groups)
