"""Double Sparsity (arXiv 2408.07092, section 3): a query reads the tokens that score highest on a few channels."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.eval.cache.attention.batched import PartLayout
from leank.eval.cache.attention.ranking import Ranking
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Store
from leank.eval.methods.axes import Observe, Reads, method
from leank.eval.methods.channels.double_sparsity_channels import DoubleSparsityChannels
from leank.eval.methods.common.calibrated import Calibration
from leank.eval.methods.common.scored import middle_budget
from leank.typed import Count, OneOf, Positive, Samples, Seed, Share


@method("double_sparsity")
@dataclass(frozen=True)
class DoubleSparsity(Reads):
    """Each query head reads the tokens of the middle with the largest product over the label channels.

      score_t = sum over label channels i of q_i k_ti

    The label channels are those of the largest mean |q_i k_i| in calibration (`DoubleSparsityChannels`). The
    budget - sink - window tokens of the highest score are read. On pruned channels, the kept ones among the labels
    count.

    Deviations
    - The labels are read from the stored keys, where they stand before the other channels, so no second copy in 2 or 4
      bits is held. With `label_bits` they are rounded as such a copy is, per token and head, without the copy's bytes.
    - The authors leave layers 0 and 1 dense: dense_layers=2. Here every layer reads by its labels by default.
    - Plain PyTorch, which runs where the Triton kernel cannot, masks the other tokens: time is not the method's.
    """

    budget: Positive = 1024  # tokens that a query head reads in all, sink and window included
    ratio: Share = 0.875  # share of channels that are no labels
    task: str = "niah_single_2"  # task of the calibration samples
    length: Positive = 512  # longest calibration sample, tokens
    samples: Samples = 256  # number of calibration samples
    seed: Seed = 7  # seed of the calibration samples
    dense_layers: Count = 0  # first layers that read everything
    # bits that labels are rounded to before tokens are chosen; 16 leaves them as they are. Each token's labels share a
    # scale and a zero point in a KV head.
    label_bits: Annotated[int, OneOf(2, 4, 16)] = 16
    _found: Calibration = field(default_factory=Calibration, repr=False, compare=False)

    @cached_property
    def labels(self) -> DoubleSparsityChannels:
        """The choice of label channels, whose mask is [L, H, D] after calibration."""
        return DoubleSparsityChannels(self.ratio, self.task, self.length, self.samples, self.seed, self._found)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.labels.check(config, tokenizer)

    def check_sizes(self, sizes: Sizes) -> None:
        middle_budget(self.budget, sizes)

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        self.labels.calibrate(observe, tokenizer, config)

    def of_layer(self, index: int) -> Labels | None:
        return None if index < self.dense_layers else Labels(self.labels.mask()[index], self.budget, self.label_bits)


@dataclass(frozen=True)
class Labels:
    """The rule of one layer."""

    channels: Tensor  # bool [H, D]: label channels
    budget: int  # what a query head reads in all
    bits: int = 16  # bits that labels are rounded to; 16 leaves them as they are
    most: int = 0  # what it reads of the middle, known once the layer has sizes

    @property
    def labels(self) -> Tensor:
        return self.channels

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.most, bits=self.bits)

    def start(self, store: Store) -> Labels:
        """The labels on the layer's device, so that no step waits for them; nothing else is kept for the layer."""
        return replace(
            self, channels=self.channels.to(store.ring_k.device), most=middle_budget(self.budget, store.sizes)
        )

    def moved(self, store: Store) -> None:
        pass  # labels do not depend on tokens or rows

    def sees(self, q: Tensor, keys: list[Tensor], layout: PartLayout) -> Tensor:
        label = self.channels.to(q.device).repeat(len(q) // len(self.channels), 1)  # [X, D]
        among = layout.kept(label[:, None].to(q.dtype))  # [X, 1, C]
        labels = [rounded(k, among.mT > 0, self.bits) for k in keys]
        score = torch.cat([torch.bmm(q * among, k) for k in labels], -1).masked_fill(layout.hidden, -torch.inf)
        chosen = score.topk(min(self.most, score.shape[-1])).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True)

    def tensors(self) -> dict[str, Tensor]:
        return {"labels": self.channels}


def rounded(keys: Tensor, chosen: Tensor, bits: int) -> Tensor:
    """Keys [..., C, N] whose chosen channels [..., C, 1] are rounded to `bits`, with a scale and zero point per token.

    Q(x) = round((x - z) / s) s + z,   z = min x,   s = (max x - min x) / (2^bits - 1), over a token's chosen channels
    """
    if bits == 16 or keys.shape[-2] == 0:  # a head without channels has nothing to round
        return keys
    low = keys.masked_fill(~chosen, torch.inf).amin(-2, keepdim=True)
    high = keys.masked_fill(~chosen, -torch.inf).amax(-2, keepdim=True)
    step = (high - low) / low.new_full((), 2**bits - 1)  # CUDA divides by a Python number inexactly
    near = ((keys - low) / torch.where(step > 0, step, 1)).round() * step + low
    return torch.where(chosen, near, keys)
