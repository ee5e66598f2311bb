"""A cache layer's batch as a whole: its rows reordered, repeated or dropped, and its tensors moved between devices."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from leank.data_gen.amount import amount
from leank.eval.cache.storage.store import Store


class RowsLayer(DynamicLayer):
    """A layer whose tokens lie in `keys` and `values` until they are sealed into a store.

    store: what a sealed layer holds, None before
    """

    store: Store | None
    _real: Tensor | None  # [B, columns] of an unsealed prompt
    _columns: int  # logical length, padding included

    @property
    def waiting(self) -> bool:
        """Whether tokens that followed the prompt were never attended: a pass broke off there."""
        return self.store is not None and self.keys is not None

    def _real_of(self, padding_mask: Tensor) -> Tensor:
        """Which columns are real, [B, columns]; raises ValueError unless the mask is 2-D and covers them all."""
        if padding_mask.ndim != 2:
            raise ValueError(f"a compressed cache takes a 2-D padding mask, got shape {tuple(padding_mask.shape)}")
        if padding_mask.shape[1] < self._columns:
            raise ValueError(
                f"attention_mask has {amount(padding_mask.shape[1], 'column')}, and the cache {self._columns} with the "
                "new ones: call cache.reset(), then give ids and mask of the whole conversation, and leave use_cache on"
            )
        return padding_mask[:, : self._columns].bool()

    def _select(self, rows: Tensor) -> None:
        if self.store is not None:
            self.store.select(rows)
        elif self.keys is not None and self.values is not None:
            at = rows.to(self.keys.device)
            self.keys, self.values = self.keys[at], self.values[at]
            self._real = None if self._real is None else self._real[at]

    def _count(self) -> int:
        """Rows held, 0 before the first token."""
        held = self.keys if self.store is None else self.store.ring_k
        return 0 if held is None else len(held)

    def _rows(self) -> Tensor:
        return torch.arange(self._count())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the batch the rows `beam_idx` [R] of the present one."""
        if not torch.equal(beam_idx.cpu(), self._rows()):
            self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._select(self._rows().repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows that `indices`, numbers or bool, select."""
        rows = self._rows()
        self._select(rows[indices.to(rows.device)])

    def offload(self) -> None:
        """Move everything held to the CPU; attend() fetches it back."""
        if self.store is not None:
            self.store.to(torch.device("cpu"))

    def prefetch(self) -> None:
        """Fetch everything held back to the device of the prompt."""
        if self.store is not None:
            self.store.to(self.device)
