"""Health checks that engines can pass, and what fault tolerance does not reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.config.draft import Surroundings

from .conftest import Run, notices

Problems = Callable[..., list[str]]


def test_fault_tolerance_is_read(run: Run) -> None:
    flags = "--use-fault-tolerance --rollout-health-check-interval 5 --rollout-health-check-timeout 4"
    cluster = run(f"{flags} --rollout-health-check-first-wait 60").cluster
    assert cluster.use_fault_tolerance
    assert cluster.rollout_health_check_interval == 5.0
    assert cluster.rollout_health_check_timeout == 4.0
    assert cluster.rollout_health_check_first_wait == 60.0


def test_a_time_out_below_the_answer_of_a_healthy_engine(run: Run, problems: Problems, cuda: Surroundings) -> None:
    flags = "--rollout-health-check-timeout 0.5 --rollout-backend"
    found = problems(f"{flags} sglang", surroundings=cuda)
    assert any("SGLang takes a second to answer a health check" in text for text in found)
    assert run(f"{flags} embedded").cluster.rollout_health_check_timeout == 0.5


def test_engines_that_run_elsewhere_are_not_replaced(run: Run) -> None:
    assert "--use-fault-tolerance" not in notices(run("--use-fault-tolerance"))
    given = "--sglang-router-ip 10.0.0.1 --sglang-router-port 30000"
    assert "does not check or replace the router of --sglang-router-ip" in notices(
        run(f"{given} --use-fault-tolerance")
    )
    assert "does not check or replace the router" not in notices(run(given))


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_an_interval_is_a_number_of_seconds(problems: Problems, number: str) -> None:
    (problem,) = problems(f"--rollout-health-check-interval {number}")
    assert problem == f"--rollout-health-check-interval must be a finite number > 0, found {number}"
