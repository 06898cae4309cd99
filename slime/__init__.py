"""slime: reinforcement learning for language models, with Megatron for training and an engine for generation."""

from slime.compat import install as _install_established_paths

_install_established_paths()
