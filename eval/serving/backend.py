"""The attention backend that vLLM runs: each step it writes the new tokens to their pages, and attends over these.

On a CPU a step is computed by `eval.serving.attention`, on a GPU by `eval.serving.paged`. The pages of all layers
belong to two holders, `kept` and `rest`, each a cache group of its own for vLLM. The model's attention layers share the
cache of `kept`, so that vLLM hands every one of them the block table of that group.
"""

import functools
import pkgutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout

from leank.eval.serving.attention import Step, attend, write
from leank.eval.serving.coded import AnyLayout, CodedLayout, page_layout
from leank.eval.serving.guard import KEPT, REST
from leank.eval.serving.layers import Layers
from leank.eval.serving.layout import heads_of
from leank.eval.serving.manager import RestSpec
from leank.eval.serving.paged import DeviceStep, PagedAttention, decoding_first
from leank.eval.serving.prefill import Varlen, batches, plain
from leank.eval.serving.settings import ServerSettings
from leank.mask import ChannelMask

logger = init_logger("vllm.leank")  # of whose loggers vLLM shows lines


class PageHolder(AttentionLayerBase):
    """Owns the pages of one group for all layers."""

    def __init__(self, settings: ServerSettings, kept: bool, layers: Layers) -> None:
        self.settings, self.kept = settings, kept
        self.layers = layers
        self.mask = ChannelMask.load(settings.mask)
        self.rows = {layer: row for row, layer in enumerate(layers.full)}  # of a layer, in the pages
        self.mean_keys = layers.mask(self.mask).mean_keys
        self.layout: AnyLayout | None = None
        self.dtype = torch.get_default_dtype()
        self.paged: PagedAttention | None = None
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PrunedBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """Say how large a page is; both groups have pages of equal bytes, since they share the blocks.

        Raises ValueError where vLLM's pages of a layer with a sliding window are not those that ours are a multiple of.
        """
        cache, dtype = vllm_config.cache_config, vllm_config.model_config.dtype
        sizes = self.settings.sink, self.settings.window
        hits, ranks = bool(cache.enable_prefix_caching), vllm_config.parallel_config.tensor_parallel_size
        rank = get_tensor_model_parallel_rank() if ranks > 1 else 0
        self.layout = layout = page_layout(self.mask, cache.block_size, *sizes, dtype, hits, rank, ranks, self.layers)
        if (means := self.layers.mask(self.mask).mean_keys) is not None:
            self.mean_keys = means[:, heads_of(means.shape[1], rank, ranks)]
        others = {
            layer.get_kv_cache_spec(vllm_config).page_size_bytes
            for layer in vllm_config.compilation_config.static_forward_context.values()
            if isinstance(layer, Attention) and layer.sliding_window is not None
        }
        other = self.layers.columns(self.mask.keep, cache.block_size, rank, ranks) * dtype.itemsize
        if others - {other}:  # vLLM would give our pages other tokens
            raise ValueError(
                f"LEANK_MASK: vLLM's pages of layers with a sliding window have {max(others - {other}):,} bytes, not "
                f"{other:,}, at block-size={cache.block_size}; take another --block-size"
            )
        coded, self.dtype = isinstance(layout, CodedLayout), dtype
        group: Any = layout.kept if self.kept else layout.rest
        page = layout.page_columns * dtype.itemsize
        common: dict[str, Any] = {
            "block_size": group.block,
            "num_kv_heads": 1,
            "head_size": layout.head_dim,
            # a token's codes need not fill whole numbers; of groups of two dtypes vLLM would clear every new page
            "dtype": torch.uint8 if coded else dtype,
            "num_head_slots": 1,
            # at most, in whole numbers; equal on all ranks, as vLLM asks
            "state_content_bytes": page // group.block // dtype.itemsize * dtype.itemsize,
            "page_size_padded": page,
        }
        if self.kept:
            return FullAttentionSpec(**common)
        return RestSpec(
            **common,
            grain=layout.grain,
            sliding_window=layout.window + 1,
            sink=layout.sink,
            hit=layout.hit,
            every=cache.prefix_cache_retention_interval or 0,
            hits=hits,
        )

    @property
    def pages(self) -> Tensor:
        """All pages, [blocks, page_columns], in the model's dtype."""
        assert self.layout is not None
        size = self.layout.page_columns * self.dtype.itemsize // self.kv_cache.itemsize
        return self.kv_cache.as_strided((len(self.kv_cache), size), (self.kv_cache.stride(0), 1)).view(self.dtype)

    def use_kernel(self, device: torch.device, vllm_config: VllmConfig) -> None:
        """Take the memory that the kernels need for the largest step, and compile them, before any step is captured."""
        if self.paged is not None:  # the builder of the other group was here
            return
        assert self.layout is not None
        heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        captured = vllm_config.compilation_config.cudagraph_capture_sizes or []
        rows = max(vllm_config.scheduler_config.max_num_seqs, *captured, 1)
        varlen = flash(self.layout.head_dim)
        if isinstance(self.layout, CodedLayout):
            from leank.eval.serving.paged_codes import CodedAttention

            self.paged = CodedAttention(self.layout, device, heads, rows, varlen=varlen)
        else:
            self.paged = PagedAttention(self.layout, device, heads, rows, varlen=varlen)
        logger.info("leank compiles its kernels: %s", self.paged.compiled)
        begin = time.monotonic()
        self.paged.warm_up(vllm_config.model_config.dtype, vllm_config.model_config.max_model_len)
        logger.info("leank has compiled its kernels in %.0f s", time.monotonic() - begin)
        self.mean_keys = None if self.mean_keys is None else self.mean_keys.to(device)


def flash(head_dim: int) -> Varlen:
    """The FlashAttention that vLLM has for this GPU, else plain PyTorch."""
    from vllm.v1.attention.backends import fa_utils

    version = fa_utils.get_flash_attn_version(head_size=head_dim)
    if version is None:
        return plain

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, q_longest: int, k_longest: int,
        scaling: float, out: Tensor,
    ) -> None:  # fmt: skip
        fa_utils.flash_attn_varlen_func(
            *(q, k, v, q_longest, q_starts, k_longest, k_starts),
            softmax_scale=scaling, causal=True, out=out, fa_version=version,
        )  # fmt: skip

    return varlen


STATES: WeakSet[Any] = WeakSet()  # the tables of requests that vLLM's V2 runner has in this process


def watch() -> None:
    """Learn of those tables when a request comes; they say on the host what a step's metadata have on the GPU."""
    from vllm.v1.worker.gpu.states import RequestState

    add = RequestState.add_request
    if hasattr(add, "leank"):
        return

    @functools.wraps(add)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> None:
        STATES.add(self)
        add(self, *args, **kwargs)

    add_request.leank = True  # type: ignore[attr-defined]
    RequestState.add_request = add_request


def all_new(states: Iterable[Any]) -> bool:
    """Whether it is known that no request came with a part of its reply, as a preempted one comes back."""
    came = [state.prefill_len.np > state.prompt_len.np for state in states]
    return bool(came) and not any(resumed.any() for resumed in came)


@dataclass
class GroupStep:
    """What vLLM says of one step to one group."""

    starts: list[int]  # [R + 1], the first row of each request in the step's tokens
    lengths: Tensor  # int32 [R], positions of each request once the step is done
    known: Tensor | None  # the same on the host, exact but for speculative decoding; None = not said
    prompts: Tensor | None  # int [R], tokens of each prompt, None = not said, as when vLLM captures graphs
    table: Tensor  # int32 [R, blocks], block table
    slots: Tensor  # int64 [tokens], the slots of the new positions
    step: Step | DeviceStep | None = None  # the step of both groups, once a layer has asked for it

    def join(self, layout: AnyLayout, rest: Self, room: int) -> Step | DeviceStep:
        """Make the step of both groups; self is that of `kept`, and room that of `prefill.batches`."""
        count, tables, slots = len(self.starts) - 1, (self.table, rest.table), (self.slots, rest.slots)
        decodes = decoding_first(self.starts, len(self.slots)) if self.table.is_cuda else 0
        if self.starts[-1] == self.starts[decodes] and self.table.is_cuda:
            return DeviceStep(decodes, self.lengths, tables, slots)
        lengths = self.known if self.table.is_cuda and self.known is not None else self.lengths
        ends = lengths[:count].tolist()
        # nothing was generated in a dummy step; on a GPU, asking for the lengths would wait for the step before
        asked = self.prompts if self.prompts is not None and not (self.prompts.is_cuda and all_new(STATES)) else None
        prompts = ends if asked is None else asked[:count].tolist()
        if not self.table.is_cuda:
            return Step(layout, self.starts, ends, prompts, *tables)
        others = [
            Step(layout, self.starts[i : i + 2], ends[i : i + 1], prompts[i : i + 1], *(t[i : i + 1] for t in tables))
            for i in range(decodes, count) if ends[i] > prompts[i]
        ]  # fmt: skip
        which = [i for i in range(decodes, count) if ends[i] <= prompts[i]]
        return DeviceStep(
            *(decodes, self.lengths, tables, slots),
            batches(layout, self.starts, ends, which, room, self.table.device),
            others,
        )


class GroupStepBuilder(AttentionMetadataBuilder[GroupStep]):
    """Copies what a step needs out of vLLM's metadata, or points to it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if device.type == "cuda":
            self._init_reorder_batch_threshold(1)  # requests that decode come first
            watch()
            vllm_config.compilation_config.static_forward_context[REST].use_kernel(device, vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GroupStep:
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        return GroupStep(
            starts,
            common.seq_lens,
            common.seq_lens_cpu_upper_bound,
            common.rswa_prefix_lens,
            common.block_table_tensor,
            common.slot_mapping[: common.num_actual_tokens],
        )


class PrunedAttention(AttentionImpl[GroupStep]):
    """Attention of one layer over kept channels, sink and window."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: object,
    ) -> None:
        """Raise ValueError for attention that is more than softmax(QK)V over the whole context."""
        wrong = {
            "ALiBi": alibi_slopes,
            f"a sliding window of {sliding_window}": sliding_window,
            "soft-capped logits": logits_soft_cap,
            "attention without a causal mask": attn_type != AttentionType.DECODER,
            "a KV cache shared between layers": kv_sharing_target_layer_name,
            **{name: value is not None for name, value in others.items()},
        }
        found = [name for name, value in wrong.items() if value]
        if found:
            raise ValueError(f"LEANK_MASK: the model's attention has {found[0]}; serve it without the mask")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        config = get_current_vllm_config()
        self._layers = config.compilation_config.static_forward_context
        self.room = max(config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens)
        if KEPT not in self._layers:
            settings = ServerSettings.find(None)
            assert settings is not None, "the plug-in registers this backend only with a mask"
            layers = Layers.of(config.model_config.hf_text_config)
            self._layers[KEPT], self._layers[REST] = (PageHolder(settings, kept, layers) for kept in (True, False))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Let the layers of full attention share the pages; vLLM calls this before it asks layers for their caches.

        Raises ValueError unless they are those of the model's configuration.
        """
        full, pruned = self._layers[REST].layers.full, []
        for name, layer in self._layers.items():
            if isinstance(layer, Attention) and isinstance(layer.impl, PrunedAttention):
                layer.kv_sharing_target_layer_name = KEPT
                pruned.append(extract_layer_index(name))
            elif isinstance(layer, Attention):
                layer.attn_backend = own_backend()
        if sorted(pruned) != list(full):
            raise ValueError(
                f"LEANK_MASK: in vLLM the layers {sorted(pruned)} have full attention, and by the model's "
                f"configuration {list(full)}; serve it without the mask"
            )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: GroupStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the step's K and V, and write its attention to `output`; vLLM's trial run has no metadata."""
        if attn_metadata is None:
            if query.is_cuda:  # what the longest prompt takes, for vLLM to reserve
                past = key.new_empty(2, self.room, *key.shape[1:]), torch.empty_like(query), torch.empty_like(query)
                del past
            return output.fill_(0)
        context = get_forward_context()
        rest = context.no_compile_layers[REST]
        if attn_metadata.step is None:
            attn_metadata.step = attn_metadata.join(rest.layout, context.attn_metadata[REST], self.room)
        step, index, pages = attn_metadata.step, rest.rows[extract_layer_index(layer.layer_name)], rest.pages
        if rest.mean_keys is not None:  # as in the compressed cache: no softmax changes, and pruned channels are at 0
            key = (key - rest.mean_keys[index]).to(key.dtype)  # in float32
        if isinstance(step, DeviceStep):
            step.attend(rest.paged, index, pages, query, key, value, self.scale, output)
            return output
        write(step, index, pages, key, value)
        attend(step, index, pages, query, key, value, self.scale, output)
        return output


def own_backend() -> type[AttentionBackend]:
    """The backend of vLLM for CPUs, whose place in its registry `PrunedBackend` has."""
    own: type[AttentionBackend] = pkgutil.resolve_name(AttentionBackendEnum.CPU_ATTN.value)
    return own


def attention(
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int | None = None,
    alibi_slopes: list[float] | None = None,
    sliding_window: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> AttentionImpl[Any]:
    """The attention of a layer: vLLM's own if it has a sliding window, which `check_config` lets pass on CPUs alone."""
    own = sliding_window is not None and current_platform.is_cpu()
    made = own_backend().get_impl_cls() if own else PrunedAttention
    return made(num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, *args, **kwargs)


class PrunedBackend(AttentionBackend):
    """The backend in the place of vLLM's own for CPUs, and its CUSTOM one on a GPU."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        """The entry of vLLM's registry that this backend stands for."""
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Callable[..., AttentionImpl[Any]]:
        """What makes the attention of a layer, whose arguments alone tell that it has a sliding window."""
        return attention

    @staticmethod
    def get_builder_cls() -> type[GroupStepBuilder]:
        return GroupStepBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Pages side by side, each in one piece."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_rswa(cls) -> bool:
        """Tell vLLM that this backend takes the lengths of prompts."""
        return True
