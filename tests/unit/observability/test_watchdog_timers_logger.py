import io
import logging
import threading
import time

import pytest

from slime.errors import WaitTimeoutError
from slime.observability.logger import configure_logger, tail
from slime.observability.timers import Timer
from slime.observability.watchdog import format_stacks, wait_until


def test_expired_wait_names_both_sides_and_dumps_stacks(caplog):
    with pytest.raises(WaitTimeoutError, match="the driver waited 0 s for engine 3"):
        wait_until(lambda: False, waiter="the driver", waited_for="engine 3", timeout_seconds=0.05, poll_seconds=0.01)
    assert "test_expired_wait_names_both_sides" in caplog.text


def test_wait_returns_when_the_condition_holds():
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), waiter="a", waited_for="b", timeout_seconds=5, poll_seconds=0.001)
    assert next(answers, "done") == "done"


def test_stacks_show_every_thread():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(5,), name="the-other-one")
    thread.start()
    text = format_stacks()
    release.set()
    thread.join()
    assert "the-other-one" in text
    assert "test_stacks_show_every_thread" in text


def test_timer_accumulates_until_it_is_reset():
    timer = Timer()
    for _ in range(2):
        with timer.context("train"):
            time.sleep(0.01)
    assert timer.perf_metrics()["perf/train_time"] >= 0.02
    timer.reset()
    assert timer.perf_metrics() == {}


def test_timer_misuse_is_an_error():
    timer = Timer()
    with pytest.raises(AssertionError):
        timer.end("x")
    timer.start("x")
    with pytest.raises(AssertionError):
        timer.start("x")


def test_logger_is_configured_once_and_warnings_have_a_second_way():
    first, second, warnings = io.StringIO(), io.StringIO(), io.StringIO()
    try:
        configure_logger(stream=first)
        configure_logger("[rank 0]", stream=second, warnings_to=warnings)
        logging.getLogger("slime.test").info("quiet")
        logging.getLogger("slime.test").warning("loud")
    finally:
        configure_logger()
    assert first.getvalue() == ""
    assert "[rank 0]" in second.getvalue()
    assert "quiet" in second.getvalue()
    assert "quiet" not in warnings.getvalue()
    assert "loud" in warnings.getvalue()


def test_tail_of_missing_empty_and_long_files(tmp_path):
    path = tmp_path / "log"
    assert "no log" in tail(path)
    path.write_text("")
    assert "empty" in tail(path)
    path.write_text("\n".join(map(str, range(100))))
    assert tail(path, 3) == "97\n98\n99"
