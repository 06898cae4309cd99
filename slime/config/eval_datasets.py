"""Evaluation sets: their settings, where each one comes from, and the file that may hold them.

Precedence per field: the set's own entry, then ``defaults``, then the flags in the order of the field's
chain. Tests hold that order for every field with a chain.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from slime.config.yaml_file import read_yaml
from slime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalDatasetConfig:
    """One evaluation set with every setting resolved. Lengths in tokens, time-outs in seconds."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    min_new_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: Mapping[str, Any] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    app_service: str | None = None
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: str | None = None
    reward_model: str | None = None
    remote_environment: str | None = None
    metadata_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if self.min_eval_samples is not None and self.min_eval_samples <= 0:
            raise ConfigError(
                f"evaluation set {self.name}: min_eval_samples must be > 0, found {self.min_eval_samples}"
            )
        if self.n_samples_per_eval_prompt < 1:
            raise ConfigError(f"evaluation set {self.name}: n_samples_per_eval_prompt must be at least 1")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, (value,) if isinstance(value, str | int) else tuple(value))

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Equal for sets whose rows read and tokenize to the same thing."""
        return (
            self.name,
            self.path,
            self.input_key,
            self.label_key,
            self.tool_key,
            self.metadata_key,
            json.dumps(self.multimodal_keys, sort_keys=True),
            self.apply_chat_template,
            json.dumps(self.apply_chat_template_kwargs, sort_keys=True),
        )

    def inject_metadata(self, sample_metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """Copy of a row's metadata with this set's overrides and its ``rm_type``."""
        metadata = dict(sample_metadata or {})
        metadata.update(self.metadata_overrides)
        if self.rm_type is not None:
            metadata["rm_type"] = self.rm_type
        return metadata


_CHAINS: Mapping[str, tuple[str, ...]] = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", "n_samples_per_prompt"),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "min_new_tokens": ("eval_min_new_tokens",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "custom_rm_path": ("eval_custom_rm_path", "custom_rm_path"),
}
"""Field -> flags (attribute names) it falls back to, first set one wins."""

_FIELDS = frozenset(f.name for f in fields(EvalDatasetConfig))


def build_eval_dataset_configs(
    args: Any, raw_config: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any] | None = None
) -> list[EvalDatasetConfig]:
    """Resolve evaluation sets.

    Args:
        args: Flat flags; every name in the chains is read from it.
        raw_config: One mapping per set, with at least ``name`` and ``path``.
        defaults: Settings for all sets; ``name`` and ``path`` are not among them.

    Raises:
        ConfigError: Unknown or missing keys.
    """
    defaults = dict(defaults or {})
    unknown = sorted(set(defaults) - (_FIELDS - {"name", "path"}))
    problems = [
        f"evaluation defaults: unknown key {key}; known are {', '.join(sorted(_CHAINS))} ..." for key in unknown
    ]
    result: list[EvalDatasetConfig] = []
    for position, raw in enumerate(raw_config):
        label = f"evaluation set {raw.get('name', position)}"
        bad = [f"{label}: unknown key {key}" for key in raw if key not in _FIELDS]
        bad += [f"{label}: {key} is missing" for key in ("name", "path") if not raw.get(key)]
        problems += bad
        if bad or unknown:
            continue
        values: dict[str, Any] = {**defaults, **raw}
        for key, chain in _CHAINS.items():
            if key in values:
                continue
            found = next((v for v in (getattr(args, name) for name in chain) if v is not None), None)
            if found is not None:
                values[key] = found
        try:
            result.append(EvalDatasetConfig(**values))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return result


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """``datasets`` of an evaluation file as a list: a list of mappings, or name -> mapping or path.

    Raises:
        ConfigError: Any other shape.
    """
    if isinstance(config, Mapping):
        entries: list[dict[str, Any]] = []
        for name, value in cast("Mapping[str, Any]", config).items():
            body = {"path": value} if isinstance(value, str) else dict(value)
            entries.append({"name": str(name), **body})
        return entries
    if isinstance(config, Sequence) and not isinstance(config, str):
        items = cast("Sequence[Any]", config)
        if all(isinstance(item, Mapping) for item in items):
            return [dict(item) for item in items]
    raise ConfigError("evaluation datasets must be a list of mappings, or a mapping of name to path or settings")


def read_eval_file(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read ``--eval-config``: defaults and sets.

    Raises:
        ConfigError: Missing, not YAML, or without datasets.
    """
    content = read_yaml(path, f"--eval-config {path}")
    if not isinstance(content, Mapping):
        raise ConfigError(f"--eval-config {path}: must be a mapping with defaults and datasets")
    root = cast("Mapping[str, Any]", content)
    body = root.get("eval", root)
    if not isinstance(body, Mapping) or not cast("Mapping[str, Any]", body).get("datasets"):
        raise ConfigError(f"--eval-config {path}: names no datasets")
    body = cast("Mapping[str, Any]", body)
    return dict(body.get("defaults") or {}), ensure_dataset_list(body["datasets"])


def pairs_from_flag(values: Sequence[str]) -> list[dict[str, Any]]:
    """``NAME PATH NAME PATH ...`` as sets; one lone value is a path named ``aime``.

    Raises:
        ConfigError: An odd number of values above one.
    """
    if len(values) == 1:
        return [{"name": "aime", "path": values[0]}]
    if len(values) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs NAME PATH, found {len(values)} values: {' '.join(values)}; "
            "add the missing name or path"
        )
    return [{"name": n, "path": p} for n, p in zip(values[::2], values[1::2], strict=True)]
