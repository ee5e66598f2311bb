"""Double Sparsity (arXiv 2408.07092): a query reads the tokens that score highest on a few channels."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from eval.cache.storage.middle import Columns
from eval.cache.storage.store import Sizes, Store
from eval.methods.axes import Observe, Reads
from eval.methods.channels.double_sparsity_channels import DoubleSparsityChannels
from eval.methods.common.selection import spare
from leank_train.common.typed import Positive, Seed, Share


@dataclass(frozen=True)
class DoubleSparsity(Reads):
    """budget: tokens that a query head reads in all, sink and window included. ratio: share of channels that are left
    out of the first look. task, length, samples, seed: what its channels are calibrated on.

    Each query head reads the budget - sink - window tokens of the middle with the largest q k over the label channels,
    those of the largest mean |q_i k_i| in calibration (`DoubleSparsityChannels`); on pruned channels, the kept ones
    among them. The labels are read from the stored keys, whose channels lie apart, so no second copy is held. Plain
    PyTorch reads the other tokens too and masks them: answers are the method's, time is not.
    """

    budget: Positive = 1024
    ratio: Share = 0.875
    task: str = "niah_single_2"
    length: Positive = 512
    samples: Positive = 256
    seed: Seed = 7
    _labels: list[DoubleSparsityChannels] = field(default_factory=list, repr=False, compare=False)

    @property
    def labels(self) -> DoubleSparsityChannels:
        """The channels of the first look, [L, H, D] after calibration."""
        if not self._labels:
            self._labels.append(DoubleSparsityChannels(self.ratio, self.task, self.length, self.samples, self.seed))
        return self._labels[0]

    def identity(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if not entry.name.startswith("_")}

    def check(self, config: Any, tokenizer: Any) -> None:
        self.labels.check(config, tokenizer)

    def check_sizes(self, sizes: Sizes) -> None:
        spare(self.budget, sizes)

    def calibrate(self, observe: Observe, tokenizer: Any, config: Any) -> None:
        self.labels.calibrate(observe, tokenizer, config)

    def of_layer(self, index: int, config: Any) -> Labels:
        return Labels(self.labels.keep_mask(None, config)[index], self.budget)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Labels:
    """The first look of one layer: label channels bool [H, D]; of the middle `most` tokens are then read."""

    channels: Tensor
    budget: int
    most: int = 0

    def start(self, store: Store) -> Labels:
        """The labels where the layer is, so that no step waits for them; nothing else is kept beside it."""
        return replace(self, channels=self.channels.to(store.ring_k.device), most=spare(self.budget, store.sizes))

    def moved(self, store: Store) -> None:
        """Labels do not depend on tokens or rows."""

    def visible(self, row: int, head: int, q: Tensor, k: Tensor, channels: Tensor) -> Tensor:
        label = self.channels.to(q.device)[head, channels]
        score = q[..., label] @ k[:, label].T  # [G, Q, tokens]
        chosen = score.topk(min(self.most, len(k))).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True)

    def sees(self, q: Tensor, keys: list[Tensor], layout: Columns) -> Tensor:
        label = self.channels.to(q.device).repeat(len(q) // len(self.channels), 1)  # [X, D]
        few = q * layout.kept(label[:, None].to(q.dtype))
        score = torch.cat([torch.bmm(few, k) for k in keys], -1).masked_fill(layout.hidden, -torch.inf)
        chosen = score.topk(min(self.most, score.shape[-1])).indices
        return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, chosen, True)

    def tensors(self) -> dict[str, Tensor]:
        """The labels."""
        return {"labels": self.channels}
