"""What a choice of channels scores: in every layer the prompt's last queries and the keys that stay."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leank.channel_scores import wide
from leank.data_gen.amount import amount
from leank.eval.inference.prefill import Prefill, PromptLayer


class Seen(NamedTuple):
    """One layer of B prompts."""

    layer: PromptLayer  # its K, V and last queries
    stays: Tensor  # bool [B, 1 or H, T]: the keys that count

    @property
    def keys(self) -> Tensor:
        """The keys that count [B, H, T, D], float32 or wider; zero where they do not, so that sums leave them out."""
        return self.layer.keys.to(wide(self.layer.keys)) * self.stays[..., None]

    def queries(self, count: int) -> Tensor:
        """The prompt's last `count` queries after RoPE [B, Hq, count, D], float32 or wider, or ValueError."""
        if self.layer.queries is None:
            raise ValueError(f"the pass over the prompt kept no queries; run it with obs_queries={count}")
        last = self.layer.queries[:, :, -count:]
        return last.to(wide(last))


def seen(prefill: Prefill, queries: int = 0, recent: int = 0) -> Iterator[Seen]:
    """Every layer of B prompts with the keys that count.

    Padding and tokens that the tokens axis dropped do not count. A layer with sliding-window attention stays dense
    whatever is chosen for it, so the first layer with full attention stands in its place.
    queries: how many last queries the caller will read
    recent: how many last tokens do not count either; a head that has no others keeps them
    Raises ValueError if a prompt has fewer tokens than `queries`.
    """
    shortest = int(prefill.lengths.min())
    if shortest < queries:
        raise ValueError(f"a prompt of {amount(shortest, 'token')} has no {queries} queries to observe; lower queries")
    full = [i for i, layer in enumerate(prefill.layers) if isinstance(layer, PromptLayer)]
    if not full:
        raise ValueError("every layer of the model has a sliding window: there is no middle, and nothing to observe")
    for index in range(len(prefill.layers)):
        at = index if index in full else full[0]
        layer, chosen = prefill.layers[at], prefill.selected and prefill.selected[at]
        real = layer.real(prefill.real)
        if real is None:
            real = layer.keys.new_ones(layer.keys.shape[0], layer.keys.shape[2]).bool()
        stays = real[:, None] if chosen is None else chosen & real[:, None]
        earlier = stays.clone()
        earlier[..., max(0, stays.shape[-1] - recent) :] = False
        yield Seen(layer, torch.where(earlier.any(-1, keepdim=True), earlier, stays))
