"""SparK: every token keeps key channels of its own, and the others come back as one magnitude with their signs.

"SparK: Query-Aware Unstructured Sparsity with Recoverable KV Cache Channel Pruning", arXiv 2508.15212.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.channel_scores import pruned, top, wide
from leank.eval.cache.storage.codecs import RecordCodec
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import Bits, Held, method
from leank.typed import OneOf, Positive, Share

RECOVERY = ("mean", "none")
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@method("spark")
@dataclass(frozen=True)
class SparK(Bits):
    """Every token t keeps the D - floor(ratio D) channels of its key with the largest saliency.

      w_tj = ||q_j|| k_tj^2                                       q_j: the last `queries` queries, mean over the group
      k'_tj = sign(k_tj) sqrt(m_t / ||q_j||) for a pruned channel j,   m_t = mean of w_tj over the pruned channels of t

    So a token's pruned channels all come back with the same saliency. A record holds, per token and KV head: the kept
    numbers, one bit per channel that says which they are, one sign per pruned channel, and m_t. At ratio 0.5 and
    D = 128 in 16 bits that is 64 + 8 + 4 + 1 = 77 numbers of 128, not 64; `match` and all bytes count it so. A ratio at
    which a record is no smaller than a key stores keys as they are. ||q_j||, D numbers per KV head, is held once per
    prompt.

    Deviations
    - Saliency and recovery are those of the authors' code at its setting "recover with avg". It can also draw the
      pruned saliencies from a normal or exponential distribution, and give tokens budgets of their own.
    - The authors' code keeps the pruned signs without counting them, and fills in numbers instead of saving memory.
    - It prunes the whole prompt, the newest tokens too. Here sink and window stay whole, and keys are pruned when they
      leave the window.
    - V keeps all channels.
    - Plain PyTorch restores the keys: answers are the method's, time is not.
    """

    free = "ratio"
    ratio: Share = 0.5  # share of K channels pruned; floor(ratio D) go of every token and head
    queries: Positive = 32  # last queries of the prompt that are observed
    recovery: Annotated[str, OneOf(*RECOVERY)] = "mean"  # whether pruned channels come back, or are zero

    def width(self, dim: int, itemsize: int) -> int:
        """Numbers of `itemsize` bytes in a record."""
        gone, bits = pruned(dim, self.ratio), 8 * itemsize
        recovery = -(-gone // bits) + 1 if self.recovery == "mean" else 0
        return min(dim, dim - gone + -(-dim // bits) + recovery)

    def of_layer(self, index: int, prefill: Prefill) -> Records | None:
        layer = prefill.layers[index]
        if not isinstance(layer, PromptLayer):
            return None
        norms = query_norms(layer, layer.real(prefill.real), self.queries)
        return self._codec(norms, layer.keys.shape[-1], layer.keys.element_size())

    def _codec(self, norms: Tensor, dim: int, itemsize: int) -> Records | None:
        width = self.width(dim, itemsize)
        if width == dim:
            return None
        return Records(norms, dim - pruned(dim, self.ratio), width, INTEGER[itemsize], self.recovery == "mean")

    def sized(self, index: int, held: Held) -> Records | None:
        return self._codec(torch.empty(0), held.dim, held.itemsize)

    def extra_bytes(self, held: Held) -> float:
        """Bytes of ||q_j||, in 4 bytes or the model's."""
        records = self.width(held.dim, held.itemsize) < held.dim
        return held.k.size * held.dim * max(4, held.itemsize) * records


def query_norms(layer: PromptLayer, real: Tensor | None, queries: int) -> Tensor:
    """||q_j|| of the last `queries` queries, averaged over the group first: [B, H, D]."""
    assert layer.queries is not None
    last = layer.queries[:, :, -queries:]
    last = last.to(wide(last))
    if real is not None:
        last = last * real[:, None, -last.shape[2] :, None]
    return last.unflatten(1, (layer.keys.shape[1], -1)).mean(2).norm(dim=2)


@dataclass(frozen=True)
class Records(RecordCodec):
    """The codec of one layer and its prompts."""

    norms: Tensor  # [B, H, D]: ||q_j||
    kept: int  # channels that a token keeps
    size: int  # numbers in a record: the kept ones in order, the bits that say which, the signs of the others, m_t
    integer: torch.dtype  # as wide as a number
    recovers: bool  # whether signs and m_t are held

    @property
    def width(self) -> int:
        return self.size

    def encode(self, keys: Tensor, rows: np.ndarray) -> Tensor:
        norms = self._norms(rows)
        saliency = norms * keys.to(norms).square()
        stays = top(saliency, self.kept)
        first = torch.argsort((~stays).to(torch.uint8), dim=-1, stable=True)
        parts = [keys.gather(-1, first[..., : self.kept]), self._pack(stays).view(keys.dtype)]
        if self.recovers:
            gone = first[..., self.kept :]
            parts += [
                self._pack(keys.gather(-1, gone) > 0).view(keys.dtype),
                saliency.gather(-1, gone).mean(-1, keepdim=True).to(keys.dtype),
            ]
        return torch.cat(parts, -1)

    def decode(self, records: Tensor, rows: np.ndarray) -> Tensor:
        norms = self._norms(rows)
        dim = norms.shape[-1]
        numbers, bits, *more = records.split(self._sizes(dim), -1)
        stays = self._unpack(bits, dim)
        first = torch.argsort((~stays).to(torch.uint8), dim=-1, stable=True)
        if self.recovers:
            positive = self._unpack(more[0], dim - self.kept)
            size = (more[1].to(norms) / norms.clamp(min=torch.finfo(norms.dtype).tiny)).sqrt()
            others = torch.where(positive, 1, -1) * size.gather(-1, first[..., self.kept :])
        else:
            others = norms.new_zeros(*records.shape[:-1], dim - self.kept)
        whole = torch.cat([numbers.to(norms), others], -1)
        return torch.empty_like(whole).scatter_(-1, first, whole)

    def _norms(self, rows: np.ndarray) -> Tensor:
        return self.norms[torch.from_numpy(rows).to(self.norms.device)][:, :, None]

    def _sizes(self, dim: int) -> list[int]:
        """Numbers of each part of a record."""
        bits = torch.iinfo(self.integer).bits
        recovery = [-(-(dim - self.kept) // bits), 1] if self.recovers else []
        return [self.kept, -(-dim // bits), *recovery]

    def _pack(self, flags: Tensor) -> Tensor:
        """Flags [..., n] as bits of whole numbers [..., ceil(n / bits)], the first in the lowest bits."""
        bits = torch.iinfo(self.integer).bits
        flags = pad(flags, (0, -flags.shape[-1] % bits)).unflatten(-1, (-1, bits))
        place = torch.arange(bits, device=flags.device, dtype=torch.int64)
        return (flags.long() << place).sum(-1).to(self.integer)

    def _unpack(self, numbers: Tensor, count: int) -> Tensor:
        """The first `count` flags of numbers [..., m] in the model's type that `_pack` made."""
        bits = torch.iinfo(self.integer).bits
        place = torch.arange(bits, device=numbers.device, dtype=torch.int64)
        whole = numbers.contiguous().view(self.integer).long()
        return ((whole[..., None] >> place) & 1).bool().flatten(-2)[..., :count]

    def select(self, rows: Tensor) -> Self:
        return replace(self, norms=self.norms[rows.to(self.norms.device)])

    def to(self, device: torch.device) -> Self:
        return replace(self, norms=self.norms.to(device))

    def tensors(self) -> dict[str, Tensor]:
        return {"norms": self.norms}
