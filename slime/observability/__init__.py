"""What an operator sees: metrics, trackers, timers, the line per rollout, and who waits for what.

Imports nothing above ``slime.types`` and ``slime.errors``; in particular neither Ray nor the
packages that produce samples.
"""
