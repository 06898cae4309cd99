"""Measurements on one CUDA device; each also runs in small on a CPU, to prove that it works."""
