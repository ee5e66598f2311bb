"""DuoAttention (arXiv 2410.10819, section 2): streaming heads keep sink and window, retrieval heads keep everything.

w_hf is of LeanK (arXiv 2508.02215), section 5.2 and appendix D.
"""

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import lowest_frequencies
from leank.data_gen.amount import amount
from leank.data_gen.task import Sample
from leank.data_gen.tasks import task
from leank.eval.benchmarks.ruler import draw
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import Observe, Tokens, method
from leank.eval.methods.common.calibrated import Calibration
from leank.shape import kv_shape
from leank.typed import OneOf, Positive, Seed

CALIBRATION = ("task", "length", "seed", "queries")
COUNTS = ("nearest", "authors")
ORDERS = ("highest", "lowest", "random")


@method("duo_attention")
@dataclass(frozen=True)
class DuoAttention(Tokens):
    """A share of the KV heads streams: those of the lowest gates, or without gates those of the highest w_hf.

      w_hf = ||q_high K_high^T||_F / ||q K^T||_F

    high is the half of the channels that RoPE turns fastest; q are the last queries of one sample, of all query heads
    of a KV head's group.

    Deviations
    - Without a pattern nothing is trained. LeanK measures w_hf at 64K, on RULER's vt in appendix D and on a niah task
      in section 5.2; the default here is vt at 2K.
    - Of equal gates the lower layer's head streams first; the authors' code draws lots.
    - int(ratio * heads + 0.5) heads stream by default. The authors' code takes ceil(ratio * (heads - 1)), at times one
      head fewer: count="authors".
    """

    free = "ratio"
    pattern: str | None = None  # the authors' full_attention_heads.tsv, gates [L, H]; None uses w_hf
    ratio: Annotated[float, Ge(0), Le(1)] = 0.5  # share of the KV heads that stream
    task: str = "vt"  # task of the sample on which w_hf is measured
    length: Positive = 2048  # longest sample, tokens
    seed: Seed = 7  # seed of the sample
    queries: Positive = 32  # last queries of the sample, q
    count: Annotated[str, OneOf(*COUNTS)] = "nearest"  # how many heads stream, see above
    # which heads stream by their w_hf. With a pattern, the highest w_hf are the lowest gates. "lowest" and "random" (by
    # `seed`) are the controls of LeanK's figure 8.
    order: Annotated[str, OneOf(*ORDERS)] = "highest"
    _ratios: Calibration = field(default_factory=Calibration, repr=False, compare=False)

    @property
    def obs_queries(self) -> int:
        return 0  # its queries are those of the sample

    @property
    def calibrated_on(self) -> tuple[object, ...]:
        """The settings on which w_hf depends."""
        return tuple(getattr(self, name) for name in CALIBRATION)

    @cached_property
    def gates(self) -> Tensor:
        """The pattern [L, H]. Raises ValueError naming the setting."""
        assert self.pattern is not None
        try:
            found = np.asarray_chkfinite(np.loadtxt(self.pattern, ndmin=2))
        except (OSError, ValueError) as error:
            raise ValueError(f"pattern={self.pattern}: {error}; give a full_attention_heads.tsv, or null") from error
        return torch.from_numpy(found).clamp(0, 1)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.pattern is not None:
            found, wanted = tuple(self.gates.shape), kv_shape(config)[:2]
            if found != wanted:
                raise ValueError(
                    f"pattern={self.pattern} is of {amount(found[0], 'layer')} x {amount(found[1], 'KV head')}, the "
                    f"model of {wanted[0]} x {wanted[1]}; give this model's"
                )
            return
        task(self.task)
        lowest_frequencies(config, 0.5)
        self._sample(tokenizer)

    def identity(self) -> dict[str, object]:
        """The settings; a pattern counts by its contents, not by its path."""
        found = super().identity()
        if self.pattern is None:
            return {name: value for name, value in found.items() if name != "pattern"}
        dropped = [name for name in CALIBRATION if not (name == "seed" and self.order == "random")]
        digest = hashlib.sha256(self.gates.numpy().tobytes()).hexdigest()[:16]
        return {name: value for name, value in found.items() if name not in dropped} | {"pattern": digest}

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        if not self.settled:
            high, prefill = ~lowest_frequencies(config, 0.5).keep, observe(self._sample(tokenizer), self.queries)
            self._ratios[self.calibrated_on] = high_frequency_ratio(prefill, high, self.queries)

    def _sample(self, tokenizer: PreTrainedTokenizerBase) -> Sample:
        return draw(self.task, self.length, tokenizer, self.seed, 0)

    def streaming(self) -> Tensor:
        """Heads that stream, bool [L, H]; by w_hf never those of layers with sliding-window attention."""
        full = -self._ratios[self.calibrated_on] if self.pattern is None else self.gates
        finite = full.isfinite()
        count = self.how_many(int(finite.sum()))
        if self.order == "random":
            full = torch.rand(full.shape, generator=torch.Generator().manual_seed(self.seed))
        first = (-full if self.order == "lowest" else full).masked_fill(~finite, torch.inf)
        return (first.flatten().argsort(stable=True).argsort() < count).view_as(full)

    def how_many(self, heads: int) -> int:
        """How many of `heads` KV heads stream."""
        return int(self.ratio * heads + 0.5) if self.count == "nearest" else math.ceil(self.ratio * (heads - 1))

    def keep_mask(self, prefill: Prefill, config: PreTrainedConfig, sizes: Sizes) -> list[Tensor | None]:
        kept: list[Tensor | None] = []
        for layer, streams in zip(prefill.layers, self.streaming(), strict=True):
            if not isinstance(layer, PromptLayer) or not streams.any():
                kept.append(None)
                continue
            real = layer.real(prefill.real)
            real = torch.ones_like(layer.keys[:, 0, :, 0], dtype=torch.bool) if real is None else real
            kept.append(real[:, None] & ~streams.to(real.device)[:, None])
        return kept

    @property
    def settled(self) -> bool:
        return self.pattern is not None or self.calibrated_on in self._ratios

    def kept_counts(self, config: PreTrainedConfig, columns: list[int], sizes: Sizes) -> np.ndarray:
        if self.settled:
            retrieval = ~self.streaming().numpy()
        else:
            layers, heads, _ = kv_shape(config)
            retrieval = np.full((layers, heads), 1 - self.how_many(layers * heads) / (layers * heads))
        return np.maximum(0, np.array(columns) - sizes.sink - sizes.window)[:, None] * retrieval

    def joins(self, config: PreTrainedConfig) -> Tensor:
        return ~self.streaming()


def high_frequency_ratio(prefill: Prefill, high: Tensor, queries: int) -> Tensor:
    """w_hf [L, H] of one prompt by its last queries, -inf under sliding windows; high: bool [L, H, D], channels."""
    ratio = torch.full(high.shape[:2], -torch.inf)
    for index, layer in enumerate(prefill.layers):
        if isinstance(layer, PromptLayer) and layer.queries is not None:
            q = layer.queries[0, :, -queries:].unflatten(0, (high.shape[1], -1)).flatten(1, 2).float()  # [H, G n, D]
            k, part = layer.keys[0].float(), high[index, :, None].to(q.device)
            some, all_ = (torch.linalg.matrix_norm(x @ k.transpose(-1, -2)) for x in (q * part, q))
            ratio[index] = (some / all_).cpu()
    return ratio
