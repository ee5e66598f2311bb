"""TriAttention (arXiv 2604.04921): the tokens that queries of the calibrated mean would attend to from afar.

The rule is that of WeianMao/triattention c3744ee (Apache-2.0), methods/pruning_utils.py and triattention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import wide
from leank.data_gen.task import Sample
from leank.eval.cache.storage.eviction import HeavyHitters
from leank.eval.cache.storage.segment import Segment
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import Observe, method
from leank.eval.methods.common.calibrated import FromSamples
from leank.eval.methods.common.observed import seen
from leank.eval.methods.common.scored import Evicting
from leank.eval.methods.tokens.expected_attention import check_rope, frequencies, turn
from leank.shape import kv_shape
from leank.typed import Positive, Samples

LEAST = 1e-6  # a deviation that scores are divided by is not smaller


@method("triattention")
@dataclass(frozen=True)
class TriAttention(FromSamples, Evicting):
    """Every KV head keeps the tokens of the largest score of a query at a distance, before RoPE and by its mean.

      s_j     = mean over o of sum_f |E q_f| |k_jf| cos(w_f (t - p_j + o) + arg(E q_f) - arg(k_jf))
                + sum_f (E |q_f| - |E q_f|) |k_jf|,    o = 1, 2, 4, ... up to `future`
      score_j = max over the group's query heads of (s_j - mean_i s_i) / std_i s_i

    q_f and k_f are pair f of RoPE's channels as a complex number before RoPE, w_f its frequency, p_j the token's
    position, t the next token's. E q_f and E |q_f| are means over all queries of the calibration samples. While
    decoding, tokens leave whenever `flush` have left the window. The authors' tables have sink=0, window=0, flush=128
    and keep_prompt, their plug-in for vLLM window=128 and no keep_prompt.

    Deviations
    - Every KV head of every layer chooses by itself, the authors' `per_layer_perhead_pruning`. In their tables KV head
      h keeps the same tokens in all layers, by the mean of score_j over layers.
    - A prompt longer than the budget is cut at its end, with mean and std over all its tokens.
    - Rounds come every `flush` tokens from the prompt's end on. The authors' first comes with budget + 128 tokens.
    - Of equal scores the later token stays, of the prompt's the earlier; the authors add noise below 1e-6.
    - While decoding, mean and std are over the middle's tokens that compete, and keys count in the channels that they
      keep; under a mask with mean keys, these count in the others.
    - Queries are those that RoPE turns, behind the norm that some models have (Qwen3); the authors' calibrate.py leaves
      it out.
    - Calibration samples are RULER's prompts of natural text, 30,000 tokens; the authors take up to 32,768 of any text.
    """

    task: str = "niah_single_2"
    length: Positive = 2048
    samples: Samples = 15
    future: Positive = 65536  # largest distance o to a query to come
    keep_prompt: bool = False  # whether no token of the prompt leaves for one of the reply

    @property
    def observed(self) -> int:
        """All queries of a sample."""
        return self.length

    @property
    def calibrated_on(self) -> tuple[object, ...]:
        return self.task, self.length, self.samples, self.seed

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        check_rope("triattention", config)
        super().check(config, tokenizer)

    def calibrate(self, observe: Observe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        def before_rope(sample: Sample, queries: int) -> Prefill:
            prefill = observe(sample, queries)
            for layer in prefill.layers:
                if isinstance(layer, PromptLayer) and layer.queries is not None:
                    device, end = layer.queries.device, layer.get_seq_length()
                    place = torch.arange(end - layer.queries.shape[2], end, device=device)
                    angle = -place[:, None] * frequencies(config).to(device)
                    layer.queries = turn(layer.queries, torch.polar(torch.ones_like(angle), angle)[None])
            return prefill

        super().calibrate(before_rope, tokenizer, config)

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """E q_f and E |q_f| of every query head: complex128 [L, Hq, 2, D / 2]."""
        total, count = torch.zeros(()), 0
        for prefill in passes:
            pairs = [torch.complex(*one.queries(self.length)[0].double().chunk(2, -1)) for one in seen(prefill)]
            total = total + torch.stack([torch.stack([q.sum(1), q.abs().sum(1) + 0j], 1).cpu() for q in pairs])
            count += pairs[0].shape[1]
        return total / count

    def centres(self, index: int, config: PreTrainedConfig) -> Centres:
        """What calibration found of layer `index`. Raises RuntimeError before it."""
        mean, size = self._found[self.calibrated_on][index].unflatten(0, (kv_shape(config)[1], -1)).unbind(2)
        return Centres(mean, size.real, frequencies(config), self.future)

    def of_layer(self, index: int, prefill: Prefill, config: PreTrainedConfig) -> Tensor:
        layer = prefill.layers[index]
        real = layer.real(prefill.real)
        there = torch.ones_like(layer.keys[:, 0, :, 0], dtype=torch.bool) if real is None else real
        return self.centres(index, config).scores(layer.keys, there[:, None], prefill.lengths)

    def policy(self, heavy: int, index: int, config: PreTrainedConfig) -> Attractive:
        return Attractive(heavy, self.centres(index, config), self.keep_prompt)


@dataclass(frozen=True)
class Centres:
    """The queries of a layer's H KV heads of G query heads each, before RoPE, on the host.

    mean, size: E q_f, complex128, and E |q_f|, float64, each [H, G, D / 2]
    frequency: w_f, float64 [D / 2]; future: see `TriAttention`
    """

    mean: Tensor
    size: Tensor
    frequency: Tensor
    future: int

    def of_head(self, head: int) -> Centres:
        """Those of one KV head."""
        return replace(self, mean=self.mean[head, None], size=self.size[head, None])

    def scores(self, keys: Tensor, there: Tensor, now: Tensor) -> Tensor:
        """score_j [B, H, n] of keys [B, H, n, D] after RoPE; mean and std are over those that are `there`.

        there: bool, broadcast to [B, H, n]; now: int [B], the next token's position t

        |k_f| is the same after RoPE, and the first sum is the product of the key with E q_f turned to t + o.
        """
        keys, device = keys.to(wide(keys)), keys.device
        ahead = now.to(device).double()[:, None] + 2.0 ** torch.arange(self.future.bit_length(), device=device)
        angle = ahead[..., None] * self.frequency.to(device)
        turned = torch.polar(torch.ones_like(angle), angle).mean(1)  # over o, [B, D / 2]
        aim = self.mean.to(device) * turned[:, None, None]
        spread = (self.size - self.mean.abs()).to(keys)
        found = torch.cat([aim.real, aim.imag], -1).to(keys) @ keys.mT + spread @ torch.hypot(*keys.chunk(2, -1)).mT
        weight = there[:, :, None] / there[:, :, None].sum(-1, keepdim=True)  # [B, H, G, n] has found
        centred = found - (weight * found).sum(-1, keepdim=True)
        deviation = (weight * centred**2).sum(-1, keepdim=True).sqrt().clamp(min=LEAST)
        return (centred / deviation).amax(2)


class Attractive(HeavyHitters):
    """The `heavy` tokens of a head's middle with the largest score stay; with `keep_prompt` the prompt's go first."""

    prompt: np.ndarray  # [B, H] on the host, how many tokens of the prompt a head holds, where they rank first

    def __init__(self, heavy: int, centres: Centres, keep_prompt: bool = False) -> None:
        super().__init__(heavy)
        self.centres, self.keep_prompt = centres, keep_prompt

    def begin(self, scores: Tensor, held: np.ndarray) -> Self:
        new = super().begin(scores, held)
        new.prompt = held.copy()
        return new

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.prompt = self.prompt[rows.cpu().numpy()]

    def ranking(self, prompt: Segment, tail: Segment, sink: int) -> Tensor:
        found = torch.zeros_like(self.scores)
        for row, head in np.argwhere(prompt.length + tail.length > self.heavy).tolist():
            kept = torch.cat([part.read(row, head)[0] for part in (prompt, tail)])
            keys = kept.new_zeros(1, 1, len(kept), tail.head_dim)
            keys[..., tail.channels.index[row, head, : kept.shape[1]].long()] = kept
            if self.center is not None:
                keys = keys + self.center[head]  # as those of the prompt were scored
            there = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
            first = max(0, int(self.prompt[row, head]) - sink) if self.keep_prompt else 0  # the prompt's, in order
            there[..., :first] = first >= len(kept)
            self.prompt[row, head] -= max(0, min(first, len(kept)) - self.heavy)  # those that this round drops
            now = torch.tensor([self.seen[row]], device=keys.device)
            of_head = self.centres.of_head(head).scores(keys, there, now)[0, 0]
            of_head[:first] += of_head.max() - of_head.min() + 1
            found[row, head, sink : sink + len(of_head)] = of_head
        return found
