"""A Hugging Face model directory: is it usable, and what does its ``config.json`` say.

The one place that knows how that file spells things over versions and families; everything else reads
the normalised form. It reads no weights and imports no model library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from slime.errors import ConfigError

# Families whose embeddings are tied when config.json does not say; the library's base default is True,
# but these classes override it.
_UNTIED_BY_DEFAULT = frozenset(
    {
        "deepseek_v3", "glm4", "glm4_moe", "kimi_k2", "llama", "mimo", "minimax_m2", "mistral",
        "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
    }
)  # fmt: skip

LOADABLE_MODEL_TYPES = frozenset(
    {"deepseek_v3", "glm4_moe", "kimi_k2", "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
)
"""``model_type`` values that can be trained: the families with a weight table, which a test compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfModel:
    """A model directory and its normalised configuration.

    ``config`` is config.json with ``text_config`` merged to the top and these keys always present:
    ``num_key_value_heads``, ``head_dim``, ``tie_word_embeddings``, ``rope_theta`` (float or None),
    ``rope_scaling`` (dict with ``rope_type``, or None).
    """

    path: str
    config: Mapping[str, Any]
    model_type: str

    def __getitem__(self, key: str) -> Any:
        return self.config[key]

    def get(self, key: str, default: Any = None) -> Any:
        """One entry of the normalised configuration, or ``default``."""
        return self.config.get(key, default)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Model class names as config.json gives them."""
        return tuple(self.config.get("architectures") or ())


def read_hf_model(path: str, *, flag: str = "--hf-checkpoint") -> HfModel:
    """Check a model directory and read its configuration.

    Args:
        path: The directory.
        flag: The flag it came from, for messages.

    Raises:
        ConfigError: No directory, no readable config.json, no safetensors, no tokenizer; all that apply.
    """
    folder = Path(path)
    if not folder.exists():
        raise ConfigError(
            f"{flag} {path}: no such directory; give a local Hugging Face model directory "
            "(config.json, *.safetensors, tokenizer), for example one made by `hf download ORG/MODEL --local-dir DIR`"
        )
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: is a file; give the model directory that contains config.json")
    problems: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = read_config_json(folder / "config.json")
    except ConfigError as error:
        problems += [f"{flag} {path}: {problem}" for problem in error.problems]
    problems += _content_problems(folder, f"{flag} {path}")
    if problems:
        raise ConfigError(problems)
    config = normalize_config(config)
    return HfModel(path=path, config=config, model_type=str(config["model_type"]))


def count_parameters(path: str) -> int:
    """Number of parameters in a directory's safetensors files, from their headers.

    Raises:
        ConfigError: A file is not safetensors.
    """
    total = 0
    for file in sorted(Path(path).glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
            raise ConfigError(f"{file}: not a readable safetensors file; copy the model directory again") from error
    return total


def read_config_json(path: Path) -> dict[str, Any]:
    """Read a config.json as written.

    Raises:
        ConfigError: Missing, unreadable, not JSON, or without ``model_type``.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("has no config.json, so it is not a Hugging Face model directory") from None
    except OSError as error:
        raise ConfigError(f"config.json cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError("config.json is not text") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"config.json is not JSON (line {error.lineno}: {error.msg})") from error
    if not isinstance(content, dict) or not cast("dict[str, Any]", content).get("model_type"):
        raise ConfigError("config.json names no model_type")
    return cast("dict[str, Any]", content)


def normalize_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's configuration with one spelling for each fact; the input is not changed."""
    result = dict(config)
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        outer_type = config["model_type"]
        result.update(cast("Mapping[str, Any]", nested))
        result["model_type"] = outer_type
    _normalize_rope(result)
    heads = result.get("num_attention_heads")
    if heads:
        if result.get("num_key_value_heads") is None:
            result["num_key_value_heads"] = heads
        if result.get("head_dim") is None and result.get("hidden_size"):
            result["head_dim"] = result["hidden_size"] // heads
    if result.get("tie_word_embeddings") is None:
        result["tie_word_embeddings"] = result["model_type"] not in _UNTIED_BY_DEFAULT
    return result


def _normalize_rope(config: dict[str, Any]) -> None:
    """Bring ``rope_parameters`` (new) and ``rope_theta`` + ``rope_scaling`` (old) to the old form."""
    rope: dict[str, Any] = dict(config.get("rope_parameters") or {})
    # Some models keep one set per attention kind; the full-attention one is the model's base.
    if rope and all(isinstance(v, Mapping) for v in rope.values()):
        rope = dict(rope.get("full_attention") or next(iter(rope.values())))
    theta = rope.pop("rope_theta", None)
    config["rope_theta"] = float(theta) if theta is not None else config.get("rope_theta")
    partial = rope.pop("partial_rotary_factor", None)
    if partial is not None:
        config.setdefault("partial_rotary_factor", partial)
    scaling: dict[str, Any] = rope or dict(config.get("rope_scaling") or {})
    if scaling:
        scaling["rope_type"] = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
        scaling.pop("type", None)
    config["rope_scaling"] = scaling if scaling and scaling["rope_type"] != "default" else None


def _content_problems(folder: Path, where: str) -> list[str]:
    names = sorted(entry.name for entry in folder.iterdir())
    problems: list[str] = []
    if not any(name.endswith(".safetensors") for name in names):
        other = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".gguf"))]
        found = f"only {other[0]}" if other else "no weights"
        problems.append(f"{where}: {found}; weights must be *.safetensors (save_pretrained writes them)")
    else:
        try:
            count_parameters(str(folder))
        except ConfigError as error:
            problems += [f"{where}: {problem}" for problem in error.problems]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        problems += _index_problems(index, set(names), where)
    if not any(name.startswith(("tokenizer", "vocab", "tiktoken")) or name.endswith(".tiktoken") for name in names):
        problems.append(f"{where}: no tokenizer files (tokenizer.json, tokenizer.model or vocab.json)")
    return problems


def _index_problems(index: Path, names: set[str], where: str) -> list[str]:
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return [f"{where}: {index.name} cannot be read; copy the model directory again"]
    missing = sorted(files - names)
    if missing:
        return [f"{where}: {len(missing)} of {len(files)} weight files are missing, the first is {missing[0]}"]
    return []
