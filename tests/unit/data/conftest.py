"""Tokenizers for tests of the data package."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.prompts import AUTO_SYSTEM_TEMPLATE, THINKING_TEMPLATE, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """With the template that adds a system message."""
    return make_tokenizer(AUTO_SYSTEM_TEMPLATE)


@pytest.fixture(scope="session")
def thinking_tokenizer() -> PreTrainedTokenizerFast:
    """With the template that drops old thinking."""
    return make_tokenizer(THINKING_TEMPLATE)


@pytest.fixture(scope="session")
def checkpoint(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that AutoTokenizer loads."""
    folder = tmp_path_factory.mktemp("hf")
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    return str(folder)
