"""Each cause of a trainer / engine difference, planted for real and found: the embedded engine's own model and
scheduler against the trainer's own worker, on one tiny model, in this process.

What the data alone cannot tell apart is said in the tests: a wrong rope base and a wrong epsilon are known from the
two sides' settings, so where an engine's settings cannot be read both are named, and neither is proven.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.cluster.logprob_facts import engine_facts, logprob_facts
from slime.config import Config
from slime.errors import TrainerError
from slime.observability.logprob_diagnosis import (
    Cause,
    LogprobEvidence,
    LogprobFacts,
    SideFacts,
    describe,
    diagnose,
    pattern_of,
)
from slime.observability.logprob_monitor import DIFF_KEY, PATTERN_PREFIX, STALE_KEY, LogprobMonitor
from slime.types import RolloutBatch
from tests.support.gloo import Rank, run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import running_worker, weights_of
from tests.unit.engines.driver import Driver

pytestmark = pytest.mark.timeout(180)

BOUND = 1e-3
HEALTHY = 1e-5
PROMPTS = [
    np.random.default_rng(seed).integers(0, 250, length).tolist() for seed, length in enumerate((20, 35, 50, 27))
]
GROUP, RESPONSE = 4, 64
DATA = {"global_batch_size": len(PROMPTS) * GROUP, "micro_batch_size": 4}
SCHEDULE = ("--lr", "1e-3", "--lr-decay-style", "constant")
ALGORITHM = {"max_logprob_diff": BOUND}


@dataclass
class Plant:
    """An engine of its own with what is wrong about it."""

    path: Path
    dtype: str = "float32"
    temperature: float = 1.0
    prefix: Sequence[int] = ()
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.driver = Driver(self.path, dtype=getattr(torch, self.dtype))

    @property
    def facts(self) -> SideFacts:
        """What ``/server_info`` of this engine tells."""
        return engine_facts({"model_path": str(self.path), "dtype": self.dtype} | self.info)

    def rollout(self, rollout_id: int = 0, *, prompts: Sequence[list[int]] = PROMPTS) -> RolloutBatch:
        """Samples as the engine draws them; the trainer is told the prompts without the prefix."""
        sampling = {"temperature": self.temperature, "max_new_tokens": RESPONSE, "ignore_eos": True}
        seen = [
            (g, p, self.driver.submit([*self.prefix, *p], sampling=sampling | {"sampling_seed": 97 * rollout_id + s}))
            for s, (g, p) in enumerate((g, p) for g, p in enumerate(prompts) for _ in range(GROUP))
        ]
        self.driver.run()
        count = len(seen)
        rewards = [float(i % GROUP) - 1.5 for i in range(count)]
        return RolloutBatch(
            rollout_id=rollout_id,
            tokens=[np.array([*p, *r.output_ids], dtype=np.int32) for _, p, r in seen],
            response_lengths=[RESPONSE] * count,
            loss_masks=[np.ones(RESPONSE, dtype=np.float32) for _ in seen],
            rewards=rewards,
            raw_rewards=rewards,
            truncated=[True] * count,
            sample_indices=list(range(count)),
            group_ids=[g for g, _, _ in seen],
            rollout_ids=list(range(count)),
            rollout_mask_sums=[float(RESPONSE)] * count,
            weight_versions=[(self.driver.scheduler.weight_version,)] * count,
            rollout_log_probs=[np.array(r.output_log_probs, dtype=np.float32) for _, _, r in seen],
        )

    def take_weights_of(self, worker: Any) -> None:
        """What a weight sync does."""
        self.driver.model.weights.write(list(weights_of(worker).items()))
        self.driver.scheduler.weight_version = str(worker.weight_version)
        self.driver.scheduler.forget_prefixes()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def config(model_dir: Path) -> Config:
    return make_config(model_dir, SCHEDULE, data=DATA, algorithm=ALGORITHM)


@pytest.fixture(scope="module")
def worker(config: Config) -> Iterator[Any]:
    """A trainer at learning rate 0 in effect: each test puts the first weights back."""
    with running_worker(config) as worker:
        first = {id(p): p.detach().clone() for chunk in worker.chunks for p in chunk.parameters()}

        def restart() -> None:
            with torch.no_grad():
                for chunk in worker.chunks:
                    for parameter in chunk.parameters():
                        parameter.copy_(first[id(parameter)])
            worker._trainable.optimizer.reload_model_params()
            worker.weight_version, worker._weights_changed = 0, True
            worker.update_weights()

        worker.restart = restart
        yield worker


def measure(worker: Any, plant: Plant) -> dict[str, float]:
    """Train one rollout of a planted engine on the first weights."""
    worker.restart()
    return worker.train(replace(plant.rollout(), weight_versions=[("1",)] * len(PROMPTS) * GROUP))


def causes_of(
    config: Config, metrics: dict[str, float], engine: SideFacts, history: Sequence[float] = ()
) -> list[Cause]:
    """The diagnosis from what a run would know: its flags, the engine's answers, the metrics."""
    return diagnose(
        replace(logprob_facts(config, ()), engine=engine),
        LogprobEvidence(
            pattern=pattern_of(metrics, PATTERN_PREFIX), stale_share=metrics.get(STALE_KEY, 0.0), history=history
        ),
    )


def ruled_out(causes: Sequence[Cause]) -> set[str]:
    return {cause.name for cause in causes if cause.score < 0.05}


def test_a_healthy_run_is_below_the_bound_and_measures_no_pattern(worker: Any, model_dir: Path) -> None:
    metrics = measure(worker, Plant(model_dir))
    assert metrics[DIFF_KEY] < HEALTHY
    assert metrics[STALE_KEY] == 0
    assert not [name for name in metrics if name.startswith(PATTERN_PREFIX)]


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.3])
def test_temperature(worker: Any, config: Config, model_dir: Path, temperature: float) -> None:
    plant = Plant(model_dir, temperature=temperature)
    metrics = measure(worker, plant)
    assert metrics[DIFF_KEY] > BOUND
    causes = causes_of(config, metrics, plant.facts)
    assert causes[0].name == "temperature"
    found = 1.0 / metrics[f"{PATTERN_PREFIX}temperature_ratio"]
    assert found == pytest.approx(temperature, rel=0.1)
    assert {"rope", "norm epsilon", "precision", "stale weights"} <= ruled_out(causes)
    # Neither does it need to know the engine's settings.
    assert causes_of(config, metrics, SideFacts())[0].name == "temperature"


def test_prompt_tokens_that_the_trainer_does_not_know(worker: Any, config: Config, model_dir: Path) -> None:
    """A chat template that adds a system turn in the engine only."""
    plant = Plant(model_dir, prefix=[257, 115, 121, 115, 10, 66, 101, 258, 10])
    metrics = measure(worker, plant)
    assert metrics[DIFF_KEY] > BOUND
    assert causes_of(config, metrics, plant.facts)[0].name == "prompt"
    assert causes_of(config, metrics, SideFacts())[0].name == "prompt"


def test_stale_weights_that_the_engine_admits(worker: Any, config: Config, model_dir: Path) -> None:
    worker.restart()
    plant = Plant(model_dir)
    plant.take_weights_of(worker)
    healthy = worker.train(plant.rollout())
    assert healthy[DIFF_KEY] < HEALTHY
    worker.update_weights()  # the engine is not told
    metrics = worker.train(plant.rollout(1))
    assert metrics[DIFF_KEY] > BOUND
    assert metrics[STALE_KEY] == 1
    assert metrics["rollout/weight_version/behind"] == 1
    causes = causes_of(config, metrics, plant.facts)
    assert causes[0].name == "stale weights"
    assert "100% of the samples" in causes[0].evidence


def test_stale_weights_under_a_new_version(worker: Any, config: Config, model_dir: Path) -> None:
    """A sync that changed nothing but the version: the difference grows with every update."""
    worker.restart()
    plant = Plant(model_dir)
    history = []
    metrics: dict[str, float] = {}
    for rollout_id in range(4):
        plant.driver.scheduler.weight_version = str(worker.weight_version)
        metrics = worker.train(plant.rollout(rollout_id))
        worker.update_weights()
        history.append(metrics[DIFF_KEY])
    assert metrics[DIFF_KEY] > BOUND
    assert metrics[STALE_KEY] == 0
    causes = causes_of(config, metrics, plant.facts, history)
    assert causes[0].name == "stale weights"
    assert "grew from" in causes[0].evidence


def test_precision(worker: Any, config: Config, model_dir: Path) -> None:
    plant = Plant(model_dir, dtype="bfloat16")
    metrics = measure(worker, plant)
    assert metrics[DIFF_KEY] > BOUND
    causes = causes_of(config, metrics, plant.facts)
    assert causes[0].name == "precision"
    assert "the trainer computes in fp32, the engine in bf16" in causes[0].evidence
    assert {"rope", "norm epsilon"} <= ruled_out(causes)
    # Without the engine's settings rounding is still told from everything that has a direction.
    assert causes_of(config, metrics, SideFacts())[0].name == "precision"


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"rope_theta": 10000.0}, "base is 1000000.0 in the trainer and 10000.0 in the engine"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "scaling is none in the trainer and linear 4"),
    ],
    ids=["base", "scaling"],
)
def test_rope(worker: Any, config: Config, tmp_path: Path, changes: dict[str, Any], shown: str) -> None:
    plant = Plant(make_tiny_model(tmp_path / "engine", "qwen3", **changes))
    metrics = measure(worker, plant)
    assert metrics[DIFF_KEY] > BOUND
    causes = causes_of(config, metrics, plant.facts)
    assert causes[0].name == "rope"
    assert shown in causes[0].evidence
    # An engine whose config.json cannot be read: nothing proves it, but it stays in the list.
    assert "rope" not in ruled_out(causes_of(config, metrics, SideFacts(precision="fp32")))


@pytest.mark.parametrize("epsilon", [1e-3, 1e-1])
def test_norm_epsilon(worker: Any, config: Config, tmp_path: Path, epsilon: float) -> None:
    plant = Plant(make_tiny_model(tmp_path / "engine", "qwen3", rms_norm_eps=epsilon))
    metrics = measure(worker, plant)
    assert metrics[DIFF_KEY] > BOUND
    causes = causes_of(config, metrics, plant.facts)
    assert causes[0].name == "norm epsilon"
    assert f"epsilon is 1e-06 in the trainer and {epsilon} in the engine" in causes[0].evidence
    unknown = causes_of(config, metrics, SideFacts(precision="fp32"))
    assert "norm epsilon" not in ruled_out(unknown)
    assert "temperature" not in [cause.name for cause in unknown if cause.score > 0.5]


def test_the_monitor_stops_with_the_causes(worker: Any, config: Config, model_dir: Path) -> None:
    plant = Plant(model_dir, temperature=0.8)
    facts = replace(logprob_facts(config, ()), engine=plant.facts)
    metrics = measure(worker, plant)
    with pytest.raises(
        TrainerError, match=r"most likely first:\n  1\. temperature: an engine temperature of about 0\.[78]"
    ):
        LogprobMonitor(BOUND, stop=True, facts=lambda: facts).check(0, metrics)


def pattern_on_rank(rank: Rank, config: Config, batch: RolloutBatch) -> dict[str, float]:
    with running_worker(config, rank) as worker:
        metrics = worker.train(batch)
    return {name: value for name, value in metrics.items() if name.startswith(PATTERN_PREFIX)}


def test_the_pattern_does_not_depend_on_the_layout(worker: Any, model_dir: Path) -> None:
    batch = Plant(model_dir, temperature=0.9).rollout()
    worker.restart()
    want = {name: value for name, value in worker.train(batch).items() if name.startswith(PATTERN_PREFIX)}
    assert len(want) == 7
    argv = (*SCHEDULE, "--pipeline-model-parallel-size", "2")
    layout = make_config(model_dir, argv, num_processes=4, data=DATA, algorithm=ALGORITHM)
    for found in run_ranks(4, pattern_on_rank, layout, batch, timeout_seconds=120):
        assert found == pytest.approx(want, rel=1e-4)


def test_facts_of_both_sides_agree_for_one_checkpoint(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    for number, changes in enumerate(({}, {"rope_scaling": llama3}, {"rms_norm_eps": 3e-5, "rope_theta": 500000.0})):
        path = make_tiny_model(tmp_path / str(number), "llama", **changes)
        ours = logprob_facts(make_config(path), ()).trainer
        theirs = engine_facts({"model_path": str(path), "dtype": "float32", "kv_cache_dtype": "auto"})
        assert replace(ours, quantized="") == theirs


def test_facts_tell_overrides_and_quantisation(model_dir: Path) -> None:
    info = {
        "model_path": str(model_dir), "dtype": "auto", "kv_cache_dtype": "fp8_e4m3", "quantization": "fp8",
        "json_model_override_args": '{"rms_norm_eps": 0.5}',
    }  # fmt: skip
    facts = engine_facts(info)
    assert facts.norm_epsilon == 0.5
    assert facts.precision == "fp32"
    assert facts.quantized == "fp8 weights, a key-value cache in fp8_e4m3"
    assert engine_facts({}) == SideFacts(quantized="")
    assert engine_facts({"model_path": "/nowhere", "dtype": "bfloat16"}) == SideFacts(precision="bf16", quantized="")


def test_an_unreachable_engine_leaves_its_facts_open(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        facts = logprob_facts(config, ["http://127.0.0.1:9"])
    assert facts.engine == SideFacts(quantized="")
    assert facts.trainer.precision == "fp32"
    assert "rope" in describe(diagnose(facts, LogprobEvidence()))
    assert isinstance(facts, LogprobFacts)
