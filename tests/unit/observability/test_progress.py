"""The newest statement of progress, whole."""

from __future__ import annotations

import threading

from slime.observability.progress import ProgressBoard, ProgressSnapshot


def test_the_newest_statement_counts() -> None:
    board = ProgressBoard()
    assert board.snapshot() is None
    board.report("rollout 1", 0, 4, unit="groups")
    board.report("rollout 1", 2, 4, unit="groups", note="reward 0.5")
    expected = ProgressSnapshot(label="rollout 1", done=2, total=4, unit="groups", note="reward 0.5", sequence=2)
    assert board.snapshot() == expected == board.snapshot()


def test_statements_are_never_mixed() -> None:
    board = ProgressBoard()

    def state(number: int) -> None:
        for _ in range(300):
            board.report(f"rollout {number}", number, number, unit="groups", note=str(number))

    threads = [threading.Thread(target=state, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    last = 0
    while any(thread.is_alive() for thread in threads):
        seen = board.snapshot()
        if seen is not None:
            assert seen.label == f"rollout {seen.done}"
            assert (seen.total, seen.note) == (seen.done, str(seen.done))
            assert seen.sequence >= last
            last = seen.sequence
    newest = board.snapshot()
    assert newest is not None
    assert newest.sequence == 1200
