"""Stand-alone commands: prepare models and data, look at dumps. Run them with ``python -m tools.NAME``."""
