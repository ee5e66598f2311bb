"""A transformers cache layer whose middle is compressed, and that computes its own attention.

`update()` only appends and returns the layer itself in place of the keys; the attention function registered in
eval.cache.hook then calls `attend()`. The first call is the whole prompt (or the chunks that `expect` announced): it
is attended densely, then compressed.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING, Any, Never

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from leank.data_gen.amount import amount
from leank.eval.cache.attention import dense
from leank.eval.cache.attention.backend import BackendChoice
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.cache.prompt import PromptRoom
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.cache.storage.store import Addresses, Store
from leank.eval.cache.storage.upload import capturing


class State(Enum):
    """What a compressed layer holds."""

    EMPTY = "nothing"
    COLLECTING = "a prompt, dense, of which more may come"
    COMPRESSED = "sink, middle and window"
    RECORDING = "the same, and tokens that wait for crop() (assisted decoding)"
    OPEN = (
        "tokens of a pass that update() took and attend() has not come to; if another pass begins, that one broke off"
    )


class CompressedLayer(DynamicLayer):
    """The three parts sink | middle | window of one attention layer (LeanK, section 3.3).

    middle: how the middle is kept; sizes: sink, window and flush, in tokens
    choice: chooses the backend when the first query comes after the prompt
    store: what a compressed layer holds, None before; until then the prompt lies in `keys` and `values`
    beside_states: whether other layers of the model have linear attention, which cannot pass over all padding
    """

    # While past is being recorded, crop() can take back any number of tokens, else those since the last move.
    is_croppable = True

    def __init__(self, middle: Middle, sizes: Sizes, choice: BackendChoice) -> None:
        super().__init__()
        self.middle, self.sizes, self.choice = middle, sizes, choice
        self.record_past = self.beside_states = False
        self._kept: Addresses | None = None  # where a captured step reads the layer; the next prompt goes there
        self._clear()

    def _clear(self) -> None:
        self.is_initialized = self._open = False
        self.keys = self.values = None  # the prompt until it is compressed, then the tokens that await attend()
        self.store: Store | None = None
        self.backend: Plain | None = None  # what runs over the store, once a query has come
        self._columns = 0  # logical length, padding included
        self._expected = 0  # columns of a prompt that comes in chunks
        self._real: Tensor | None = None  # [B, columns] of an uncompressed prompt
        self._room: PromptRoom | None = None  # where an announced prompt is collected
        self.ended_at = -1  # columns of a prompt that came unannounced, once it is compressed
        self._ends_padded = False  # whether padding stands behind the last token of a row; known beside states alone

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:  # called for attributes that a layer lacks
            if not name.startswith("_") and hasattr(Tensor, name):
                raise AttributeError(
                    f"the keys of a compressed cache are no tensor, and the model asks for their {name!r}: its "
                    'attention must be "leank"; call model.set_attn_implementation("leank"), or compressed_cache() '
                    "for this model if the cache was made for another"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def state(self) -> State:
        """What it holds now."""
        if self._open:
            return State.OPEN
        if self.store is not None:
            return State.RECORDING if self.record_past else State.COMPRESSED
        return State.COLLECTING if self._columns else State.EMPTY

    def expect(self, tokens: int) -> None:
        """See `CompressedCache.expect`."""
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ValueError(f"expect({tokens!r}): give the number of tokens in the whole prompt, at least 1")
        if self._columns:
            held = amount(self._columns, "token")
            raise RuntimeError(f"expect({tokens}) must come before the prompt; this cache already holds {held}")
        self._expected = tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype and device of the first tokens; raises ValueError unless K and V have as many channels."""
        if key_states.shape[-1] != value_states.shape[-1]:
            raise ValueError(
                f"the model's keys have {key_states.shape[-1]} channels and its values {value_states.shape[-1]}; a "
                "compressed cache needs the same number: use another model"
            )
        # Under autocast K can be wider than V. SDPA would compute in the narrower type, so nothing more is held.
        self.dtype = min(key_states.dtype, value_states.dtype, key=lambda dtype: dtype.itemsize)
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Any, Tensor]:
        """Append new tokens [B, H, n, D]; returns (the layer, values). Raises ValueError for other rows or too many."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.dtype != self.dtype != value_states.dtype:
            raise ValueError(
                f"this cache holds {self.dtype} and {key_states.dtype} came: go on in the dtype of the prompt, "
                " or call cache.reset() first"
            )
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        new, rows = key_states.shape[2], self._count()
        if rows and rows != len(key_states):
            raise ValueError(
                f"this cache holds a batch of {rows}, and a batch of {len(key_states)} came: call cache.reset() before "
                "another batch"
            )
        coming = self.store is None and self._columns < self._expected  # an announced prompt is not complete yet
        beyond = self._columns + new > self._expected
        if coming and beyond and not self.record_past:  # a draft may follow the prompt at once; crop() takes it back
            raise ValueError(f"expect({self._expected}) announced fewer tokens than came: {self._columns + new}")
        if coming and new < self._expected and not beyond:
            if self._room is None:
                self._room = PromptRoom(key_states, value_states, self._expected)
                if self.keys is not None and self.values is not None:  # a whole prompt came, and crop() shortened it
                    self._room.put(self.keys, self.values, 0)
            key_states, value_states = self._room.put(key_states, value_states, self._columns)
        elif self.keys is not None:
            self._room = None
            key_states = torch.cat([self.keys, key_states], 2)
            value_states = torch.cat([self.values, value_states], 2)  # type: ignore[list-item]
        self.keys, self.values = key_states, value_states
        self._columns += 0 if capturing(key_states) else new
        self._open = True
        return self, value_states

    def attend(
        self, q: Tensor, padding_mask: Tensor | None = None, scaling: float | None = None, softmax: Softmax = PLAIN
    ) -> Tensor:
        """Attention of the last queries over everything held; then tokens that are due leave the window.

        Several tokens after the prompt, such as a later turn, give what they give one by one: each query reads the
        tokens whole that are in the window when it comes, and through the middle those that have left it by then.

        q: [B, Hq, Q, D]; scaling: factor of the logits, None = 1 / sqrt(D)
        padding_mask: [B, >= columns] bool or 0/1, False = padding, None = no padding
        Returns [B, Q, Hq, D]. Raises ValueError unless the mask is 2-D and covers every column, and for padding that
        other layers of the model would take for tokens.
        """
        real = None if padding_mask is None else self._real_of(padding_mask)
        if self.beside_states:
            self._check_padding(real, q.shape[2])
        kind = q.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            out = self._attend(q.to(self.dtype), real, scaling, softmax)
        self._open = False
        return out

    def _check_padding(self, real: Tensor | None, new: int) -> None:
        wrong = self._ends_padded
        if real is not None and (new > 1 or self.store is None):  # no decoding step, which would wait for the device
            behind = ~real & (real.cumsum(-1) > 0)
            alone = new == 1 and not bool(real[:, -1].all())
            wrong = alone or bool((real & (behind.cumsum(-1) > 0)).any())
            self._ends_padded = bool(behind[:, -1].any())
        if wrong:
            raise ValueError(
                "linear attention of this model takes padding for a token where it stands behind a token, or comes "
                "alone in a pass: call cache.reset(), pad prompts on the left and later turns not at all, and let "
                "chunks of a padded prompt have two tokens or more"
            )

    def _attend(self, q: Tensor, real: Tensor | None, scaling: float | None, softmax: Softmax) -> Tensor:
        if self.middle.center is not None and not softmax.plain:
            raise ValueError(
                "this model's softmax has soft-capped logits or attention sinks, which the mask's mean_keys would "
                "change; take mask.with_means(None)"
            )
        if self.store is None:
            out = dense.attend(q, self.keys, self.values, scaling, real, softmax)  # type: ignore[arg-type]
            self._real = real
            if not self.record_past:
                self._settle()
                self.ended_at = self._columns if self.store is not None and not self._expected else -1
            return out
        new = q.shape[2]
        real = None if real is None or new == 1 or bool(real[:, -new:].all()) else real[:, -new:]
        store, keys, values = self.store, self.keys, self.values
        assert isinstance(keys, Tensor)
        assert isinstance(values, Tensor)
        self.keys = self.values = None
        scale = 1 / math.sqrt(q.shape[-1]) if scaling is None else scaling
        if new == 1 or self.record_past:
            return self._pass(store, q, keys, values, real, scale, softmax)
        outs = []
        padded = np.zeros(new, dtype=bool) if real is None else ~real.all(0).cpu().numpy()
        for part in pieces(store, new):  # of a later turn
            there = real[:, part] if real is not None and padded[part].any() else None
            outs.append(self._pass(store, q[:, :, part], keys[:, :, part], values[:, :, part], there, scale, softmax))
        return torch.cat(outs, 1)

    def _pass(
        self, store: Store, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, scale: float, softmax: Softmax
    ) -> Tensor:
        """Take in new tokens, attend, and move tokens that are due out of the window."""
        if self.backend is None:
            self.backend = self.choice.choose(store, q, softmax)
            if self._kept is not None:
                if self._kept.take(store):
                    self.backend.adopt(store, self._kept.plan)
                self._kept = None
        position = store.append(k, v, real, self.backend.write)
        out = self.backend.attend(store, q, position, scale, softmax)
        if not (self.record_past or capturing(q)):
            self._settle()
        return out

    def compress(
        self,
        k: Tensor,
        v: Tensor,
        real: Tensor | None = None,
        tokens: Tensor | None = None,
        scores: Tensor | None = None,
        columns: int | None = None,
    ) -> None:
        """Take a whole prompt that was attended elsewhere; the parameters but the last are those of `Store`.

        columns: length of the prompt, padding included, where the layer is given fewer of its tokens; None = T
        Raises RuntimeError if the layer already holds tokens.
        """
        if self._columns:
            held = amount(self._columns, "token")
            raise RuntimeError(f"compress() takes the place of the prompt; this layer already holds {held}")
        self.lazy_initialization(k, v)
        self._columns = k.shape[2] if columns is None else columns
        self._begin(k.to(self.dtype), v.to(self.dtype), real, tokens, scores)

    def resume(self, store: Store, columns: int) -> None:
        """Go on from the store of a prompt of `columns` columns that was compressed before (`eval.cache.saved`)."""
        self.lazy_initialization(store.ring_k, store.ring_v)
        self.store, self._columns = store, columns

    def _begin(self, k: Tensor, v: Tensor, real: Tensor | None, *of_prompt: Tensor | None) -> None:
        real = None if real is None or bool(real.all()) else real
        self.store = Store(k, v, real, self.middle, self.sizes, *of_prompt)

    def _settle(self) -> None:
        """Compress a finished prompt, or move tokens that are due out of the window."""
        if self.store is not None:
            self._flush(self.store)
        elif self.keys is not None and self._columns >= self._expected:
            self._begin(self.keys, self.values, self._real)  # type: ignore[arg-type]
            self.keys = self.values = self._real = None
            self._room = None

    def _flush(self, store: Store) -> None:
        if self.backend is None:
            store.flush()
        else:
            store.flush(self.backend.move, self.backend.evict)

    def get_seq_length(self) -> int:
        """The logical length: columns seen, padding included."""
        return self._columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns that a mask for the next queries covers, the first of them)."""
        return self._columns + query_length, 0

    def reset(self) -> None:
        """Make the layer new."""
        self.record_past = False
        self._kept = None
        self._clear()

    def reset_in_place(self) -> None:
        """Make the layer new, but put the next prompt where a captured step reads this one, if it has as many rows."""
        kept = self._kept if self.store is None else self.addresses()
        self.reset()
        self._kept = kept

    def addresses(self) -> Addresses | None:
        """What a captured step reads of the layer, None before the prompt."""
        if self.store is None:
            return None
        return Addresses.of(self.store, None if self.backend is None else self.backend.plan(self.store))

    def activate_past_recording(self) -> None:
        """Let tokens wait in the window until crop() is called; see `CompressedCache.activate_past_recording`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens. Raises ValueError where one has been compressed."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}")
        remove = -int(tokens_to_remove)  # some callers hand over a tensor
        if remove > self._columns:
            raise ValueError(f"cannot crop {amount(remove, 'token')}: the cache holds {self._columns}")
        if self.store is not None:
            self.store.crop(remove)
        elif self.keys is not None and self.values is not None:
            end = self._columns - remove
            self.keys, self.values = self.keys[:, :, :end], self.values[:, :, :end]
            self._real = None if self._real is None else self._real[:, :end]
        self._columns -= remove
        if self.record_past:
            self._settle()

    def advance(self, tokens: int) -> None:
        """Count `tokens` of a replayed CUDA graph, and move those due. Raises RuntimeError before the prompt."""
        store = self.store
        if store is None:
            raise RuntimeError("advance() follows a captured decoding step; the prompt must come first")
        self._columns += tokens
        store.seen += tokens
        store.quiet -= tokens
        if store.quiet <= 0:
            self._flush(store)
        if self.backend is not None:
            self.backend.prepare(store)

    @property
    def capturable(self) -> bool:
        """Whether a decoding step can be captured now: the kernel runs here, and every row is longer than the sink."""
        store = self.store if self.backend is not None and self.backend.captures else None
        return store is not None and bool((store.seen >= store.sizes.sink).all())

    # The batch as a whole: rows reordered, repeated or dropped.

    @property
    def awaits(self) -> int:
        """Columns of an announced prompt that have not come yet, 0 without an announcement."""
        return max(0, self._expected - self._columns) if self.store is None else 0

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

    @property
    def taken(self) -> np.ndarray | None:
        """Tokens of each row among the columns that came, [B] on the host; None before the prompt is compressed."""
        return None if self.store is None else self.store.seen

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


def pieces(store: Store, new: int) -> Iterator[slice]:
    """Pieces of `new` columns to append and attend at once, so that each token finds what it would if all came singly.

    A piece ends where the window of a row is full, so that its oldest tokens move before the next one comes. Where
    what a layer evicts depends on single steps, every token is a piece. The caller appends a piece, attends and flushes
    before it takes the next one.
    """
    single, first = store.eviction is not None and store.eviction.every_step, 0
    while first < new:
        free = store.sizes.window + store.sizes.flush - int((store.seen - store.start).max())
        last = first + (1 if single else max(1, free))
        yield slice(first, min(new, last))
        first = last
