"""What the tests of the run share."""

import pytest

from tests.support.run_stand_ins import run_maker


@pytest.fixture
def make_run(tmp_path):
    with run_maker(tmp_path) as make:
        yield make
