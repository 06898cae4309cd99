"""What every test process needs before torch is imported."""

import os

from hypothesis import settings

# Several processes of one test share few cores, and OpenMP threads of one that spin keep the others from running:
# with the default of one thread per core in each, tests of parallel layouts take minutes instead of seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run, and no limit on the time of one, which a busy machine would exceed.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
