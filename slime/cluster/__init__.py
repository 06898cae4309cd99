"""Processes and their placement: the only package that imports Ray."""
