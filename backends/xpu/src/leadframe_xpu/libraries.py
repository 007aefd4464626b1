"""Imports the native libraries. Nothing else does, and only in the process that uses them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from leadframe.errors import PluginLoadError
from leadframe_xpu.containment import hidden, unchanged
from leadframe_xpu.ipex_kernels import PagedAttentionApi
from leadframe_xpu.vllm_kernels import SPECULATIVE_TOKENS, VllmApi

IPEX = "intel_extension_for_pytorch"


def load_ipex() -> PagedAttentionApi:
    """Imports IPEX's paged attention.

    IPEX fails on Transformers 5 when it finds it; what is needed here does not use it, so IPEX
    is imported as if it were absent.

    Raises:
      PluginLoadError: the import failed; the cause is chained.
    """
    try:
        with hidden("transformers"), unchanged("torch"):
            module: Any = importlib.import_module(f"{IPEX}.llm.modules")
        found: PagedAttentionApi = module.PagedAttention
    # its own version check ends in an AttributeError, other failures in whatever they are
    except Exception as error:
        raise PluginLoadError(
            f"IPEX could not be imported next to torch {torch.__version__}: {error!r}"
        ) from error
    return found


def load_vllm_kernels() -> VllmApi:
    """Imports vllm-xpu-kernels.

    Raises:
      PluginLoadError: the import failed, or its attention library did not load.
    """
    try:
        importlib.import_module("vllm_xpu_kernels._C")
        module: Any = importlib.import_module("vllm_xpu_kernels.flash_attn_interface")
    except (ImportError, OSError) as error:
        raise PluginLoadError(
            f"vllm-xpu-kernels could not be imported next to torch {torch.__version__}: {error}"
        ) from error
    if not getattr(module, "FA2_AVAILABLE", True):
        reason = getattr(module, "FA2_UNAVAILABLE_REASON", "no reason given")
        raise PluginLoadError(f"vllm-xpu-kernels' attention library did not load: {reason}")
    return VllmApi(
        module.flash_attn_varlen_func,
        torch.ops._C_cache_ops.reshape_and_cache_flash,
        getattr(module, "_SPEC_DECODE_MAX_QLEN", SPECULATIVE_TOKENS),
        getattr(module, "_warned_missing_configs", set()),
    )
