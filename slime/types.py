"""The values that travel through one step: samples, groups, batches.

Owns the record types every layer shares and the invariants of their columns. It leaves out how
any of them is produced. Tests hold: a ``Sample`` survives ``to_dict`` / ``from_dict``; every
response-aligned column has ``response_length`` entries after ``append_response_tokens``; a
``RolloutBatch`` refuses columns of unequal length.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


class Status(Enum):
    """Life of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class SampleArgs(Protocol):
    """What the methods of ``Sample`` read from the flat argument view."""

    reward_key: str | None


@dataclass
class SpecInfo:
    """Counters of speculative decoding, summed over the generation calls of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        """Accepted over drafted tokens; 0 when nothing was drafted."""
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        """Completion tokens per verification step; 0 when nothing was verified."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counters of one engine reply."""
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num", 0))
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num", 0))
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct", 0))
        self.completion_token_num += int(meta_info.get("completion_tokens", 0))


@dataclass
class PrefixCacheInfo:
    """How much of the prompts the engine found in its prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Cached share of all prompt tokens; 0 when there were none."""
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counters of one engine reply."""
        self.cached_tokens += int(meta_info.get("cached_tokens", 0))
        self.total_prompt_tokens += int(meta_info.get("prompt_tokens", 0))


@dataclass
class Sample:
    """One prompt with one response, from the data source to the trainer.

    Response-aligned columns (``loss_mask``, ``rollout_log_probs``) have ``response_length``
    entries; ``tokens`` is prompt followed by response. Samples that share ``rollout_id`` are
    segments of one trajectory and count as one unit in batching and in the loss.
    """

    Status = Status
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list[int])
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: int | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list[str])
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Int32Array | None = None
    rollout_top_p_token_offsets: Int32Array | None = None
    rollout_routed_experts: Int32Array | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: SampleArgs) -> float:
        """The scalar reward: ``reward`` itself, or its entry under ``--reward-key``."""
        if args.reward_key and isinstance(self.reward, dict):
            return self.reward[args.reward_key]
        return self.reward  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """All fields and any attribute set by user code; status as its string, infos as dicts."""
        data = dict(vars(self))
        data["status"] = self.status.value
        data["spec_info"] = asdict(self.spec_info)
        data["prefix_cache_info"] = asdict(self.prefix_cache_info)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Inverse of ``to_dict``; unknown keys become attributes; ``data`` is not changed."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        if not isinstance(values.get("status", Status.PENDING), Status):
            values["status"] = Status(values["status"])
        if isinstance(values.get("spec_info"), Mapping):
            values["spec_info"] = SpecInfo(**values["spec_info"])
        if isinstance(values.get("prefix_cache_info"), Mapping):
            values["prefix_cache_info"] = PrefixCacheInfo(**values["prefix_cache_info"])
        sample = cls(**values)
        for key, value in data.items():
            if key not in known:
                setattr(sample, key, value)
        return sample

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append one span of response tokens and keep every aligned column in step.

        Args:
            args: Flat argument view; only ``sglang_speculative_algorithm`` is read from it.
            tokens: ``[n]`` new token ids.
            log_probs: ``[n]`` engine log-probs; required for trainable tokens, refused otherwise.
            trainable: Whether the span gets loss mask 1.
            meta_info: Engine reply; top-p sets, routed experts, counters, finish reason.
            text: Decoded span; appended to ``response`` even when ``tokens`` is empty.
            update_terminal_info: Whether status, counters and weight version follow ``meta_info``.

        Raises:
            ValueError: A column would lose its alignment with the response.
        """
        meta_info = meta_info or {}
        span = [int(t) for t in tokens]
        self._append_columns(span, log_probs, trainable)
        self._append_top_p(len(span), trainable, meta_info)
        self.tokens = list(self.tokens) + span
        self.response_length += len(span)
        if text is not None:
            self.response += text
        self._set_routed_experts(meta_info)
        if update_terminal_info and meta_info:
            self._apply_terminal_info(args, meta_info)
        self.check_alignment()

    def _append_columns(self, span: list[int], log_probs: Sequence[float] | None, trainable: bool) -> None:
        if log_probs is not None and len(log_probs) != len(span):
            raise ValueError(f"{len(span)} tokens come with {len(log_probs)} log-probs; the numbers must be equal")
        if not span:
            return
        if trainable and log_probs is None:
            raise ValueError("trainable response tokens need log_probs; pass trainable=False for environment tokens")
        if not trainable and log_probs is not None:
            raise ValueError("non-trainable tokens carry no log_probs; zeros are recorded for them")
        earlier = self.response_length
        if self.rollout_log_probs is None:
            if earlier and trainable:
                raise ValueError(f"the first {earlier} response tokens have no log-probs, so none can be appended")
            self.rollout_log_probs = [0.0] * earlier
        mask = [1] * earlier if self.loss_mask is None else list(self.loss_mask)
        self.loss_mask = mask + [int(trainable)] * len(span)
        new = [0.0] * len(span) if log_probs is None else [float(p) for p in log_probs]
        self.rollout_log_probs = list(self.rollout_log_probs) + new

    def _append_top_p(self, n: int, trainable: bool, meta_info: Mapping[str, Any]) -> None:
        ids = _int32_column(meta_info, "top_p_token_ids", "top_p_kept_token_ids")
        offsets = _int32_column(meta_info, "top_p_token_offsets", "top_p_kept_token_offsets")
        if (ids is None) != (offsets is None):
            raise ValueError("top-p token ids and offsets come together or not at all")
        if ids is None or offsets is None:
            if self.rollout_top_p_token_offsets is not None and n and not trainable:
                last = self.rollout_top_p_token_offsets[-1]
                pad = np.full(n, last, dtype=np.int32)
                self.rollout_top_p_token_offsets = np.concatenate([self.rollout_top_p_token_offsets, pad])
            return
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
            raise ValueError(
                f"top-p offsets must start at 0, end at {len(ids)} and have {n + 1} entries; "
                f"found {len(offsets)} entries, {offsets[:1].tolist()} to {offsets[-1:].tolist()}"
            )
        if self.rollout_top_p_token_ids is None or self.rollout_top_p_token_offsets is None:
            self.rollout_top_p_token_ids = np.zeros(0, dtype=np.int32)
            self.rollout_top_p_token_offsets = np.zeros(self.response_length + 1, dtype=np.int32)
        shift = self.rollout_top_p_token_offsets[-1]
        self.rollout_top_p_token_ids = np.concatenate([self.rollout_top_p_token_ids, ids])
        self.rollout_top_p_token_offsets = np.concatenate([self.rollout_top_p_token_offsets, offsets[1:] + shift])

    def _set_routed_experts(self, meta_info: Mapping[str, Any]) -> None:
        found = meta_info.get("routed_experts")
        if found is None:
            return
        if not isinstance(found, np.ndarray) or found.ndim != 3:  # pyright: ignore[reportUnknownMemberType]
            raise ValueError("routed_experts must be an int array [tokens, layers, top-k]; decode the reply first")
        rows = np.asarray(found, dtype=np.int32)
        start = int(meta_info.get("routed_experts_start_len", 0))
        if start and self.rollout_routed_experts is not None:
            rows = np.concatenate([self.rollout_routed_experts[:start], rows])
        self.rollout_routed_experts = rows

    def _apply_terminal_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        if args is not None and args.sglang_speculative_algorithm:
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        finish: Mapping[str, Any] = meta_info.get("finish_reason") or {}
        reason = str(finish.get("type"))
        status = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}.get(reason)
        if status is not None:
            self.status = status

    def check_alignment(self) -> None:
        """Raise ValueError unless every response-aligned column fits ``response_length``."""
        lengths = {
            "loss_mask": self.loss_mask,
            "rollout_log_probs": self.rollout_log_probs,
            "teacher_log_probs": self.teacher_log_probs,
        }
        for name, column in lengths.items():
            if column is not None and len(column) != self.response_length:
                raise ValueError(f"{name} has {len(column)} entries, the response {self.response_length} tokens")
        offsets = self.rollout_top_p_token_offsets
        if offsets is not None and len(offsets) != self.response_length + 1:
            raise ValueError(f"top-p offsets have {len(offsets)} entries, expected {self.response_length + 1}")
        experts = self.rollout_routed_experts
        if experts is not None and len(experts) != len(self.tokens) - 1:
            raise ValueError(f"routed experts have {len(experts)} rows, expected {len(self.tokens) - 1}")


def _int32_column(meta_info: Mapping[str, Any], *names: str) -> Int32Array | None:
    """First present column of ``names``, decoded from base64, bytes or a list."""
    for name in names:
        value = meta_info.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            value = base64.b64decode(value)
        if isinstance(value, bytes):
            return np.frombuffer(value, dtype=np.int32).copy()
        return np.asarray(value, dtype=np.int32)
    return None


Group = list[Sample]
"""One prompt with its ``n_samples_per_prompt`` samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """Name, dtype and global shape of one model parameter."""

    name: str
    dtype: Any
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """What one rollout hands to training: one entry per sample in every column.

    N samples, L_i total and R_i response tokens of sample i. ``rollout_mask_sums[i]`` is the sum
    of loss masks over all samples with the same ``rollout_ids[i]``, so that a loss can weigh each
    trajectory once without seeing the rest of it.
    """

    rollout_id: int
    tokens: list[Int32Array]  # N x [L_i]
    response_lengths: list[int]  # N
    loss_masks: list[Float32Array]  # N x [R_i], 0 or 1
    rewards: list[float]  # N, after group normalisation
    raw_rewards: list[float]  # N, as graded
    truncated: list[bool]  # N
    sample_indices: list[int]  # N
    group_ids: list[int]  # N
    rollout_ids: list[int]  # N
    rollout_mask_sums: list[float]  # N
    weight_versions: list[tuple[str, ...]]  # N
    rollout_log_probs: list[Float32Array] | None = None  # N x [R_i]
    teacher_log_probs: list[Float32Array] | None = None  # N x [R_i]
    values: list[Float32Array] | None = None  # N x [R_i], the critic's, before its update
    returns: list[Float32Array] | None = None  # N x [R_i], what the critic is trained towards
    metadata: list[dict[str, Any] | None] | None = None
    extra: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])

    def __post_init__(self) -> None:
        n = len(self.tokens)
        for column in fields(self):
            value = getattr(self, column.name)
            if isinstance(value, list):
                entries = cast(list[Any], value)
                if len(entries) != n:
                    raise ValueError(f"column {column.name} has {len(entries)} entries, tokens has {n}")
        for name, column in self.extra.items():
            if len(column) != n:
                raise ValueError(f"extra column {name} has {len(column)} entries, tokens has {n}")
        for name in ("loss_masks", "rollout_log_probs", "teacher_log_probs", "values", "returns"):
            rows = getattr(self, name)
            for i, (row, length) in enumerate(zip(rows or [], self.response_lengths if rows else [], strict=True)):
                if len(row) != length:
                    raise ValueError(f"{name}[{i}] has {len(row)} entries, response_lengths[{i}] is {length}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lengths(self) -> list[int]:
        """Prompt plus response tokens of each sample."""
        return [len(t) for t in self.tokens]
