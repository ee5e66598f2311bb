"""The layers of linear attention in a compressed cache: states in place of K and V, of which nothing is compressed."""

from typing import Never

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer


class StateLayer(LinearAttentionLayer):
    """The layer of transformers, in a cache that serves one batch after another and whose rows can be repeated."""

    @property
    def states(self) -> list[Tensor]:
        """All tensors held."""
        return [x for x in (*self.conv_states.values(), *self.recurrent_states.values()) if x is not None]

    def reset(self) -> None:
        """Make the layer new, for a batch of any size."""
        self.__init__(self.number_of_states)  # type: ignore[misc]

    def _rows(self) -> Tensor:
        return torch.arange(len(self.states[0]) if self.states else 0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.reorder_cache(self._rows().repeat_interleave(repeats))  # type: ignore[arg-type]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices`, numbers or bool, select."""
        rows = self._rows()
        self.reorder_cache(rows[indices.to(rows.device)])  # type: ignore[arg-type]

    def activate_past_recording(self) -> Never:
        """Raise ValueError: assisted decoding takes tokens back, and a state has no tokens."""
        raise ValueError(
            "assisted decoding takes tokens back, and the linear attention of this model cannot; call generate() "
            "without an assistant"
        )

    def crop(self, tokens_to_remove: int) -> Never:
        """Raise ValueError; see `activate_past_recording`."""
        self.activate_past_recording()
