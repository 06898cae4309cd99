"""Prove that engines hold the weights that were sent: the checksums they compute over them are the expected ones.

Owns the questions to the engines, the comparison, and what is said about a difference. The expected checksums are
made while tensors are sent (``expected``); which tensors are asked about after which synchronisation is
``rotation``'s. Tests hold: a wrong value in any kind of tensor is named with its engine and process; what cannot be
compared is named once and always counted.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slime.engines import api
from slime.errors import EngineError, WeightSyncError
from slime.http_control import HttpStatusError
from slime.weights.control import EngineCalls
from slime.weights.digests import CpuDigest, CudaDigest
from slime.weights.endpoint import EngineEndpoint
from slime.weights.engine_answers import EngineKind, kind_of, not_comparable, ranks_of
from slime.weights.engine_names import EngineTable
from slime.weights.expected import Checksums, Expectation, FusedExpectation, PlainExpectation
from slime.weights.reset_check import ResetCheck
from slime.weights.rotation import Rotation

logger = logging.getLogger(__name__)

CHECK_SHARE = 0.08
"""Of the time of a synchronisation; with what this does not count, the check stays below a tenth."""

_NAMED = 5
_REFUSALS = (400, 404, 405)
_EVERYTHING = "every tensor"


@dataclass(slots=True, kw_only=True)
class Verification:
    """What one check found out; tensors are counted over all engines and their processes.

    Args:
        verified: Tensors whose checksum was the expected one.
        deferred: Tensors whose turn it is after a later synchronisation.
        unverified: Tensors that cannot be compared.
        seconds: What it took, besides the sending.
    """

    verified: int = 0
    deferred: int = 0
    unverified: int = 0
    seconds: float = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """Under their metric names."""
        return {
            "perf/update_weights_verified": float(self.verified),
            "perf/update_weights_deferred": float(self.deferred),
            "perf/update_weights_unverified": float(self.unverified),
            "perf/update_weights_verify_time": self.seconds,
        }


@dataclass(slots=True)
class _Engine:
    """One engine that is checked, and what is known of it.

    ``kind`` is the reason where its tensors cannot be compared; ``held`` maps (process, tensor) to the version and
    checksum of the last check; ``told`` are the tensors that the log has named.
    """

    endpoint: EngineEndpoint
    kind: EngineKind | str
    held: dict[tuple[int, str], tuple[str, str]] = field(default_factory=dict[tuple[int, str], tuple[str, str]])
    told: set[str] = field(default_factory=lambda: set())

    def tell(self, unknown: Mapping[str, str]) -> None:
        """Name what cannot be compared, each tensor once."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in unknown.items():
            if name not in self.told:
                by_reason.setdefault(reason, []).append(name)
        self.told |= unknown.keys()
        for reason, names in by_reason.items():
            logger.warning("%s: not verified, because %s: %s", self.endpoint.name, reason, ", ".join(names))


class WeightVerifier:
    """Checks a fixed set of engines after every synchronisation.

    Use it in this order: ``begin``; ``reset``; ``add`` or ``adding`` for every tensor; ``check``. The engines must be
    paused from ``reset`` until ``check`` has returned, or they answer with weights that are not proven.

    Args:
        calls: To the engines, which bounds what is asked by the deadline of each update.
        model: ``config.json`` of the model.
        share: Of the time of a synchronisation that checks may take; None checks everything every time.
        check_equal: Whether the first update must bring what the engines loaded from disk; see ``ResetCheck``.

    Raises:
        EngineError: An engine cannot be reached.
        WaitTimeoutError: An engine did not answer in time.
    """

    def __init__(
        self,
        calls: EngineCalls,
        *,
        model: Mapping[str, Any],
        share: float | None = CHECK_SHARE,
        check_equal: bool = False,
    ) -> None:
        self._calls = calls
        infos = calls.each(calls.server_info)
        self._engines = [
            _Engine(endpoint, kind_of(endpoint, info, model))
            for endpoint, info in zip(calls.endpoints, infos, strict=True)
        ]
        self._rotation = Rotation(share=share)
        self._reset_check = ResetCheck(calls) if check_equal else None
        self._expected: dict[EngineKind, Expectation] = {}
        self._version = api.INITIAL_WEIGHT_VERSION
        self._added = 0
        self._hash_seconds = 0.0
        self._has_parts = True

    def begin(self) -> None:
        """Forget the tensors of an earlier synchronisation, also of one that failed."""
        kinds = {engine.kind for engine in self._engines if isinstance(engine.kind, EngineKind)}
        self._expected = {} if self._rotation.is_idle else {kind: self._expectation(kind) for kind in kinds}
        self._added = 0
        self._hash_seconds = 0.0

    def reset(self) -> None:
        """Overwrite what the engines hold, where the first update is to be checked that way; before any is sent.

        Raises:
            WeightSyncError: An engine refused.
        """
        if self._reset_check is not None:
            self._reset_check.reset()

    def add(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Take tensors that are sent, whole and under their Hugging Face names."""
        for name, tensor in bucket:
            self._added += 1
            for expectation in self._expected.values():
                expectation.add(name, tensor)

    @contextlib.contextmanager
    def adding(self, bucket: Iterable[tuple[str, Tensor]]) -> Generator[None]:
        """The same while the body runs, which waits for the engines to take the tensors."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="checksums") as pool:
            added = pool.submit(self.add, bucket)
            yield
            waited = time.monotonic()
            added.result(self._calls.deadline.seconds_left)
            self._hash_seconds += time.monotonic() - waited

    def check(self, version: str, *, send_seconds: float) -> Verification:
        """Ask every engine and compare.

        Args:
            version: Of the weights that were sent.
            send_seconds: What the synchronisation took so far.

        Raises:
            WeightSyncError: An engine holds something else.
        """
        started = time.monotonic()
        result = Verification()
        sums = {kind: expectation.finish() for kind, expectation in self._expected.items()}
        for engine in self._engines:
            if isinstance(engine.kind, str):
                engine.tell({_EVERYTHING: engine.kind})
                result.unverified += self._added
        if sums:
            self._compare_all(sums, version, result)
        elif self._rotation.is_idle:
            result.deferred += self._added * sum(isinstance(engine.kind, EngineKind) for engine in self._engines)
        if self._reset_check is not None:
            self._reset_check.compare()
            self._reset_check = None
        result.seconds = time.monotonic() - started + self._hash_seconds
        self._rotation.learn(
            {name: size for found in sums.values() for name, size in found.sizes.items()},
            send_seconds=max(send_seconds - self._hash_seconds, 0.0),
            check_seconds=result.seconds,
            has_parts=self._has_parts,
        )
        self._version = version
        return result

    def _expectation(self, kind: EngineKind) -> Expectation:
        if kind.layout is None:
            return PlainExpectation(kind.dtype, self._rotation.wants)
        digest = CudaDigest if kind.is_cuda else CpuDigest
        return FusedExpectation(EngineTable(kind.layout), digest, kind.dtype, self._rotation.wants)

    def _compare_all(self, sums: Mapping[EngineKind, Checksums], version: str, result: Verification) -> None:
        body = {"action": "checksum", "selector": "target", "skip_tensor_list": self._rotation.skipped()}
        asked = [(engine, engine.kind) for engine in self._engines if isinstance(engine.kind, EngineKind)]
        replies = self._ask([engine.endpoint for engine, _ in asked], body)
        problems: list[str] = []
        for engine, kind in asked:
            reply = replies[engine.endpoint.url]
            if isinstance(reply, HttpStatusError):
                engine.tell({_EVERYTHING: f"it computes no checksums: {reply}"})
                result.unverified += self._added
                continue
            wrong: list[str] = []
            for rank, held in ranks_of(engine.endpoint, reply):
                who = f", process {rank}" if kind.num_processes > 1 else ""
                wrong += [who + text for text in self._compare(engine, rank, held, sums[kind], version, result)]
            if wrong:
                place = f"{engine.endpoint.name} at {engine.endpoint.url}"
                problems += [place + text for text in wrong[:_NAMED]]
                problems += [f"{place}: {len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else []
        if problems:
            raise WeightSyncError("\n".join(problems))

    def _compare(
        self,
        engine: _Engine,
        rank: int,
        held: Mapping[str, str],
        expected: Checksums,
        version: str,
        result: Verification,
    ) -> list[str]:
        """Compare what one process answered; returns the ends of messages about differences."""
        wants = self._rotation.wants
        if rank >= len(expected.ranks):
            raise EngineError(f"{engine.endpoint.name} answers for process {rank}, but stated {len(expected.ranks)}")
        sums = expected.ranks[rank]
        unknown = dict(expected.unknown) | not_comparable(sums, held)
        unknown |= {name: "it was not sent" for name in held if name not in sums and wants(name)}
        self._has_parts = self._has_parts and all(wants(name) for name in held)
        wrong: list[str] = []
        compared = {name: checksum for name, checksum in sums.items() if name not in unknown}
        for name, checksum in compared.items():
            if held[name] != checksum:
                known_version, known = engine.held.get((rank, name), ("", ""))
                was = f", which is that of version {known_version}" if known == held[name] else ""
                wrong.append(
                    f" does not hold version {version} of {name}: its checksum is {held[name]}{was}, "
                    f"{checksum} was sent; before this update the engine had version {self._version}"
                )
            engine.held[rank, name] = (version, checksum)
        result.verified += len(compared)
        result.unverified += len(unknown)
        result.deferred += sum(not wants(name) for name in expected.sizes)
        engine.tell(unknown)
        return wrong

    def _ask(self, endpoints: Sequence[EngineEndpoint], body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of each of these engines by its address; a refusal is returned, not raised."""
        calls = EngineCalls(endpoints, self._calls.deadline)

        def ask(endpoint: EngineEndpoint) -> Any:
            try:
                return calls.call(endpoint, api.WEIGHTS_CHECKER, body)
            except HttpStatusError as error:
                if error.status not in _REFUSALS:
                    raise
                return error

        return {endpoint.url: answer for endpoint, answer in zip(endpoints, calls.each(ask), strict=True)}


class Verifiers:
    """Makes the verifier of a run's engines, anew whenever these change.

    Args:
        model: ``config.json`` of the model.
        check_equal: ``--check-weight-update-equal``: check every tensor every time, and at the first synchronisation of
            the run compare with what the engines loaded; later the trainer has other weights than that.
    """

    def __init__(self, *, model: Mapping[str, Any], check_equal: bool) -> None:
        self._model = model
        self._check_equal = check_equal
        self._is_first = True

    def of(self, calls: EngineCalls) -> WeightVerifier:
        """The verifier of these engines."""
        is_first, self._is_first = self._is_first, False
        return WeightVerifier(
            calls,
            model=self._model,
            share=None if self._check_equal else CHECK_SHARE,
            check_equal=self._check_equal and is_first,
        )
