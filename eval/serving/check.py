"""What a server with a mask refuses, each in one line, before any weights load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from leank.eval.serving.layout import PageLayout
from leank.eval.serving.settings import ServerSettings, load_mask

VERSION = "0.32"  # the minor version of vLLM whose interfaces the plug-in uses


def check(config: Any, settings: ServerSettings) -> None:
    """Raise ValueError that names the first thing in vLLM's configuration that cannot be served with a mask."""
    for wrong, cure in _wrong(config, settings):
        if wrong:
            raise ValueError(f"LEANK_MASK={settings.mask}: {cure}")
    mask = load_mask(settings.mask)
    mask.check_model(config.model_config.hf_text_config)
    PageLayout.of(mask.keep, config.cache_config.block_size, settings.sink, settings.window)


def _wrong_on_gpu(config: Any) -> Iterator[tuple[bool, str]]:
    """The same, of what the kernel cannot do."""
    from leank.eval.serving.paged import HEAD_DIMS

    model, backend = config.model_config, config.attention_config.backend
    yield getattr(backend, "name", None) != "CUSTOM", "on a GPU, add --attention-backend CUSTOM"
    yield model.dtype not in (torch.bfloat16, torch.float16), f"on a GPU, take bfloat16 or float16, not {model.dtype}"
    size = model.get_head_size()
    yield size not in HEAD_DIMS, f"on a GPU, the heads must have {HEAD_DIMS} channels, not {size}"


def _wrong(config: Any, settings: ServerSettings) -> Iterator[tuple[bool, str]]:
    """(whether it is so, what is wrong and what to do)."""
    import vllm
    from vllm.platforms import current_platform

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    yield not vllm.__version__.startswith(VERSION), f"this plug-in is for vLLM {VERSION}, not {vllm.__version__}"
    yield not (current_platform.is_cpu() or current_platform.is_cuda()), "this plug-in serves on CPUs and NVIDIA's GPUs"
    yield from _wrong_on_gpu(config) if current_platform.is_cuda() else ()
    yield model.runner_type != "generate", f"runner={model.runner_type} has no decoding; take --runner generate"
    yield model.use_mla, f"{text.model_type} has latent attention (MLA), whose cache has no K channels"
    yield model.is_multimodal_model, f"{text.model_type} takes more than text; serve its language model alone"
    yield model.is_hybrid, f"{text.model_type} has layers without attention; take a model with attention alone"
    yield bool(kinds), f"{text.model_type} has layers of {', '.join(sorted(kinds))}; take a model of full attention"
    yield bool(model.get_sliding_window()), f"{text.model_type} has a sliding window; take a model of full attention"
    yield config.speculative_config is not None, "speculative decoding is not supported; drop --speculative-config"
    yield config.kv_transfer_config is not None, "KV connectors are not supported; drop --kv-transfer-config"
    yield bool(cache.kv_offloading_size), "offloading of the KV cache is not supported; drop --kv-offloading-size"
    yield (
        cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
        f"kv-cache-dtype={cache.cache_dtype} is not supported; the cache has the model's dtype, so take auto",
    )
    for name in ("tensor", "pipeline", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{name}_parallel_size", 1)
        yield size != 1, f"{name}-parallel-size={size} is not supported; take 1"
    yield bool(cache.kv_sharing_fast_prefill), "drop --kv-sharing-fast-prefill: no layers of the model share a cache"
    yield (
        bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
        "two cache groups need vLLM's hybrid manager; drop --disable-hybrid-kv-cache-manager",
    )
    beside = Path(settings.mask).parent == Path(model.model).resolve()
    index = Path(model.model) / "model.safetensors.index.json"
    yield (
        beside and not index.is_file(),
        f"vLLM loads every .safetensors file of {model.model} as weights; move the mask to another folder",
    )
