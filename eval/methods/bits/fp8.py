"""FP8: the middle as 8-bit floating-point numbers (e4m3), half the bytes; what servers switch on with one flag.

"FP8 Formats for Deep Learning", arXiv 2209.05433, has the format. The scales are those of vLLM's kv_cache_dtype="fp8".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import wide
from leank.eval.cache.storage.codecs import BandCodec, OfHeads, PageCodec
from leank.eval.cache.storage.segment import PAGE, Count
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, Observe, method
from leank.eval.methods.common.calibrated import FromSamples
from leank.eval.methods.common.observed import seen
from leank.typed import OneOf

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max  # 448


@method("fp8")
@dataclass(frozen=True)
class FP8(FromSamples, Bits):
    """A number x is stored as the nearest number of e4m3 to x / s, and read as that number times s.

    e4m3 has a sign, 4 bits of exponent and 3 of mantissa; larger numbers than 448 s are stored as 448 s. K and V of a
    layer each have a scale s, which serves all prompts.

      s = 1,   or   s = max |x| / 448 over the calibration samples

    The first is what vLLM does with weights that bring no scales, the second what tools that add scales to weights do.
    A row says how many numbers of its prompt's middle are larger than 448 s (`eval.rows.ResultRow.saturated`).

    Deviations
    - vLLM also stores sink and window in FP8, and may compute the products in FP8, with rounded queries and weights.
    - A prompt is attended before it is rounded.
    - Plain PyTorch reads the numbers: answers and bytes are the method's, time is not.
    """

    scales: Annotated[str, OneOf("one", "tensor", "head")] = "one"  # s is 1, or calibrated per layer or KV head

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.scales != "one":
            super().check(config, tokenizer)

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        if self.scales != "one":
            super().calibrate(observe, tokenizer, config)

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """The largest magnitude of K and of V in every head, [L, H, 2], float64."""
        found = torch.zeros(())
        for prefill in passes:
            peaks = [
                torch.stack([x.abs().amax((0, 2, 3)) for x in (one.keys, one.layer.values)], -1).double().cpu()
                for one in seen(prefill)
            ]
            found = torch.maximum(found, torch.stack(peaks))
        return found

    def of_layer(self, index: int, prefill: Prefill) -> BandCodec:
        if self.scales == "one":
            return Scaled()
        peaks = self._found[self.calibrated_on][index]
        peaks = peaks.amax(0, keepdim=True) if self.scales == "tensor" else peaks
        return OfHeads(tuple((Scaled(k), Scaled(v)) for k, v in torch.where(peaks > 0, peaks / LARGEST, 1).tolist()))

    def sized(self, index: int, held: Held) -> BandCodec:
        return Scaled()


@dataclass(frozen=True)
class Scaled(PageCodec):
    """Numbers in e4m3, a byte each, and nothing beside them."""

    scale: float = 1.0  # s, default 1
    bits = 8
    holds = "numbers in FP8"

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """The bytes of x / s in e4m3, uint8 [R, n, d], and no numbers, [R, n, 0]."""
        scaled = (x.to(wide(x)) / self.scale).clamp(-LARGEST, LARGEST)
        return scaled.to(FORMAT).view(torch.uint8), x.new_empty(*x.shape[:-1], 0)

    def saturated(self, x: Tensor) -> Tensor:
        return ((x.to(wide(x)) / self.scale).abs() > LARGEST).sum((1, 2))

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The numbers of these bytes times s, rounded once."""
        return (codes.view(FORMAT).to(wide(numbers)) * self.scale).to(numbers.dtype)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, int], tuple[int, int]]:
        return (channels * PAGE, 0), (head_dim * PAGE, 0)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        return codes.flatten(-2), numbers.flatten(-2)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        return codes.unflatten(-1, (PAGE, dim)), numbers[..., None, :].expand(*numbers.shape[:-1], PAGE, 0)
