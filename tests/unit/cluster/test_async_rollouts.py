import threading
import time

import pytest

from slime.cluster.async_rollouts import AsyncRollouts
from slime.errors import EngineError, WaitTimeoutError


class Recorder:
    """Generates instantly, or when released, and notes what began while which weights were current."""

    def __init__(self):
        self.version = 0
        self.began = []
        self.gate = threading.Semaphore(0)
        self.gated = False

    def __call__(self, step):
        self.began.append((step, self.version))
        if self.gated:
            assert self.gate.acquire(timeout=5)
        return step, self.began[-1][1], self.version


def ahead(generate, size=1, total=6, timeout=5.0, syncs_inside=False):
    return AsyncRollouts(
        generate,
        first_step=0,
        num_rollout=total,
        buffer_size=size,
        timeout_seconds=timeout,
        syncs_inside=syncs_inside,
    )


def settle(condition):
    deadline = time.monotonic() + 3
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


@pytest.mark.parametrize(("size", "interval"), [(1, 1), (2, 1), (3, 2)])
def test_staleness_is_bounded_and_weights_never_change_inside_a_rollout(size, interval):
    recorder = Recorder()
    with ahead(recorder, size=size) as rollouts:
        for step in range(6):
            got, version_at_start, version_at_end = rollouts.take(step)
            assert got == step
            assert version_at_start == version_at_end
            trained_with = step // interval  # version of the engines had every due sync happened at once
            assert trained_with - version_at_start <= size + interval - 1
            if (step + 1) % interval == 0:
                with rollouts.ready_for_sync():
                    recorder.version += 1
    assert [step for step, _ in recorder.began] == list(range(6))


def test_one_ahead_begins_the_next_rollout_when_one_is_taken():
    recorder = Recorder()
    with ahead(recorder) as rollouts:
        settle(lambda: len(recorder.began) == 1)
        time.sleep(0.05)
        assert len(recorder.began) == 1  # full: the finished rollout waits
        rollouts.take(0)
        settle(lambda: len(recorder.began) == 2)


def test_pausing_waits_for_the_rollout_in_progress_and_begins_none():
    recorder = Recorder()
    recorder.gated = True
    with ahead(recorder, size=3) as rollouts:
        settle(lambda: len(recorder.began) == 1)
        threading.Timer(0.1, recorder.gate.release).start()
        started = time.monotonic()
        with rollouts.paused():
            assert time.monotonic() - started > 0.05
            time.sleep(0.05)
            assert len(recorder.began) == 1
        settle(lambda: len(recorder.began) == 2)
        recorder.gate.release(10)


def test_weights_change_inside_a_rollout_where_they_may():
    recorder = Recorder()
    recorder.gated = True
    with ahead(recorder, syncs_inside=True) as rollouts:
        settle(lambda: len(recorder.began) == 1)
        with rollouts.ready_for_sync():
            recorder.version += 1
        recorder.gate.release()
        assert rollouts.take(0) == (0, 0, 1)
        recorder.gate.release(10)


def test_a_failed_rollout_raises_where_it_is_taken():
    def generate(step):
        if step == 1:
            raise EngineError("engine 0 died")
        return step

    with ahead(generate) as rollouts:
        assert rollouts.take(0) == 0
        with pytest.raises(EngineError, match="engine 0 died"):
            rollouts.take(1)


def test_a_rollout_that_does_not_come_is_a_bounded_wait():
    recorder = Recorder()
    recorder.gated = True
    match = r"(?s)rollout 0.*in progress: 0"
    with pytest.raises(WaitTimeoutError, match=match), ahead(recorder, timeout=0.4) as rollouts:
        rollouts.take(0)
    recorder.gate.release(10)


def test_wake_ups_do_not_use_up_the_time_of_a_wait():
    recorder = Recorder()
    recorder.gated = True
    with ahead(recorder, timeout=1.5) as rollouts:

        def disturb():
            for _ in range(20):  # more wake-ups than polls fit into the time
                with rollouts._changed:
                    rollouts._changed.notify_all()
                time.sleep(0.01)
            recorder.gate.release(10)

        threading.Thread(target=disturb).start()
        assert rollouts.take(0)[0] == 0
