"""Names of SGLang's flags that differ between its versions, and flags that are not called like their attribute.

Scripts written for 0.5.15 keep working with 0.5.23, which no longer knows some of their flags. Tests hold this table
against the parser of the installed version.
"""

from __future__ import annotations

from collections.abc import Mapping

SGLANG_OLDER: Mapping[str, tuple[str, ...]] = {
    "cuda-graph-max-bs": ("cuda-graph-max-bs-decode",),
    "cuda-graph-bs": ("cuda-graph-bs-decode",),
    "disable-piecewise-cuda-graph": ("cuda-graph-backend-prefill", "disabled"),
    "enforce-piecewise-cuda-graph": ("cuda-graph-backend-prefill", "tc_piecewise"),
    "enable-breakable-cuda-graph": ("cuda-graph-backend-prefill", "breakable"),
    "piecewise-cuda-graph-max-tokens": ("cuda-graph-max-bs-prefill",),
    "piecewise-cuda-graph-tokens": ("cuda-graph-bs-prefill",),
    "nsa-prefill-backend": ("dsa-prefill-backend",),
    "nsa-decode-backend": ("dsa-decode-backend",),
    "mamba-scheduler-strategy": ("mamba-radix-cache-strategy",),
    "speculative-dflash-draft-window-size": ("speculative-draft-window-size",),
    "stream-output": ("incremental-streaming-output",),
    "enable-dsa-prefill-context-parallel": ("enable-prefill-cp",),
    "enable-nsa-prefill-context-parallel": ("enable-prefill-cp",),
    "enable-prefill-context-parallel": ("enable-prefill-cp",),
    "dsa-prefill-cp-mode": ("cp-strategy",),
    "nsa-prefill-cp-mode": ("cp-strategy",),
    "prefill-cp-mode": ("cp-strategy",),
    # Called like the attribute, which no version's parser accepts.
    "fp4-gemm-runner-backend": ("fp4-gemm-backend",),
    "fp8-gemm-runner-backend": ("fp8-gemm-backend",),
}
"""Earlier name of a flag -> its present name, with the value that the earlier one stood for."""

SGLANG_OPTIONS: Mapping[str, str] = {
    "enable_amd_monokernel": "monokernel-backend",
    "ep_join_mode": "elastic-ep-join-mode",
    "ep_join_rank_offset": "elastic-ep-join-rank-offset",
    "fp4_gemm_runner_backend": "fp4-gemm-backend",
    "fp8_gemm_runner_backend": "fp8-gemm-backend",
}
"""Attribute -> its flag, where that is not the attribute's name."""
