import os
import signal
import subprocess
import sys
import threading

import pytest

from slime.cluster.entry import exit_code
from slime.cluster.signals import ENDING, Terminated, held_back, terminable
from slime.errors import ConfigError, TrainerError


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_ending_signal_interrupts_once_and_has_its_own_exit_code(signum, code):
    seen = []

    def program():
        with terminable() as ending:
            try:
                os.kill(os.getpid(), signum)
            except KeyboardInterrupt:
                os.kill(os.getpid(), signum)  # impatience does not disturb the save
                seen.append(ending.signum)
                raise

    before = signal.getsignal(signum)
    assert exit_code(program) == code
    assert seen == [signum]
    assert signal.getsignal(signum) is before


def test_ctrl_c_stays_ctrl_c():
    def program():
        with terminable():
            os.kill(os.getpid(), signal.SIGINT)

    assert exit_code(program) == 130


@pytest.mark.parametrize(("error", "code"), [(ConfigError("x"), 2), (TrainerError("x"), 1), (None, 0)])
def test_exit_codes_of_failures(error, code):
    def program():
        if error is not None:
            raise error

    assert exit_code(program) == code


def test_a_signal_held_back_arrives_afterwards():
    reached = []

    def work():
        with terminable(), held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # other tests may have left threads behind
            reached.append("the end of the block")

    with pytest.raises(Terminated):
        work()
    assert reached


def test_ctrl_c_held_back_arrives_afterwards():
    reached = []

    def work():
        with held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            reached.append("the end of the block")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached


def test_processes_started_while_held_back_do_not_follow_ending_signals():
    with held_back():
        child = subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True); input()"],
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert child.stdout.readline()
        for signum in (signal.SIGINT, *ENDING):
            child.send_signal(signum)
        child.stdin.write(b"\n")
        child.stdin.close()
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.wait(5)
        child.stdout.close()
