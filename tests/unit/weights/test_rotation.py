"""Which tensors are checked when."""

from itertools import pairwise

from slime.weights.rotation import Rotation, unit_of

SIZES = {f"model.layers.{i}.{part}.weight": 50 for i in range(10) for part in ("a", "b")} | {"model.embed.weight": 500}
SECONDS_PER_BYTE = 0.01  # everything: 15 s


def run(
    rotation: Rotation, syncs: int, send_seconds: float, fixed_seconds: float = 0.0
) -> list[tuple[set[str], float]]:
    """What an engine is asked for after each synchronisation, and what that takes."""
    history: list[tuple[set[str], float]] = []
    for _ in range(syncs):
        checked = set() if rotation.is_idle else {name for name in SIZES if rotation.wants(name)}
        assert checked == {n for n in SIZES if not rotation.is_idle and not any(s in n for s in rotation.skipped())}
        seconds = sum(SIZES[name] for name in checked) * SECONDS_PER_BYTE + (fixed_seconds if checked else 0)
        rotation.learn(SIZES if checked else {}, send_seconds=send_seconds, check_seconds=seconds)
        history.append((checked, seconds))
    return history


def test_everything_at_first_then_turns_within_the_share() -> None:
    history = run(Rotation(share=0.1), 61, send_seconds=30.0)
    assert history[0][0] == SIZES.keys()
    later = history[1:]
    assert sum(seconds for _, seconds in later) <= 0.1 * 30.0 * len(later)
    turns = {name: [i for i, (checked, _) in enumerate(later) if name in checked] for name in SIZES}
    for name, seen in turns.items():
        assert len(seen) >= 8, f"{name} is not checked often enough"
        assert max(b - a for a, b in pairwise(seen)) <= 10, f"{name} waits too long"
    assert len({len(seen) for seen in turns.values()}) <= 2, "turns are equal"


def test_a_dear_unit_is_paid_off() -> None:
    """The embedding alone takes more than a share: it is checked, and less is checked after it."""
    later = run(Rotation(share=0.1), 101, send_seconds=20.0)[1:]
    assert any("model.embed.weight" in checked for checked, _ in later)
    assert all(checked for checked, _ in later), "something is checked every time"
    assert sum(seconds for _, seconds in later) <= 1.05 * 0.1 * 20.0 * len(later)


def test_what_fits_is_all_checked_every_time() -> None:
    assert all(checked == SIZES.keys() for checked, _ in run(Rotation(share=0.1), 5, send_seconds=160.0))
    assert all(checked == SIZES.keys() for checked, _ in run(Rotation(share=None), 5, send_seconds=0.1))


def test_an_engine_that_leaves_nothing_out_is_asked_now_and_then() -> None:
    rotation = Rotation(share=0.1)
    spent, asked = 0.0, []
    for _ in range(40):
        asked.append(not rotation.is_idle)
        seconds = 15.0 if asked[-1] else 0.0
        spent += seconds
        rotation.learn(SIZES if asked[-1] else {}, send_seconds=30.0, check_seconds=seconds, has_parts=False)
    assert asked[0]
    assert 6 <= sum(asked) <= 8, "15 s of 3 s a time: every fifth or sixth"
    assert spent <= 0.1 * 30.0 * 40 + 15.0


def test_units() -> None:
    assert unit_of("model.layers.11.mlp.down_proj.weight") == "layers.11."
    assert unit_of("lm_head.weight") == "lm_head.weight"
    assert unit_of("layers.1.") not in "model.layers.11.mlp.weight"
