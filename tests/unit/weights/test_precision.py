import pytest
import torch

from slime.weights.precision import stated_dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("half", torch.float16),
        ("float", torch.float32),
        ("auto", None),
        (None, None),
    ],
)
def test_an_engine_names_its_dtype_in_many_ways(name: str | None, dtype: torch.dtype | None) -> None:
    assert stated_dtype(name) is dtype
