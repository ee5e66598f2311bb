"""KVTuner: KIVI's codes, in bits that a search finds for the K and the V of every layer.

"KVTuner: Sensitivity-Aware Layer-Wise Mixed-Precision KV Cache Quantization for Efficient and Nearly Lossless LLM
Inference", arXiv 2502.04420.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from leank.channel_scores import wide
from leank.eval.cache.storage.codecs import OfHeads, PageCodec
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.prefill import Prefill, PromptLayer
from leank.eval.methods.axes import Bits, Held, method
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.common.calibrated import FromSamples
from leank.shape import kv_shape
from leank.typed import Positive

WIDTHS = (2, 4, 8)  # bits
PAIRS = tuple(product(range(len(WIDTHS)), repeat=2))  # of K and of V
STEPS = np.array([(WIDTHS[k] + WIDTHS[v]) // 2 - WIDTHS[0] for k, v in PAIRS])  # a pair's bits above the least, halved


@method("kvtuner")
@dataclass(frozen=True)
class KVTuner(FromSamples, Bits):
    """A layer's K and V have k_l and v_l bits, 2, 4 or 8, of which the mean is `bits` and the least is this sum.

      sum over layers l of e_l(k_l, v_l),   e_l(k, v) = ||o - ô||_1 / ||o||_1

    o is the output of a layer's attention to a calibration sample's tokens for its last queries, and ô the same over K
    in k and V in v bits (`kivi`); e_l is the mean over samples.

    Deviations
    - The paper leaves out pairs that another pair beats in bits and error, groups layers of similar errors, and then
      searches the pairs of groups by the score of the whole model on calibration problems (Optuna). Here the sum of
      errors decides, and its least is found exactly, by dynamic programming over layers without groups.
    - Calibration samples are RULER's prompts, the paper's problems of GSM8K.
    - Sink and window are the cache's; a window is the paper's residual.
    - Plain PyTorch reads the numbers: answers and bytes are the method's, time is not.
    """

    bits: Annotated[float, Ge(2), Le(8)] = (
        3.25  # mean over K and V of all layers; the nearest below that pairs can have
    )
    group: Positive = 32  # numbers that share a scale and a zero point; see `kivi`
    queries: Positive = 32  # last queries of a sample for which outputs are compared

    def check_sizes(self, sizes: Sizes) -> None:
        KIVI(2, self.group).check_sizes(sizes)

    def check(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().check(config, tokenizer)
        Packing(2, self.group).check(kv_shape(config)[-1])

    @property
    def calibrated_on(self) -> tuple[object, ...]:
        return self.group, self.queries, self.task, self.length, self.samples, self.seed

    def of_samples(self, passes: Iterator[Prefill]) -> Tensor:
        """Errors of every layer by the bits of K and of V, [L, 3, 3] float64; 0 under sliding windows."""
        total, count = torch.zeros(()), 0
        for prefill in passes:
            of_layers = [
                self.errors(one) if isinstance(one, PromptLayer) else torch.zeros(3, 3) for one in prefill.layers
            ]
            total, count = total + torch.stack(of_layers).double().cpu(), count + 1
        return total / count

    def errors(self, layer: PromptLayer) -> Tensor:
        """Those of one layer on one sample, [3, 3]. Raises ValueError if no whole group stands before the queries."""
        assert layer.queries is not None
        count = (layer.keys.shape[2] - self.queries) // self.group * self.group
        if count < self.group:
            raise ValueError(
                f"a sample of {layer.keys.shape[2]} tokens has no group of {self.group} before queries={self.queries}; "
                "raise length"
            )
        keys, values = (x[0, :, :count].to(wide(x)) for x in (layer.keys, layer.values))
        queries = layer.queries[0, :, -self.queries :].to(keys)
        scaling = keys.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling

        def weights(k: Tensor) -> Tensor:
            logits = queries.unflatten(0, (len(k), -1)).flatten(1, 2) @ k.mT * scaling
            return layer.softmax.weights(layer.softmax.cap(logits).view(len(queries), -1, count)).view_as(logits)

        codecs = [Packing(bits, self.group) for bits in WIDTHS]
        stored = [[one.decode(*one.encode(x, of_keys), of_keys) for one in codecs] for x, of_keys in
                  ((keys, True), (values, False))]  # fmt: skip
        want = weights(keys) @ values
        found = [[(w @ v - want).abs().sum() for v in stored[1]] for w in map(weights, stored[0])]
        return torch.stack([torch.stack(line) for line in found]) / want.abs().sum()

    def sized(self, index: int, held: Held) -> OfHeads:
        """Before calibration, some pairs of the same mean: as many bytes where layers hold as much of K as of V."""
        return self._codec(index, self._found.get(self.calibrated_on), held.ends[:, 0] > 0)

    def of_layer(self, index: int, prefill: Prefill) -> OfHeads:
        return self._codec(
            index, self._found[self.calibrated_on], np.array([isinstance(one, PromptLayer) for one in prefill.layers])
        )

    def _codec(self, index: int, errors: Tensor | None, full: np.ndarray) -> OfHeads:
        """The codec of a layer; full: bool [L], layers without a sliding window, among which bits are shared."""
        count, place = int(full.sum()), int(full[:index].sum())
        known = np.zeros((count, len(PAIRS))) if errors is None else errors.numpy()[full].reshape(count, -1)
        k, v = PAIRS[found_pairs(known, self.bits)[place]] if full[index] else PAIRS[0]
        return OfLayer(((Packing(WIDTHS[k], self.group), Packing(WIDTHS[v], self.group)),))


@dataclass(frozen=True)
class OfLayer(OfHeads):
    """The codec of one layer: as many bits in all heads, of K, and of V."""

    def bands(self, head: int, channels: int) -> Sequence[tuple[PageCodec, int]]:
        """KIVI's own, whose bands of fewer than 4 bits have another form."""
        return self.heads[0][0].bands(head, channels)


def found_pairs(errors: np.ndarray, bits: float) -> list[int]:
    """Which of `PAIRS` each layer gets, so that the sum of errors [L, 9] is least; bits: mean, rounded down."""
    steps = int((bits - WIDTHS[0]) * len(errors) + 1e-6)
    best, chosen = np.full(steps + 1, np.inf), []
    best[0] = 0  # the least sum of the layers so far, by the steps that they take
    for of_layer in errors:
        each = np.full((len(PAIRS), steps + 1), np.inf)
        for pair, (step, error) in enumerate(zip(STEPS, of_layer, strict=True)):
            each[pair, step:] = best[: max(0, steps + 1 - step)] + error
        chosen.append(each.argmin(0))
        best = each.min(0)
    left, found = int(np.flatnonzero(np.isfinite(best))[-1]), []
    for of_steps in reversed(chosen):
        found.append(int(of_steps[left]))
        left -= int(STEPS[found[-1]])
    return found[::-1]
