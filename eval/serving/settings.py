"""What a server with a mask is told, and what it refuses: in one line, before any weights load."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.serving.coded import page_layout
from leank.eval.serving.layers import FULL, SLIDING, Layers
from leank.mask import ChannelMask, mask_file
from leank.typed import Checked, Count, Positive

VERSIONS = ("0.30", "0.31", "0.32", "0.33")  # the minor versions of vLLM whose interfaces the plug-in uses

BOTH = ("gemma3_text",)  # tried types of models with layers of full attention and layers with a sliding window
OF_BOTH = ("0.33",)  # minor versions of vLLM in which they were tried

NAMES = {"mask": "LEANK_MASK", "sink": "LEANK_SINK", "window": "LEANK_WINDOW"}
DEFAULTS = {"sink": Sizes.sink, "window": Sizes.window}
OF_LAYOUTS = {"sink": 64, "window": 256}  # whole pages; whole tokens decide what fits, not codes


@dataclass(frozen=True)
class ServerSettings(Checked):
    """The settings of a server."""

    mask: str  # a mask.safetensors, a training run's folder, a published .pth mask, or hf://org/name of one on the hub
    sink: Count  # sink, window: tokens kept whole
    window: Positive

    @classmethod
    def find(cls, additional: object, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Read the settings of `--additional-config '{"leank": {"mask": PATH}}'`, else of LEANK_MASK and the like.

        What is not given is what the mask was trained with, else 128 and 1024, and under a layout of bits always 64
        and 256. Returns None without a mask.
        Raises ValueError for unknown names and wrong values, FileNotFoundError without the file.
        """
        given = {name: environment[variable] for name, variable in NAMES.items() if environment.get(variable)}
        own = additional.get("leank") if isinstance(additional, Mapping) else None
        if own is not None:
            if not isinstance(own, Mapping) or set(own) - set(NAMES):
                raise ValueError(f"additional-config: leank={own!r} must be a mapping with mask, sink and window")
            given.update({name: str(value) for name, value in own.items()})
        if "mask" not in given:
            if own is not None:
                raise ValueError(f"additional-config: leank={own!r} names no mask, so nothing would be pruned")
            return None
        mask = mask_file(given["mask"]).resolve()
        loaded = ChannelMask.load(mask)
        trained = OF_LAYOUTS if loaded.precision is not None else loaded.metadata
        sizes = {name: str(given.get(name, trained.get(name, DEFAULTS[name]))) for name in DEFAULTS}
        try:
            return cls(str(mask), **{name: int(tokens) for name, tokens in sizes.items()})
        except ValueError as error:
            said = ", ".join(f"{NAMES[name]}={tokens}" for name, tokens in sizes.items())
            raise ValueError(f"{said}: {error}") from None

    def export(self) -> dict[str, str]:
        """The environment variables that tell a process these settings."""
        return {variable: str(getattr(self, name)) for name, variable in NAMES.items()}


def check_version() -> None:
    """Raise ValueError unless the plug-in knows this vLLM; call it before you import anything inside vLLM."""
    import vllm

    if not vllm.__version__.startswith(tuple(f"{minor}." for minor in VERSIONS)):
        raise ValueError(
            f"this plug-in is for vLLM {', '.join(VERSIONS)}, not {vllm.__version__}; install one of these versions"
        )


def check_config(config: Any, settings: ServerSettings) -> None:
    """Raise ValueError that names the first thing in vLLM's configuration that cannot be served with a mask."""
    from vllm.platforms import current_platform

    for wrong, cure in _wrong(config, settings):
        if wrong:
            raise ValueError(f"LEANK_MASK={settings.mask}: {cure}")
    mask = ChannelMask.load(settings.mask)
    mask.check_model(config.model_config.hf_text_config)
    size = mask.keep.shape[-1]
    if mask.precision is not None and current_platform.is_cuda() and size not in HEAD_DIMS["codes"]:
        raise ValueError(
            f"LEANK_MASK={settings.mask}: a GPU reads bits per channel in heads of {HEAD_DIMS['codes']} channels, not "
            f"{size}; take a mask without them"
        )
    try:
        page_layout(
            *(mask, config.cache_config.block_size, settings.sink, settings.window, config.model_config.dtype),
            ranks=config.parallel_config.tensor_parallel_size,
            layers=Layers.of(config.model_config.hf_text_config),
        )
    except ValueError as error:
        raise ValueError(f"LEANK_MASK={settings.mask}: {error}") from None


def _wrong_on_gpu(config: Any) -> Iterator[tuple[bool, str]]:
    """What the kernel cannot do: (whether it is so, what is wrong and what to do)."""
    model, attention = config.model_config, config.attention_config
    yield getattr(attention.backend, "name", None) != "CUSTOM", "on a GPU, add --attention-backend CUSTOM"
    kinds = getattr(attention, "backend_per_kind", None)  # since 0.32, and it goes before `backend`
    yield bool(kinds), f"on a GPU, drop backend_per_kind (of {', '.join(kinds or ())}) from --attention-config"
    yield model.dtype not in (torch.bfloat16, torch.float16), f"on a GPU, take bfloat16 or float16, not {model.dtype}"
    size = model.get_head_size()
    yield size not in HEAD_DIMS["paged"], f"on a GPU, the heads must have {HEAD_DIMS['paged']} channels, not {size}"


def wrong_layers(text: Any) -> Iterator[tuple[bool, str]]:
    """What a text model has that pages cannot hold, by its configuration: (whether it is so, what to say)."""
    kind, layers = text.model_type, set(getattr(text, "layer_types", None) or ()) - {FULL}
    yield kind == "gpt_oss", f"{kind} has attention sinks, which no kernel of a server adds; take a model without"
    yield (
        bool(getattr(text, "attn_logit_softcapping", None)),
        f"{kind} has soft-capped logits, which no kernel of a server computes; take a model without",
    )
    yield (
        bool(layers) and not has_both(text),
        f"{kind} has layers of {', '.join(sorted(layers))}; take a model of full attention, or one of "
        f"{', '.join(BOTH)}",
    )


def has_both(text: Any) -> bool:
    """Whether a model is of a tried family with layers of full attention and layers with a sliding window."""
    return text.model_type in BOTH and set(getattr(text, "layer_types", None) or ()) == {FULL, SLIDING}


def _untried(config: Any) -> Iterator[tuple[bool, str]]:
    """What has not been tried with layers of both kinds: (whether it is so, what is wrong and what to do)."""
    import vllm
    from vllm.platforms import current_platform

    ranks, cache = config.parallel_config.tensor_parallel_size, config.cache_config
    tried = vllm.__version__.startswith(tuple(f"{minor}." for minor in OF_BOTH))
    block, marks = cache.block_size, cache.prefix_cache_retention_interval
    # on a GPU, FlashAttention would take `rswa_window`, which the plug-in sets, for a window of its own layers
    yield not current_platform.is_cpu(), "on a GPU; serve it on a CPU, or take a model of full attention"
    yield not tried, f"in vLLM {vllm.__version__}; install {' or '.join(OF_BOTH)}"
    yield not config.model_config.enforce_eager, "in compiled graphs; add --enforce-eager"
    yield bool(block % 32), f"with block-size={block}; take a multiple of 32, as vLLM's own pages have on a CPU"
    yield ranks != 1, f"with tensor-parallel-size={ranks}; take 1"
    yield bool(marks), f"with prefix-cache-retention-interval={marks}; drop it"


def _wrong(config: Any, settings: ServerSettings) -> Iterator[tuple[bool, str]]:
    """What no server with a mask can do: (whether it is so, what is wrong and what to do)."""
    from vllm.platforms import current_platform

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    yield not (current_platform.is_cpu() or current_platform.is_cuda()), "this plug-in serves on CPUs and NVIDIA's GPUs"
    yield from _wrong_on_gpu(config) if current_platform.is_cuda() else ()
    yield model.runner_type != "generate", f"runner={model.runner_type} has no decoding; take --runner generate"
    yield model.use_mla, f"{text.model_type} has latent attention (MLA), whose cache has no K channels"
    yield from wrong_layers(text)
    if has_both(text):
        for wrong, where in _untried(config):
            yield wrong, f"{text.model_type} has layers with a sliding window, which have not been tried {where}"
    yield model.is_multimodal_model, f"{text.model_type} takes more than text; serve its language model alone"
    yield model.is_hybrid, f"{text.model_type} has layers without attention; take a model with attention alone"
    yield (
        bool(model.get_sliding_window()) and not has_both(text),
        f"{text.model_type} has a sliding window; take a model of full attention",
    )
    yield (
        config.speculative_config is not None,
        "speculative decoding is not supported; drop speculative_config (--speculative-config, --spec-method)",
    )
    # vLLM makes a connector of it, so it is named first
    yield bool(cache.kv_offloading_size), "offloading of the KV cache is not supported; drop --kv-offloading-size"
    yield config.kv_transfer_config is not None, "KV connectors are not supported; drop --kv-transfer-config"
    yield (
        settings.window >= model.max_model_len,
        f"window={settings.window} is no less than max-model-len={model.max_model_len}, so nothing would be pruned; "
        "take a smaller window",
    )
    yield (
        cache.cache_dtype not in ("auto", str(model.dtype).removeprefix("torch.")),
        f"kv-cache-dtype={cache.cache_dtype} is not supported; the cache has the model's dtype, so take auto",
    )
    yield model.enable_sleep_mode, "sleep mode is not supported; drop --enable-sleep-mode"
    yield (
        parallel.enable_dbo or parallel.ubatch_size > 1,
        "steps in parts are not supported; drop --enable-dbo and --ubatch-size",
    )
    # nobody asks an engine that comes later whether it prunes
    yield parallel.enable_elastic_ep, "engines that come and go are not supported; drop --enable-elastic-ep"
    for name in ("pipeline", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{name}_parallel_size", 1)
        yield size != 1, f"{name.replace('_', '-')}-parallel-size={size} is not supported; take 1"
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
