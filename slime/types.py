"""The values that travel through one step: samples, groups, batches.

Owns the record types every layer shares and the invariants of their columns. It leaves out how
any of them is produced. Tests hold: a ``Sample`` survives ``to_dict`` / ``from_dict``; every
response-aligned column has ``response_length`` entries after ``append_response_tokens``; a
``RolloutBatch`` refuses columns of unequal length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from slime.replay_data import Int32Array, append_kept_tokens, check_kept_tokens, splice_routes
from slime.version_spans import VersionSpan, append_spans, check_spans, clip_spans, spans_of_reply

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
    entries; ``tokens`` is prompt followed by response. ``weight_version_spans`` says which weights
    generated which response tokens; ``weight_versions`` names them call by call. Samples that share
    ``rollout_id`` are segments of one trajectory and count as one unit in batching and in the loss.
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
    weight_version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
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
        """All fields and any attribute set by user code; status as its string, infos and spans as dicts."""
        data = dict(vars(self))
        data["status"] = self.status.value
        data["spec_info"] = asdict(self.spec_info)
        data["prefix_cache_info"] = asdict(self.prefix_cache_info)
        data["weight_version_spans"] = [asdict(span) for span in self.weight_version_spans]
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
        values["weight_version_spans"] = [
            span if isinstance(span, VersionSpan) else VersionSpan(**span)
            for span in cast("Sequence[Any]", values.get("weight_version_spans") or ())
        ]
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
            args: Flat argument view; ``sglang_speculative_algorithm`` is read from it, and the model's layers and
                top-k when ``meta_info`` has routed experts as flat values.
            tokens: ``[n]`` new token ids.
            log_probs: ``[n]`` engine log-probs; required for trainable tokens, refused otherwise.
            trainable: Whether the span gets loss mask 1.
            meta_info: Engine reply; top-p sets, routed experts, counters, finish reason.
            text: Decoded span; appended to ``response`` even when ``tokens`` is empty.
            update_terminal_info: Whether status, counters and weight versions follow ``meta_info``.

        Raises:
            ValueError: A column would lose its alignment with the response.
        """
        meta_info = meta_info or {}
        span = [int(t) for t in tokens]
        self._append_columns(span, log_probs, trainable)
        self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = append_kept_tokens(
            self.rollout_top_p_token_ids,
            self.rollout_top_p_token_offsets,
            earlier=self.response_length,
            count=len(span),
            trainable=trainable,
            meta_info=meta_info,
        )
        self.tokens = list(self.tokens) + span
        self.response_length += len(span)
        if text is not None:
            self.response += text
        self.rollout_routed_experts = splice_routes(
            self.rollout_routed_experts, num_tokens=len(self.tokens), meta_info=meta_info, args=args
        )
        if trainable:
            self._note_versions(span, meta_info)
        if update_terminal_info and meta_info:
            self._apply_terminal_info(args, meta_info)
        self.check_alignment()

    def _note_versions(self, span: list[int], meta_info: Mapping[str, Any]) -> None:
        """Note the weights of the last ``span`` tokens, which an engine generated."""
        earlier = self.response_length - len(span)
        # Functions of users shorten a response or start again without a word to this column.
        known = clip_spans(self.weight_version_spans, earlier)
        self.weight_version_spans = append_spans(known, spans_of_reply(meta_info, len(span)), earlier)

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

    def _apply_terminal_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        if args is not None and args.sglang_speculative_algorithm:
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        called = [str(row["version"]) for row in meta_info.get("weight_versions") or ()]
        if not called and "weight_version" in meta_info:
            called = [str(meta_info["weight_version"])]
        self.weight_versions.extend(called)
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

    ``rollout_top_p_token_ids[i]`` are the kept token sets of the response one after another:
    response token t was drawn from ``ids[offsets[t]:offsets[t + 1]]``, which holds it; an empty set
    means that nothing was cut. ``rollout_log_probs`` are then those of the cut distribution. Row t of
    ``rollout_routed_experts[i]`` are the experts of token t in every layer, -1 (``UNROUTED``) where no
    engine has routed it and 0 in dense layers; the last token was never run and has no row. Samples
    without a record in a batch that has some get empty sets and -1. ``weight_version_spans[i]`` are empty
    where nobody recorded which weights generated the tokens.
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
    weight_version_spans: list[tuple[VersionSpan, ...]] | None = None  # N, over the R_i response tokens
    rollout_log_probs: list[Float32Array] | None = None  # N x [R_i]
    teacher_log_probs: list[Float32Array] | None = None  # N x [R_i]
    values: list[Float32Array] | None = None  # N x [R_i], the critic's, before its update
    returns: list[Float32Array] | None = None  # N x [R_i], what the critic is trained towards
    rollout_top_p_token_ids: list[Int32Array] | None = None  # N x [K_i]
    rollout_top_p_token_offsets: list[Int32Array] | None = None  # N x [R_i + 1], from 0 to K_i
    rollout_routed_experts: list[Int32Array] | None = None  # N x [L_i - 1, layers, top-k]
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
        for i, spans in enumerate(self.weight_version_spans or []):
            try:
                check_spans(spans, self.response_lengths[i])
            except ValueError as error:
                raise ValueError(f"weight_version_spans[{i}]: {error}") from None
        self._check_replay_columns()

    def _check_replay_columns(self) -> None:
        ids, offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if (ids is None) != (offsets is None):
            raise ValueError("rollout_top_p_token_ids and rollout_top_p_token_offsets come together or not at all")
        if ids is not None and offsets is not None:
            for i, (tokens, length) in enumerate(zip(self.tokens, self.response_lengths, strict=True)):
                try:
                    check_kept_tokens(ids[i], offsets[i], tokens[len(tokens) - length :])
                except ValueError as error:
                    raise ValueError(f"rollout_top_p_token_ids[{i}]: {error}") from None
        routes = self.rollout_routed_experts or []
        for i, row in enumerate(routes):
            if row.shape != (len(self.tokens[i]) - 1, *routes[0].shape[1:]) or row.ndim != 3:
                raise ValueError(
                    f"rollout_routed_experts[{i}] has shape {list(row.shape)}; expected "
                    f"[{len(self.tokens[i]) - 1}, layers, top-k] with the layers and top-k of the other samples"
                )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total_lengths(self) -> list[int]:
        """Prompt plus response tokens of each sample."""
        return [len(t) for t in self.tokens]
