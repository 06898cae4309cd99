import pytest

from slime.cluster.schedule import check_steps_left, should_run_periodic_action
from slime.errors import ConfigError


@pytest.mark.parametrize(
    ("rollout_id", "interval", "per_epoch", "total", "due"),
    [
        (4, 5, None, None, True),
        (3, 5, 4, None, True),
        (6, 5, None, 7, True),
        (6, 5, None, None, False),
        (4, None, None, None, False),
        (6, None, 7, 7, False),
    ],
)
def test_periodic_action(rollout_id, interval, per_epoch, total, due):
    assert should_run_periodic_action(rollout_id, interval, per_epoch, total) is due


def test_nothing_left_although_steps_were_asked_for_is_refused_with_counts():
    with pytest.raises(ConfigError, match=r"(?s)10 rollouts.*12.*ckpt"):
        check_steps_left(12, 10, load="ckpt")
    with pytest.raises(ConfigError):
        check_steps_left(10, 10, load=None)
    check_steps_left(9, 10, load="ckpt")
    check_steps_left(0, 0, load=None)
