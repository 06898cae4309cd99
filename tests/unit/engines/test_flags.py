"""The server's command line."""

import pytest

from slime.engines.embedded.flags import parse_flags
from slime.errors import ConfigError


def test_values_and_defaults() -> None:
    flags = parse_flags(["--model-path", "m", "--device", "cpu", "--max-total-tokens", "4096", "--disable-radix-cache"])
    assert (flags.model_path, flags.max_total_tokens, flags.disable_radix_cache) == ("m", 4096, True)
    assert (flags.host, flags.port, flags.dtype, flags.weight_version) == ("127.0.0.1", 30000, "auto", "default")


def test_flags_of_a_gpu_engine_that_change_no_answer_are_taken() -> None:
    argv = ["--model-path", "m", "--device", "cpu", "--cuda-graph-bs", "1", "2", "--enable-metrics", "--tp-size", "1"]
    assert parse_flags(argv).model_path == "m"


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ([], "--model-path"),
        (["--model-path", "m", "--port", "x"], "--port"),
        (["--model-path", "m", "--unknown"], "--unknown"),
        (["--model-path", "m", "--device", "cpu", "--mem-fraction-static", "2"], "--mem-fraction-static is 2.0"),
        (["--model-path", "m", "--device", "cpu", "--num-threads", "0"], "--num-threads is 0"),
    ],
)
def test_faults_name_the_flag(argv: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        parse_flags(argv)
