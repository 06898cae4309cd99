"""What every test process needs before torch is imported."""

import os

# Several processes of one test share few cores, and OpenMP threads of one that spin keep the others from running:
# with the default of one thread per core in each, tests of parallel layouts take minutes instead of seconds.
os.environ.setdefault("OMP_NUM_THREADS", "1")
