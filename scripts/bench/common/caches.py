"""A model, the caches that compete on it, filled with random keys and values, and a decoding loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from leank.eval.cache import CompressedLayer, Sizes, bytes_per_row, compressed_cache
from leank.eval.cache.graph import DecodeLoop
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.storage.channels import layer_masks
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.store import GROWTH
from leank.eval.inference.models import ModelConfig, load_model
from leank.mask import ChannelMask
from leank.shape import kv_shape
from scripts.bench.common.shapes import LLAMA, MASKS, ROOT, llama8b
from scripts.bench.common.timing import WARM_UP

ROOM = 16  # tokens that a cache has room for beside the prompt and the timed steps
WORK_SPACE = 4e9  # bytes left beside the caches where they fill the GPU: activations, tables, a part that is growing


@dataclass(frozen=True)
class Contender:
    """A cache to decode with.

    name: as it stands in the tables.
    make: (rows, tokens of room) -> an empty cache.
    bytes: tokens -> bytes of one row.
    attention: the model's attention implementation.
    graph: whether a step can be captured as a CUDA graph.
    """

    name: str
    make: Callable[[int, int], Cache]
    bytes: Callable[[int], int]
    attention: str
    graph: bool


def contenders(
    model: PreTrainedModel, mask: ChannelMask | Tensor, sizes: Sizes, packings: Sequence[Packing] = ()
) -> list[Contender]:
    """LeanK, and three dense caches: this project's storage and kernel with nothing pruned, and transformers' two.

    packings: LeanK with a middle of fewer bits, one more contender each.

    A step on a StaticCache has an attention mask, for which transformers 5.17 copies a layer's K and V once per query
    head (5.23 does not). On 5.17 this project's dense cache is the one to compare graphs with.
    """
    config = model.config
    layers, heads, dim = kv_shape(config)
    everything = torch.ones(layers, heads, dim, dtype=torch.bool)

    def dense(tokens: int) -> int:
        return 2 * layers * heads * dim * tokens * model.dtype.itemsize

    def compressed(name: str, keep: ChannelMask | Tensor, bits: Packing | None = None) -> Contender:
        middles = [Middle(one, bits=bits) for one in layer_masks(keep)]
        return Contender(
            name,
            lambda rows, room: compressed_cache(model, middles, sizes.sink, sizes.window, sizes.flush),
            lambda n: bytes_per_row(keep, n + GROWTH, model.dtype, sizes, bits),  # decoding adds ahead of need
            ATTENTION,
            True,
        )

    return [
        compressed("LeanK", mask),
        *(compressed(f"LeanK, {packing.bits} bits", mask, packing) for packing in packings),
        compressed("own cache, nothing pruned", everything),
        Contender("StaticCache", lambda rows, room: StaticCache(config, max_cache_len=room), dense, "sdpa", True),
        Contender("DynamicCache", lambda rows, room: DynamicCache(config=config), dense, "sdpa", False),
    ]


def fill(model: PreTrainedModel, cache: Cache, rows: int, tokens: int, scored: bool = False) -> None:
    """Put random keys and values of `tokens` tokens into every layer, the same in each row.

    scored: with random scores, which layers need that evict while decoding.
    """
    _, heads, dim = kv_shape(model.config)
    for index, layer in enumerate(cache.layers):
        k, v = torch.randn(2, 1, heads, tokens, dim, device=model.device, dtype=model.dtype)
        k, v = (x.expand(rows, -1, -1, -1) for x in (k, v))
        if isinstance(layer, CompressedLayer):
            scores = torch.rand(1, heads, tokens, device=model.device).expand(rows, -1, -1) if scored else None
            layer.seal(k, v, scores=scores)
        else:
            cache.update(k, v, index)


class Decoding:
    """Greedy steps on a filled cache, in the replay's own loop.

    position: [rows, 1], of the next token of each row.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, position: Tensor) -> None:
        self.loop, self.token = DecodeLoop(model, cache, position), torch.ones_like(position)

    def step(self) -> None:
        """Decode one token per row."""
        self.token.copy_(self.loop.step(self.token).argmax(-1, keepdim=True))

    def graphed(self) -> Callable[[], None]:
        """Capture the step as a CUDA graph and return it."""
        for _ in range(WARM_UP):
            self.step()
        self.loop.capture()
        return self.step


def subject(shape: str) -> tuple[PreTrainedModel, Path, Sizes]:
    """The model, LeanK's mask and the sizes of the cache.

    shape: "llama8b", random weights on a GPU, or "reference", the shipped model.
    Raises SystemExit for llama8b without a GPU.
    """
    if shape == "reference":
        return load_model(ModelConfig()), ROOT / "leank_train/assets/reference/mask_70pct.safetensors", Sizes(16, 144)
    if not torch.cuda.is_available():
        raise SystemExit("--shape llama8b needs a GPU; --shape reference runs on a CPU")
    return llama8b("cuda"), MASKS / LLAMA, Sizes()
