"""A YAML file that a flag names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime.errors import ConfigError


def read_yaml(path: str, where: str) -> Any:
    """The content of a file.

    Args:
        path: The file.
        where: The flag with its value, for messages.

    Raises:
        ConfigError: It cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not YAML ({error})") from error
