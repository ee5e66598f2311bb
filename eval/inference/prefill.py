"""A prompt's dense pass, run once for all methods: every layer's K and V, the next token's logits, the last queries."""

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from leank.data_gen.amount import amount
from leank.eval.cache.attention import dense
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.cache.hook import ATTENTION
from leank.eval.inference.observe import attend_and_sum
from leank.versions import CACHE


class PromptLayer(DynamicLayer):
    """All K and V of one layer, in a buffer of `capacity` columns; the layer computes its own exact attention.

    obs_queries: how many of the last queries to keep, as `queries` [B, Hq, n, D]
    column_sums: whether to add up the attention that each key receives from all queries of the prompt and the heads of
      its group, as `column_sums` [B, H, T], float32 or wider. A tensor has the weights of the last n queries, which
      alone count then; such a prompt comes in one piece.

    If `kept` is set, the column axis of keys, values and queries covers only these prompt columns: [B, T'], ascending,
    with -1 for padding on the left. get_seq_length() counts the dropped columns too.
    """

    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int, obs_queries: int = 0, column_sums: bool | Tensor = False) -> None:
        super().__init__()
        self.capacity, self.obs_queries = capacity, obs_queries
        self._sums = column_sums is not False
        self._weights = column_sums if isinstance(column_sums, Tensor) else None
        self.queries: Tensor | None = None
        self.column_sums: Tensor | None = None
        self.repeated: Tensor | None = None  # [B, H, T], a token's score by a pass that repeats the prompt
        self.scaling: float | None = None  # of q k^T, None = 1 / sqrt(D); known once a query has attended
        self.softmax = PLAIN  # the model's; known once a query has attended
        self.kept: Tensor | None = None
        self._dropped, self._padded = 0, False
        self._buffer: tuple[Tensor, Tensor] | None = None
        self._columns = 0

    def hold(self, kept: Tensor, columns: int) -> None:
        """Announce, before they come, that this layer gets only kept [B, T'] of a prompt's `columns` columns."""
        self.kept, self._dropped, self._padded = kept, columns - kept.shape[1], bool((kept < 0).any())
        self.capacity -= self._dropped

    def real(self, mask: Tensor | None) -> Tensor | None:
        """Which held columns are real, bool [B, held], None if all; mask: of all columns, the dropped ones included."""
        if self.kept is None:
            return None if mask is None else mask[:, : self._columns].bool()
        if mask is None and not self._padded:
            return None
        end, new = self.get_seq_length(), self._columns - self.kept.shape[1]
        there = self.kept >= 0
        after = there.new_ones(len(there), new) if mask is None else mask[:, end - new : end].bool()
        return torch.cat([there, after], 1)

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Any, Tensor]:
        """Append k, v [B, H, n, D]; returns (the layer, v). Raises ValueError if they exceed the capacity."""
        if self._buffer is None:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            shape = (*key_states.shape[:2], self.capacity, key_states.shape[3])
            self._buffer = (key_states.new_empty(shape), value_states.new_empty(shape))
        end = self._columns + key_states.shape[2]
        if end > self.capacity:
            raise ValueError(f"the prompt's buffer has room for {amount(self.capacity, 'token')}, {end} came")
        for room, new in zip(self._buffer, (key_states, value_states), strict=True):
            room[:, :, self._columns : end] = new
        self.keys, self.values = (room[:, :, :end] for room in self._buffer)
        self._columns = end
        return self, value_states

    def attend(
        self,
        q: Tensor,
        padding_mask: Tensor | None = None,
        scaling: float | None = None,
        softmax: Softmax = PLAIN,
    ) -> Tensor:
        """Causal attention of the last queries q [B, Hq, Q, D] over all held columns. Returns [B, Q, Hq, D]."""
        if self.obs_queries:
            queries = q if self.queries is None else torch.cat([self.queries, q], 2)
            self.queries = queries[:, :, -self.obs_queries :].clone()
        real, self.scaling, self.softmax = self.real(padding_mask), scaling, softmax
        if self._sums:
            out, sums = attend_and_sum(q, self.keys, self.values, scaling, real, softmax, self._weights)
            if self.column_sums is not None:
                if self._weights is not None:
                    raise ValueError("weights of the last queries need the prompt in one piece; leave out `chunk`")
                sums[:, :, : self.column_sums.shape[2]] += self.column_sums
            self.column_sums = sums
            return out
        if q.shape[2] > 1 or not softmax.plain:
            return dense.attend(q, self.keys, self.values, scaling, real, softmax)
        return dense.latest(q, self.keys, self.values, scaling, real).transpose(1, 2)

    def take(self, k: Tensor, v: Tensor) -> None:
        """Hold these copies of K and V [B, H, held columns, D], on any device, with no room for more."""
        self._buffer = self.keys, self.values = k, v
        self.capacity = self._columns

    def get_seq_length(self) -> int:
        """Columns that have come so far, the dropped ones included."""
        return self._columns + self._dropped

    def fork(self) -> Self:
        """A layer that continues this one in the same buffer. Forks overwrite each other's new tokens: use one."""
        layer = copy.copy(self)
        layer.obs_queries, layer._sums = 0, False
        layer.queries = layer.column_sums = layer.repeated = None
        return layer


@dataclass
class Prefill:
    """What a pass over B left-padded prompts of T columns leaves for the methods."""

    layers: list[Any]  # a PromptLayer each, or transformers' own layer where the model has sliding-window attention
    real: Tensor | None  # bool [B, T] or None: False marks padding; None is no padding
    logits: Tensor  # [B, vocabulary]: logits of the next token
    columns: int  # T
    # for each layer the tokens that the current method keeps, sink and window included: bool [B, H, columns of the
    # layer], None if all stay
    selected: list[Tensor | None] | None = None
    # for each row the layer above which a pass dropped tokens, where the pass looks for that layer itself; -1 if it
    # found none
    selected_at: list[int] | None = None
    # for each row the real tokens of its prompt, where a pass may have left some out in every layer
    given: list[int] | None = None

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each prompt [B]."""
        if self.real is None:
            return torch.full((len(self.logits),), self.columns, device=self.logits.device)
        return self.real.sum(-1)

    def fork(self) -> Cache:
        """A dense cache that continues the prompts; only one may be in use at a time."""
        return Cache(
            layers=[layer.fork() if isinstance(layer, PromptLayer) else copy.copy(layer) for layer in self.layers]
        )

    def bytes(self) -> list[int]:
        """Bytes of each prompt's K and V, without padding (also where others were dropped) and room for new tokens."""
        found = torch.zeros(len(self.logits), dtype=torch.long)
        for layer in self.layers:
            columns = (layer.keys.nbytes + layer.values.nbytes) // layer.keys[:, 0, :, 0].numel()  # bytes of one
            if isinstance(layer, PromptLayer):
                real = layer.real(self.real)
                held = torch.tensor(layer.keys.shape[2]) if real is None else real.sum(-1).cpu()
            else:  # its window, of which padding is no part either
                held = self.lengths.cpu().clamp(max=layer.keys.shape[2])
            found += columns * held
        return found.tolist()


@torch.no_grad()
def check_layers(config: PreTrainedConfig) -> None:
    """Raise ValueError for a decoder with layers that hold no K and V, such as those of linear attention."""
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"layer {index} of {config.model_type} uses {type(layer).__name__}: no K and V to replay")


def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    real: Tensor | None,
    room: int,
    obs_queries: int = 0,
    chunk: int | None = None,
    column_sums: bool | Tensor = False,
) -> Prefill:
    """Full attention over left-padded prompts [B, T], with `room` columns left for what follows.

    The model is switched to the attention implementation "leank", which is SDPA for every other cache.
    real: bool [B, T], False = padding, None = no padding
    obs_queries, column_sums: see PromptLayer; chunk: columns computed at a time, None = all at once
    Raises ValueError for a model with layers that hold no K and V.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != ATTENTION:
        model.set_attn_implementation(ATTENTION)
    columns = ids.shape[1]
    check_layers(config)
    layers: list[Any] = [
        PromptLayer(columns + room, obs_queries, column_sums) if type(layer) is DynamicLayer else layer
        for layer in DynamicCache(config=config).layers
    ]
    cache = Cache(layers=layers)
    logits = extend(model, cache, ids, real, chunk)
    for layer in layers:
        if not isinstance(layer, PromptLayer):  # a view of the whole prompt, of which nothing else is needed
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return Prefill(layers, real, logits, columns)


@torch.no_grad()
def extend(model: PreTrainedModel, cache: Cache, ids: Tensor, real: Tensor | None, chunk: int | None = None) -> Tensor:
    """Feed ids [B, n] to a cache; returns the last logits [B, vocabulary].

    real: bool [B, all columns so far and these], None = no padding; chunk: columns computed at a time, None = all
    """
    before, new = cache.get_seq_length(), ids.shape[1]
    positions = positions_of(ids, real, before)
    out = None
    for start in range(0, new, chunk or new):
        stop = min(new, start + (chunk or new))
        out = model(
            input_ids=ids[:, start:stop],
            attention_mask=None if real is None else real[:, : before + stop],
            position_ids=positions[:, start:stop],
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: cache},
        ).logits[:, -1]
    assert out is not None
    return out


def positions_of(ids: Tensor, real: Tensor | None, before: int) -> Tensor:
    """Positions [B, n] of new tokens ids [B, n]; `real`: see `extend`. before: columns that came earlier."""
    new = ids.shape[1]
    if real is None:
        return torch.arange(before, before + new, device=ids.device).expand_as(ids)
    return (real.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]


def pad_left(prompts: list[list[int]], pad: int, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    """Prompts as one tensor [B, T], padded on the left, and which columns are real (None if all are)."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    if int(lengths.min()) == width:
        return ids, None
    return ids, torch.arange(width, device=device) >= width - lengths[:, None]


def joined(first: Tensor | None, then: Tensor | None, columns: int, then_ids: Tensor) -> Tensor | None:
    """Join which columns are real tokens of two neighbouring pieces; None stands for all. columns: of the first."""
    if first is None and then is None:
        return None
    ones = torch.ones_like(then_ids[:, :1], dtype=torch.bool)
    pieces = ((first, columns), (then, then_ids.shape[1]))
    return torch.cat([ones.expand(-1, width) if real is None else real for real, width in pieces], 1)
