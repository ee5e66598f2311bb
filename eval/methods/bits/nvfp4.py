"""NVFP4: the middle as 4-bit floating-point numbers (e2m1), with a scale in e4m3 for every 16 of them.

NVIDIA's format, which vLLM's kv_cache_dtype="nvfp4" stores on GPUs that compute in it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from leank.channel_scores import wide
from leank.eval.cache.storage.codecs import PageCodec, vector_bytes
from leank.eval.cache.storage.segment import PAGE, Count
from leank.eval.inference.prefill import Prefill
from leank.eval.methods.axes import Bits, Held, method
from leank.eval.methods.bits.fp8 import FORMAT, LARGEST

BLOCK = 16  # neighbouring channels of a vector that share a scale
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the numbers of e2m1 that are not negative


@method("nvfp4")
@dataclass(frozen=True)
class NVFP4(Bits):
    """Sixteen numbers x of a vector are stored as the nearest numbers of e2m1 to x / s, and read as those times s.

      s = the nearest number of e4m3 to max |x| / 6

    Of two numbers of e2m1 that are equally near, the one with an even code is stored. s itself has a scale of 1, as in
    vLLM without calibrated scales, so magnitudes are stored up to 448 times 6.

    Deviations
    - vLLM also stores sink and window in this format, and may compute the products in FP8.
    - Plain PyTorch reads the numbers: answers and bytes are the method's, time is not.
    """

    def of_layer(self, index: int, prefill: Prefill) -> PageCodec:
        return Blocks()

    def sized(self, index: int, held: Held) -> PageCodec:
        return Blocks()


@dataclass(frozen=True)
class Blocks(PageCodec):
    """Numbers in e2m1, their sign in the highest bit, and the scales of their blocks in e4m3."""

    bits = 4
    holds = "numbers in FP4"

    def encode(self, x: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        """Codes, uint8 [..., d], and the scales of the blocks, [..., blocks], numbers of e4m3 in x's dtype."""
        dim = x.shape[-1]
        blocks = pad(x.to(wide(x)), (0, -dim % BLOCK)).unflatten(-1, (-1, BLOCK))
        scale = (blocks.abs().amax(-1) / LEVELS[-1]).clamp(max=LARGEST).to(FORMAT).to(x.dtype)
        by = scale.to(blocks)[..., None]
        size = torch.where(by > 0, blocks.abs() / by, 0)
        levels = torch.tensor(LEVELS).to(size)
        middle = (levels[1:] + levels[:-1]) / 2
        code = torch.bucketize(size, middle)  # of two that are equally near the lower, so an odd one moves up
        code = code + ((code % 2 == 1) & (size == middle[code.clamp(max=len(middle) - 1)]))
        code = code | (blocks < 0) << 3
        return code.to(torch.uint8).flatten(-2)[..., :dim], scale

    def saturated(self, x: Tensor) -> Tensor:
        return (x.abs() > LARGEST * LEVELS[-1]).sum((1, 2))

    def decode(self, codes: Tensor, numbers: Tensor, keys: bool) -> Tensor:
        """The vectors x̂ [..., d], rounded once."""
        scale = numbers.to(wide(numbers))
        levels = torch.tensor(LEVELS).to(scale)[(codes & 7).int()]
        by = scale.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
        return (torch.where(codes < 8, levels, -levels) * by).to(numbers.dtype)

    def pages(self, head_dim: int, channels: Count, dtype: torch.dtype) -> tuple[tuple[Count, int], tuple[int, int]]:
        return (_bytes(channels) * PAGE, 0), (_bytes(head_dim) * PAGE, 0)

    def pack(self, codes: Tensor, numbers: Tensor, keys: bool) -> tuple[Tensor, Tensor]:
        planes = super().pack(codes, numbers, keys)[0].unflatten(-1, (PAGE, -1))
        scales = numbers.to(FORMAT).view(torch.uint8)
        return torch.cat([planes, scales], -1).flatten(-2), numbers.new_empty(*numbers.shape[:-2], 0)

    def unpack(self, codes: Tensor, numbers: Tensor, dim: int, keys: bool) -> tuple[Tensor, Tensor]:
        planes, scales = codes.unflatten(-1, (PAGE, -1)).split([vector_bytes(dim, 4), -(-dim // BLOCK)], -1)
        found, _ = super().unpack(planes.flatten(-2), numbers, dim, keys)
        return found, scales.view(FORMAT).to(numbers.dtype)


def _bytes(dim: Count) -> Count:
    """Bytes of a vector: its codes, and a scale for every block."""
    return vector_bytes(dim, 4) + -(-dim // BLOCK)
