"""ChanMix: every channel of K in 1 to 4 bits, V in 2 or 4, and scales and zero points in 8.

"Channel-Aware Mixed-Precision Quantization for Efficient Long-Context Inference", ICLR 2026, openreview yjr2jX41qO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import top
from leank.data_gen.haystack import first_words
from leank.data_gen.task import Sample
from leank.data_gen.tokens import counter_of
from leank.eval.cache.storage.codecs import OfHeads, PageCodec, PageSegment, fold, unfold
from leank.eval.cache.storage.quantised import Packing, coded, grid, restore
from leank.eval.cache.storage.segment import PAGE, Count, Extent
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.observe import received
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import Bits, Held, Observe, method
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.common.calibrated import FromSamples
from leank.eval.methods.common.observed import seen
from leank.shape import kv_shape
from leank.typed import OneOf, Positive, Share

FP8 = torch.float8_e4m3fnuz
RETRIEVAL, OUTLIER, NORMAL, SUBNORMAL = 4, 3, 2, 1  # bits
WORDS = 75  # of natural text, about 100 tokens: the sentence that the probe repeats
COPIES = 30  # of that sentence, at most
SINK = 4  # first tokens of the probe to which attention does not count
FOLDS = ((-2, 4), (-2, 2), (-2, 1))  # 64 tokens of one bit make 8 bytes


@method("chanmix")
@dataclass(frozen=True)
class ChanMix(FromSamples, Bits):
    """KIVI's rounding, in which calibration says once how many bits a channel of K and a head's V have.

    - Retrieval heads have 4 bits in K and V. They are those of the largest S = sum_ij A_ij M_ij, where A is the
      attention in a prompt that repeats a sentence, and M is 0 at the first tokens and at those shortly before i.
    - Elsewhere V has 2 bits, and the ranges R_c = max_i K_ic - min_i K_ic of a layer's channels are put into three
      clusters (k-means, from the least, the median and the largest range). Outliers, those of the largest ranges, have
      3 bits, normal channels 2, and as many subnormal ones as there are outliers 1, those of the least ranges.

    So K and V have 2 bits on average, and 2 more in retrieval heads. Scales and zero points are e4m3fnuz, a byte each.

    Deviations
    - The authors' code was not to be had. Descriptions of the method leave open how many heads are retrieval heads,
      whether their V has 4 bits, too, what M hides and which channels are clustered together. Here it is 0.3 of the KV
      heads with their V, which has the paper's bytes (3.7% of dense more than 2 bits alone); M hides four tokens and
      the last 100 to 200; and a layer's channels are clustered.
    - Ranges are those of calibration samples, not of WikiText-2.
    - Codes are rounded on the grid of the stored scale and zero point; a scale or zero point beyond 240 is 240.
    - Bits lie in planes along tokens, the paper's in bytes of several channels: as many bytes.
    - Sink and window are the cache's; the paper keeps the last 128 tokens whole.
    - Plain PyTorch reads the numbers: answers and bytes are the method's, time is not.
    """

    free = "retrieval"
    retrieval: Share = 0.3  # share of the KV heads whose K and V have 4 bits
    group: Positive = 32  # numbers that share a scale and a zero point; see `kivi`
    scales: Annotated[str, OneOf("fp8", "model")] = "fp8"  # format of scales and zero points: e4m3fnuz, the model's

    def check_sizes(self, sizes: Sizes) -> None:
        KIVI(2, self.group).check_sizes(sizes)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().check(config, tokenizer)
        Packing(2, self.group).check(kv_shape(config)[-1])
        self._probe(tokenizer)

    def sized(self, index: int, held: Held) -> OfHeads:
        """As if retrieval heads were spread evenly over the layers."""
        heads, form = held.middle.shape[1], FP8 if self.scales == "fp8" else None
        count, total = round(self.retrieval * held.middle.size), held.middle.size
        begun = (np.arange(index * heads, (index + 1) * heads + 1) * count) // total
        planes = (Planes((RETRIEVAL if n else NORMAL,) * held.dim, self.group, form) for n in np.diff(begun))
        return OfHeads(tuple((one, one) for one in planes))

    @property
    def calibrated_on(self) -> tuple[object, ...]:
        return self.task, self.length, self.samples, self.seed

    @property
    def _probed_on(self) -> tuple[object, ...]:
        return "retrieval", self.length

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        super().calibrate(observe, tokenizer, config)
        if self._probed_on not in self._found:
            probe, sentence = self._probe(tokenizer)
            self._found[self._probed_on] = retrieval_scores(observe(probe, self.length), sentence)

    def _probe(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Sample, int]:
        """A prompt of at most `length` tokens that repeats a sentence, and the sentence's tokens."""
        sentence = " ".join(first_words(WORDS, None, "all"))
        tokens = counter_of(tokenizer).pieces([sentence], "\n")[0]
        copies = min(COPIES, self.length // tokens - 1)  # a chat template has room, too
        if copies < 3:
            raise ValueError(f"length={self.length} must be at least {4 * tokens}, for three sentences of the probe")
        text = "\n".join([sentence] * copies)
        return replace(self._sample(tokenizer, 0), context=text, question="", answer_prefix=""), tokens

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """The range of every channel of K over all tokens, [L, H, D], float64."""
        least, most = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        for prefill in passes:
            ends = [torch.stack(one.keys[0].aminmax(dim=1)).double().cpu() for one in seen(prefill)]
            low, high = torch.stack(ends, 1)
            least, most = torch.minimum(least, low), torch.maximum(most, high)
        return most - least

    @cached_property
    def widths(self) -> tuple[Tensor, Tensor]:
        """Bits of every channel of K [L, H, D], and of V [L, H]. Raises RuntimeError before calibration."""
        ranges, scores = self._found[self.calibrated_on], self._found[self._probed_on]
        heads = top(scores.flatten(), round(self.retrieval * int(scores.isfinite().sum()))).view_as(scores)
        of_keys = torch.stack([by_range(x, ~few[:, None].expand_as(x)) for x, few in zip(ranges, heads, strict=True)])
        return of_keys, torch.where(heads, RETRIEVAL, NORMAL)

    def of_layer(self, index: int, prefill: Prefill) -> OfChannels:
        form = FP8 if self.scales == "fp8" else None
        of_keys, of_values = (x[index].tolist() for x in self.widths)
        heads = tuple(
            (Planes(tuple(sorted(k, reverse=True)), self.group, form), Planes((v,) * len(k), self.group, form))
            for k, v in zip(of_keys, of_values, strict=True)
        )
        return OfChannels(heads, tuple(map(tuple, of_keys)))


def retrieval_scores(prefill: Prefill, sentence: int) -> Tensor:
    """S of every KV head [L, H], float64, summed over its group; -inf under sliding windows.

    sentence: tokens of a sentence. Queries count in blocks of as many, and to each the last block counts as near, too.
    """
    found = []
    for layer in prefill.layers:
        if not isinstance(layer, PromptLayer) or layer.queries is None:
            found.append(layer.keys.new_full(layer.keys.shape[1:2], -torch.inf, dtype=torch.float64, device="cpu"))
            continue
        total = torch.zeros(layer.queries.shape[1], dtype=torch.float64)
        first = layer.keys.shape[2] - layer.queries.shape[2]
        for start in range(first, layer.keys.shape[2], sentence):
            queries, keys = layer.queries[:, :, start - first :][:, :, :sentence], layer.keys[:, :, : start + sentence]
            sums = received(queries, keys, scaling=layer.scaling, softmax=layer.softmax)
            total = total + sums[0, :, SINK : max(SINK, start - sentence)].double().sum(-1).cpu()
        found.append(total.unflatten(0, (layer.keys.shape[1], -1)).sum(-1))
    return torch.stack(found)


def clusters(ranges: Tensor) -> Tensor:
    """0, 1 or 2 for each of n ranges: the nearest of three means, which begin at the least, median and largest."""
    means = torch.stack([ranges.min(), ranges.median(), ranges.max()])
    found = torch.full_like(ranges, -1, dtype=torch.long)
    while ((new := (ranges[:, None] - means).abs().argmin(-1)) != found).any():
        found = new
        means = torch.stack([ranges[found == i].mean() if (found == i).any() else means[i] for i in range(3)])
    return found


def by_range(ranges: Tensor, free: Tensor) -> Tensor:
    """Bits of a layer's channels, int64 like their ranges [H, D]; those that are not `free` are in retrieval heads."""
    kinds = clusters(ranges.flatten()).view_as(ranges)
    outliers, subnormal = ((kinds == kind) & free for kind in (2, 0))
    count = min(int(outliers.sum()), int(subnormal.sum()))
    bits = torch.where(free, NORMAL, RETRIEVAL)
    for kind, scores, width in ((outliers, ranges, OUTLIER), (subnormal, -ranges, SUBNORMAL)):
        chosen = top(scores.masked_fill(~kind, -torch.inf).flatten(), count).view_as(ranges)
        bits = torch.where(chosen, width, bits)
    return bits


@dataclass(frozen=True)
class OfChannels(OfHeads):
    """The codec of one layer, whose widest channels stand first."""

    bits: tuple[tuple[int, ...], ...]  # of every channel of K, [H][D]

    @property
    def order(self) -> Tensor:
        return torch.tensor(self.bits, dtype=torch.uint8)

    def segment(self, extent: Extent) -> PageSegment:
        """An empty segment. Raises ValueError unless K keeps all its channels."""
        if (extent.channels.count < extent.head_dim).any():
            raise ValueError("chanmix gives every channel its bits; leave out the choice of channels")
        return super().segment(extent)


@dataclass(frozen=True)
class Planes(PageCodec):
    """KIVI's codes in as many bits as each channel has, K of one head, or V.

    A page has 8 bytes, a bit for every token, for the lowest bit of every channel, then for the second bit of those
    that have one, and so on; then scales and zero points.
    """

    widths: tuple[int, ...]  # bits of every channel, the most first; those of V are all the same
    group: int = 32
    form: torch.dtype | None = None  # of scales and zero points; None is the model's
    holds = "codes of 1 bit and scales in FP8"

    @property
    def _having(self) -> list[int]:
        """How many channels have each bit, the lowest first."""
        return [sum(width > bit for width in self.widths) for bit in range(self.widths[0])]

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [R, n, d], and scales [R, n / group, d, 2] of K, [R, n, d / group, 2] of V."""
        widths = torch.tensor(self.widths, device=x.device)
        x, most = (x, 2**widths - 1) if keys else (x.mT, 2 ** widths[:1] - 1)
        scales = grid(x, self.group, most)
        if self.form is not None:
            largest = torch.finfo(self.form).max
            scales = scales.clamp(-largest, largest).to(self.form).to(x.dtype)
        codes = coded(x, scales, self.group, most)
        return (codes, scales) if keys else (codes.mT, scales.transpose(-3, -2))

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        if keys:
            return restore(codes, numbers, self.group)
        return restore(codes.mT, numbers.transpose(-3, -2), self.group).mT

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, int], tuple[int, int]]:
        size = (self.form or dtype).itemsize
        total = PAGE // 8 * sum(self.widths) + PAGE // self.group * 2 * size * len(self.widths)
        return (channels * 0 + total, 0), (total, 0)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Planes of bits and scales, all in bytes."""
        lines = torch.cat([codes[..., :count] >> bit & 1 for bit, count in enumerate(self._having)], -1)
        scales = numbers.to(self.form or numbers.dtype).contiguous().view(torch.uint8)
        return torch.cat([fold(lines, FOLDS).flatten(-2), scales.flatten(-3)], -1), numbers.flatten(-3)[..., :0]

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes [..., 64, d] and scales [..., 64 / group, d, 2] or [..., 64, d / group, 2]."""
        size = PAGE // 8 * sum(self.widths)
        lines = unfold(codes[..., :size].unflatten(-1, (PAGE // 8, -1)), FOLDS)
        found, *others = lines.split(self._having, -1)  # every channel has the lowest bit
        for bit, line in enumerate(others, 1):
            found[..., : line.shape[-1]] |= line << bit
        scales = codes[..., size:].contiguous().view(self.form or numbers.dtype).to(numbers.dtype)
        return found, scales.unflatten(-1, (PAGE // self.group, dim, 2) if keys else (PAGE, dim // self.group, 2))
