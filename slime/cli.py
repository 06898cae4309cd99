"""``parse_args``: the one place that wires the flag families and the preflight checks together.

Megatron and the engine package are imported only here and only after the quick answers (``--help``). A
usage error prints every problem and exits with code 2; nothing has been started by then.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from slime.config import ArgsView, Config
from slime.config.devices import count_cuda_devices
from slime.config.draft import Loop, Surroundings
from slime.config.engine_families import RECORDED_ROUTER, RECORDED_SGLANG, ArgparseFamily, strict_parser
from slime.config.engine_flags import SGLANG_OWNED
from slime.config.families import FlagFamily, MegatronConfig, MegatronContext, PrefixFamily
from slime.config.megatron_flags import MEGATRON_FLAGS, MEGATRON_VERSION
from slime.config.parse import parse
from slime.config.plan import plan_text
from slime.config.reference import help_text
from slime.config.router_flags import ROUTER_CHOICES, ROUTER_OWNED
from slime.config.sglang_names import SGLANG_OLDER
from slime.data.preflight import preflight as data_preflight
from slime.engines.features import ask_server_info
from slime.errors import ConfigError, SlimeError
from slime.http_control import in_parallel
from slime.plugin_checks import check_plugins

USAGE_ERROR = 2
_QUERY_SECONDS = 10.0

CustomArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser | None]


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    loop: Loop | None = None,
    add_custom_arguments: CustomArguments | None = None,
) -> Config:
    """Parse a command line; end the process where there is nothing to run.

    Args:
        argv: Tokens without the program's name; the process's own by default.
        loop: How the program generates and trains; None leaves out the checks that depend on it.
        add_custom_arguments: Adds flags of your own to a parser; their values appear in ``args``.

    Raises:
        SystemExit: Code 0 after ``--help`` or ``--dry-run``, code 2 for a wrong command line.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    if "--help" in tokens or "-h" in tokens:
        sys.stdout.write(help_text(Path(sys.argv[0]).name or "train.py"))
        sys.exit(0)
    try:
        config = load_config(tokens, loop=loop, add_custom_arguments=add_custom_arguments)
    except ConfigError as error:
        report_problems(error, sys.stderr)
        sys.exit(USAGE_ERROR)
    if config.debug.dry_run:
        sys.stdout.write(plan_text(config))
        sys.exit(0)
    for notice in config.notices:
        print(f"slime: {notice}", file=sys.stderr)
    return config


def parse_established_args(add_custom_arguments: CustomArguments | None = None) -> ArgsView:
    """The established ``slime.utils.arguments.parse_args``: the process's command line as flat ``args``."""
    return ArgsView(parse_args(add_custom_arguments=add_custom_arguments))


def load_config(
    argv: Sequence[str], *, loop: Loop | None = None, add_custom_arguments: CustomArguments | None = None
) -> Config:
    """Parse and check a command line with everything that is installed here.

    Raises:
        ConfigError: Every problem found.
    """
    custom = None
    if add_custom_arguments is not None:
        parser = strict_parser()
        custom = ArgparseFamily(prefix="", parser=add_custom_arguments(parser) or parser)
    return parse(
        argv,
        megatron=LazyMegatronFamily(),
        sglang=_engine_family(argv),
        router=_router_family(),
        custom=custom,
        surroundings=replace(read_surroundings(), loop=loop),
        preflights=(data_preflight, check_plugins),
    )


class LazyMegatronFamily:
    """Megatron's flags; Megatron itself is imported when values have to be read."""

    def flag_names(self) -> frozenset[str]:
        """Every flag of Megatron's parser: as recorded where that fits the installed version."""
        if importlib.metadata.version("megatron-core").startswith(MEGATRON_VERSION + "."):
            return MEGATRON_FLAGS
        return self.load().flag_names()

    def parse(self, argv: Sequence[str], context: MegatronContext) -> MegatronConfig:
        """See ``slime.config.families.FlagFamily.parse``."""
        return self.load().parse(argv, context)

    def load(self) -> FlagFamily:
        """Import Megatron and return its family."""
        from slime.backends.megatron.args import MegatronFlagFamily

        return MegatronFlagFamily()


def report_problems(error: ConfigError, stream: TextIO) -> None:
    """Write every problem on lines of its own."""
    count = len(error.problems)
    stream.write(f"slime: {count} problem{'s' if count > 1 else ''} with this command line; nothing was started.\n")
    for number, problem in enumerate(error.problems, start=1):
        stream.write(f"  {number}. {problem}\n")
    stream.write("See --help for the flags.\n")
    stream.flush()


def read_surroundings() -> Surroundings:
    """What this machine offers."""
    return Surroundings(
        num_cuda_devices=0 if _torch_is_cpu_only() else count_cuda_devices(os.environ),
        sglang_installed=importlib.util.find_spec("sglang") is not None,
        query_engines=_ask_engines,
        tensorboard_installed=importlib.util.find_spec("tensorboard") is not None,
        joins_cluster="RAY_ADDRESS" in os.environ,
        start_time=time.strftime("%Y%m%d_%H%M%S"),
    )


def _ask_engines(urls: Sequence[str]) -> list[Mapping[str, Any] | SlimeError]:
    """What engines say of themselves, asked at the same time."""

    def ask(url: str) -> Mapping[str, Any] | SlimeError:
        try:
            return ask_server_info(url, timeout_seconds=_QUERY_SECONDS, waiter="slime")
        except SlimeError as error:
            return error

    return in_parallel(ask, urls)


def _torch_is_cpu_only() -> bool:
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _engine_family(argv: Sequence[str]) -> PrefixFamily:
    """SGLang's own parser where it is installed and needed; importing it takes many seconds."""
    needed = any(token.startswith(RECORDED_SGLANG.prefix) for token in argv)
    if not needed or importlib.util.find_spec("sglang") is None:
        return RECORDED_SGLANG
    try:
        server_args: Any = importlib.import_module("sglang.srt.server_args")
        parser = strict_parser()
        server_args.ServerArgs.add_cli_args(parser)
    except Exception as error:  # noqa: BLE001 - boundary: a foreign package that may not work on this machine
        print(f"slime: SGLang's own parser is not usable ({error}); its recorded flags are used", file=sys.stderr)
        return RECORDED_SGLANG
    return ArgparseFamily(prefix=RECORDED_SGLANG.prefix, parser=parser, owned=SGLANG_OWNED, older=SGLANG_OLDER)


def _router_family() -> PrefixFamily:
    """The router's own parser where it is installed."""
    if importlib.util.find_spec("sglang_router") is None:
        return RECORDED_ROUTER
    from sglang_router.router_args import RouterArgs

    parser = strict_parser()
    RouterArgs.add_cli_args(parser)
    return ArgparseFamily(
        prefix=RECORDED_ROUTER.prefix,
        parser=parser,
        owned=ROUTER_OWNED,
        renamed={"tls_cert_path": "server_cert_path", "tls_key_path": "server_key_path"},
        choices=ROUTER_CHOICES,
    )
