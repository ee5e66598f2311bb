"""What a compressed layer holds: sink | middle | window, per row and in real tokens (LeanK, section 3.3).

A row's real tokens are numbered 0, 1, ... whatever its padding. The first `sink` tokens stay in the sink. The last ones
are in the window, a ring in which token i has slot i mod slots. The tokens between are in the middle. The window holds
`window` tokens after the prompt and up to `window + flush` while decoding, more while several tokens come at once; when
it holds that many, its oldest `flush` tokens move to the middle. `Sizes.grid` says where the middle may end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from leank.data_gen.amount import amount
from leank.eval.cache.storage.channels import KeptChannels
from leank.eval.cache.storage.eviction import ENDLESS, Eviction, moved_up
from leank.eval.cache.storage.middle import Middle, ReadState
from leank.eval.cache.storage.segment import PAGE, Extent, Segment, grown_room, round_up, whole_numbers
from leank.eval.cache.storage.sizes import Sizes, equal_rows, middle_columns, real_positions
from leank.eval.cache.storage.upload import capturing, update, upload

Write = Callable[["Store", Tensor, Tensor], Tensor]
Move = Callable[["Store", np.ndarray], None]
Evict = Callable[["Store"], None]
RINGS = ("ring_k", "ring_v", "seen_dev", "start_dev")  # tensors of the window, which a captured step writes
COUNTS = ("seen", "start", "floor")  # of each row, on the host
ENDS = ("sink_k", "sink_v", "ring_k", "ring_v")
SEGMENTS = ("prompt", "tail")


class BackendPlan(Protocol):
    """What a backend derives from a store, and keeps itself until the store's addresses or capacities change."""

    @property
    def table(self) -> Tensor:
        """What the plan holds on the device."""


class Store:
    """The three parts of one layer for a batch of B rows.

    seen, start: [B] on the host, real tokens, and the first of them in the window
    floor: [B] on the host, the length below which `crop` cannot go
    seen_dev, start_dev: [B] int64, seen and start on the device
    sink_k, sink_v, ring_k, ring_v: [B, H, sink or slots, D]; the ring holds the window
    prompt, tail: the two segments of the middle. The prompt's tokens are in `prompt`, without spare room; decoded ones
        are in `tail`, which grows. If the layer evicts and every head joins, `prompt` is empty and `tail` holds both,
        because kernels read only the tail's length on the device
    channels, values: kept channels of the middle's K and V; values None = all
    center: float32 [H, 1, D], `Middle.center`, what every key loses as it is written; None = nothing
    quiet: lower bound on the tokens that can arrive before the next flush moves any
    version: grows when addresses or capacities change, so that a backend's plan can follow
    """

    eviction: Eviction | None
    reads: ReadState | None

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        real: Tensor | None,
        middle: Middle,
        sizes: Sizes,
        tokens: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> None:
        """Compress a prompt k, v [B, H, T, D].

        real: [B, T] bool, False = padding, None = no padding
        tokens: [B, H, T] bool, the tokens of the middle that stay, None = all; sink and window always stay
        scores: [B, H, T], the attention that each token has received, where the middle evicts; None = zeros
        """
        self._begin(middle, sizes, k.device)
        k = self.centered(k)
        self.channels = KeptChannels.of(middle.channels, k, middle.labels)
        self.values = None if middle.values is None else KeptChannels.of(middle.values, v)
        self._count(k, real)
        position = real_positions(torch.zeros_like(self.seen_dev), k.shape[2], real)
        self._fill_ends(k, v, None if real is None else position)
        in_middle = middle_columns(position, sizes)
        chosen = None if tokens is None else in_middle[:, None] & tokens.to(k.device)  # [B, H, T]
        self._fill_middle(k, v, None if real is None else in_middle, chosen)
        if middle.eviction is not None:
            self.eviction = self._begin_eviction(middle.eviction, position, in_middle, chosen, scores)
            self.eviction.seen, self.eviction.center = self.seen, self.center
            self._prune(0)
        self.reads = None if middle.reads is None else middle.reads.start(self)

    def _begin(self, middle: Middle, sizes: Sizes, device: torch.device) -> None:
        """Set what holds before there are tokens."""
        self.sizes, self.middle, self.center = sizes, middle, middle.center_on(device)
        self.quiet, self.version = 0, 0
        self.eviction, self.reads = None, None

    def _count(self, k: Tensor, real: Tensor | None) -> None:
        """Count the prompt's real tokens, and those before the window."""
        self.seen = np.full(len(k), k.shape[2]) if real is None else real.sum(-1).cpu().numpy()
        self.start = self.sizes.window_start(self.seen)
        whole = self.start <= self.sizes.sink  # rows of which nothing goes to the middle
        self.floor = np.where(whole, 0 if real is None else before_holes(np.zeros_like(self.seen), real), self.seen)
        self.seen_dev, self.start_dev = (upload(a, k.device) for a in (self.seen, self.start))

    def _fill_ends(self, k: Tensor, v: Tensor, position: Tensor | None) -> None:
        """Make sink and window and fill them; position [B, T] of a padded prompt, None = no padding."""
        batch, heads, _, dim = k.shape
        slots = self._slots(int(self.ends()[1].max()))
        self.sink_k, self.sink_v = (k.new_zeros(batch, heads, self.sizes.sink, dim) for _ in range(2))
        self.ring_k, self.ring_v = (k.new_zeros(batch, heads, slots, dim) for _ in range(2))
        if position is not None:
            self._write(k, v, position)
            return
        write_prompt(self.sink_k, self.ring_k, k, int(self.start[0]))
        write_prompt(self.sink_v, self.ring_v, v, int(self.start[0]))

    def _fill_middle(self, k: Tensor, v: Tensor, in_middle: Tensor | None, chosen: Tensor | None) -> None:
        """Make both parts of the middle and fill one: in_middle [B, T], chosen [B, H, T] bool, None = all."""
        of_rows = (self.start - self.sizes.sink)[:, None].repeat(k.shape[1], 1)
        moved = of_rows if chosen is None else chosen.sum(-1).cpu().numpy()
        parts = [
            self.middle.segment(Extent(self.channels, capacity, k.shape[-1], k.dtype, self.values))
            for capacity in (moved, np.zeros_like(moved))
        ]
        filled, empty = parts
        in_tail = self.middle.eviction is not None and self.middle.joins is None  # room in the tail is what joins
        self.prompt, self.tail = (empty, filled) if in_tail else parts
        if not moved.any():
            return
        if chosen is not None:
            columns = torch.argsort((~chosen).to(torch.uint8), dim=-1, stable=True)[..., : int(moved.max()), None]
            columns = columns.expand(-1, -1, -1, k.shape[-1])
            filled.append(np.arange(len(k)), k.gather(2, columns), v.gather(2, columns), moved)
        elif in_middle is None:
            middle = slice(self.sizes.sink, int(self.start[0]))
            filled.append(np.arange(len(k)), k[:, :, middle], v[:, :, middle])
        else:
            for rows, at in equal_rows(in_middle):
                filled.append(np.arange(rows.start, rows.stop), k[rows][:, :, at], v[rows][:, :, at])

    def _begin_eviction(
        self, policy: Eviction, position: Tensor, in_middle: Tensor, chosen: Tensor | None, scores: Tensor | None
    ) -> Eviction:
        """The policy's state for the tokens held; position [B, T] is the real index of each column, -1 for padding."""
        has_middle = upload(self.channels.count > 0, position.device)[..., None]
        held = has_middle & (in_middle[:, None] if chosen is None else chosen)
        held = held | ((position >= 0) & ~in_middle)[:, None]
        count = held.sum(-1).cpu().numpy()
        scores = torch.zeros(held.shape, device=held.device) if scores is None else scores.to(held.device)
        return policy.begin(moved_up(scores, held, count), count)

    def centered(self, k: Tensor) -> Tensor:
        """Keys [B, H, n, D] without `center`, subtracted in float32 or wider."""
        return k if self.center is None else (k - self.center).to(k.dtype)

    def _write(self, k: Tensor, v: Tensor, position: Tensor) -> None:
        """Put columns of real index [start, ...) into the ring and [0, sink) into the sink."""
        write_columns(self.sink_k, self.ring_k, k, position, self.start_dev)
        write_columns(self.sink_v, self.ring_v, v, position, self.start_dev)

    def append(self, k: Tensor, v: Tensor, real: Tensor | None = None, write: Write | None = None) -> Tensor:
        """Take in new tokens k, v [B, H, n, D]; real: [B, n] bool, False = padding, None = no padding.

        write: puts tokens that all belong into the ring, and counts them on the device; None = `Store.write`
        Returns their real indices [B, n], -1 for padding.
        """
        new, self.quiet = k.shape[2], 0
        self.fit(new)
        if real is None and (self.seen >= self.sizes.sink).all():  # every decoding step; no wait for the device
            position = (write or Store.write)(self, k, v)
            self.seen += 0 if capturing(k) else new
            return position
        position = real_positions(self.seen_dev, new, real)
        self._write(self.centered(k), v, position)
        if real is not None:
            self.floor = np.maximum(self.floor, before_holes(self.seen, real))
        self.seen += new if real is None else real.sum(-1).cpu().numpy()
        update(self.seen_dev, self.seen)
        return position

    def write(self, k: Tensor, v: Tensor) -> Tensor:
        """Put new tokens k, v [B, H, n, D] into the ring, and count them on the device; returns [B, n]."""
        position = real_positions(self.seen_dev, k.shape[2], None)
        row, slot = torch.arange(len(k), device=k.device)[:, None], position % self.ring_k.shape[2]
        self.ring_k[row, :, slot] = self.centered(k).transpose(1, 2)
        self.ring_v[row, :, slot] = v.transpose(1, 2)
        self.seen_dev += k.shape[2]
        return position

    def flush(self, move: Move | None = None, evict: Evict | None = None) -> None:
        """Move what is due from the window to the middle: `flush` tokens each time it holds `window + flush`.

        move: puts `due` [B] tokens of each row into a tail that has room, None = `Store.move`
        evict: drops tokens of the middle that the policy gives up, None = `Store.evict`
        """
        size = self.sizes
        due = np.maximum(0, self.seen - self.start - size.window) // size.flush * size.flush
        if due.any():
            self._grow(due)
            (move or Store.move)(self, due)
            if self.eviction is not None:
                first = self.ends()[0][:, None] + self.prompt.length + self.tail.length
                self.eviction.forget_moved(due[:, None] * ~self.middle.joining(self.channels), first)
            self.start = self.start + due
            self.floor = np.where(due > 0, self.seen, self.floor)
            if self.reads is not None:
                self.reads.moved(self)
        if self.eviction is not None:
            self.eviction.seen = self.seen
            (evict or Store.evict)(self)
        self.fit(0)
        self.quiet = size.window + size.flush - int((self.seen - self.start).max())
        if self.eviction is not None:
            self.quiet = min(self.quiet, self.eviction.quiet(self.held()))

    def move(self, due: np.ndarray) -> None:
        """Put the oldest `due` [B] tokens of each row's window into the tail, and count them there and in start_dev."""
        for count in np.unique(due[due > 0]).tolist():
            rows = np.nonzero(due == count)[0]
            rows_dev = upload(rows, self.seen_dev.device)
            index = self.start_dev[rows_dev, None] + torch.arange(count, device=self.seen_dev.device)
            slot = index % self.ring_k.shape[2]
            k, v = (x[rows_dev[:, None], :, slot].transpose(1, 2) for x in (self.ring_k, self.ring_v))
            self.tail.append(rows, k, v)
        update(self.start_dev, self.start + due)

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that each row holds in the sink [B], and in the window [B]."""
        return np.minimum(self.seen, self.sizes.sink), np.maximum(0, self.seen - self.start)

    def held(self) -> np.ndarray:
        """Tokens that each row and head holds [B, H]: sink, middle and window."""
        return np.add(*self.ends())[:, None] + self.prompt.length + self.tail.length

    def _grow(self, due: np.ndarray) -> None:
        """Give the tail room for `due` [B] more tokens and for some later ones, unless it has that room."""
        tail = self.tail
        need = tail.length + due[:, None] * self.middle.joining(self.channels)
        if (need > tail.capacity).any():
            most = ENDLESS if self.eviction is None else self.eviction.most + self.sizes.flush
            room = np.where(need > tail.capacity, np.minimum(grown_room(need), np.maximum(need, most)), tail.capacity)
            self.tail = tail.grown(room)
            self.version += 1

    def evict(self) -> None:
        """Drop the tokens of the middle that the policy gives up; the tail keeps its room for those to come."""
        self._prune(self.sizes.flush)

    def _prune(self, flush: int) -> None:
        pruned = None if self.eviction is None else self.eviction.prune(self.prompt, self.tail, *self.ends(), flush)
        if pruned is not None:
            self.prompt, self.tail = pruned
            self.version += 1

    def _slots(self, held: int) -> int:
        return self.sizes.slots(held, bool((self.start > self.sizes.sink).any()))

    def fit(self, new: int) -> None:
        """Grow the ring for `new` more tokens in every row, or give it its usual size back."""
        held, old = int(self.ends()[1].max()) + new, self.ring_k.shape[2]
        # On a GPU a captured step may follow, and it cannot grow the ring: decoding begins with all of it.
        slots = max(self.sizes.ring, round_up(held, PAGE)) if self.ring_k.is_cuda else self._slots(held)
        if slots == old or (slots < old and new):
            return
        self.ring_k, self.ring_v = (resized(ring, self.start_dev, held, slots) for ring in (self.ring_k, self.ring_v))
        self.version += 1

    def crop(self, remove: int) -> None:
        """Forget the last `remove` tokens. Raises ValueError if one was compressed or counted in scores."""
        if (self.seen - remove < self.floor).any():
            can = int((self.seen - self.floor).min())
            raise ValueError(
                f"cannot crop {amount(remove, 'token')}: at most {can} came after the last move to the middle, and "
                "after the last padding behind a token. With cache.activate_past_recording() tokens wait until crop()"
            )
        if remove and self.eviction is not None:
            raise ValueError(
                f"cannot crop {amount(remove, 'token')}, which counted in the attention by which this layer evicts; "
                "use a method without eviction while decoding"
            )
        self.seen -= remove
        self.seen_dev -= remove

    def select(self, rows: Tensor) -> None:
        """Make the batch `rows` [R] of the present one, for beam search, repeated rows and dropped rows."""
        at, dev = rows.cpu().numpy(), rows.to(self.seen_dev.device)
        self.seen, self.start, self.floor = self.seen[at], self.start[at], self.floor[at]
        self.seen_dev, self.start_dev = self.seen_dev[dev], self.start_dev[dev]
        self.channels = self.channels.select(rows)
        self.values = None if self.values is None else self.values.select(rows)
        for name in ENDS:
            setattr(self, name, getattr(self, name)[dev])
        self.prompt, self.tail = (part.select(rows, self.channels, self.values) for part in (self.prompt, self.tail))
        if self.eviction is not None:
            self.eviction.select(rows)
        self.version += 1  # before `moved`, whose layout then belongs to the new version
        if self.reads is not None:
            self.reads.moved(self)

    def saved(self) -> dict[str, Tensor]:
        """What `restore` makes the store of, by name, beside its Middle; what evicts or chooses is not in it."""
        parts = {f"{p}.{n}": t for p in SEGMENTS for n, t in getattr(self, p).saved().items()}
        return {n: torch.from_numpy(getattr(self, n)) for n in COUNTS} | {n: getattr(self, n) for n in ENDS} | parts

    @classmethod
    def restore(
        cls, held: Mapping[str, Tensor], middle: Middle, sizes: Sizes, columns: int, device: torch.device
    ) -> Store:
        """The store that `saved` took apart; columns: of its prompt and of what followed, padding included.

        Raises KeyError for what is missing, and ValueError for tables that do not fit together: kernels read wherever
        they point.
        """
        store = cls.__new__(cls)
        store._begin(middle, sizes, device)
        for name in COUNTS:
            setattr(store, name, whole_numbers(held[name]))
        for name in ENDS:
            setattr(store, name, held[name].to(device))
        store.seen_dev, store.start_dev = (torch.from_numpy(n.copy()).to(device) for n in (store.seen, store.start))
        store.channels = KeptChannels.of(middle.channels, store.ring_k, middle.labels)
        store.values = None if middle.values is None else KeptChannels.of(middle.values, store.ring_k)
        for name in SEGMENTS:
            own = {n.removeprefix(f"{name}."): t for n, t in held.items() if n.startswith(f"{name}.")}
            setattr(store, name, store._restored(own))
        if not store._fits(columns):
            raise ValueError("its sink, middle and window do not fit together")
        return store

    def _restored(self, held: Mapping[str, Tensor]) -> Segment:
        length, capacity = (whole_numbers(held[name]) for name in ("length", "capacity"))
        if not length.shape == capacity.shape == self.channels.count.shape or (capacity < 0).any():
            raise ValueError("a table of tokens has another shape")
        extent = Extent(self.channels, capacity, self.ring_k.shape[-1], self.ring_k.dtype, self.values)
        segment = self.middle.segment(extent)
        segment.restore(length, held["k"], held["v"])
        return segment

    def _fits(self, columns: int) -> bool:
        """Whether counts and shapes are those of a store that has read so many columns."""
        (batch, heads, slots, dim), sizes, center = self.ring_k.shape, self.sizes, self.middle.center
        seen, start, floor = self.seen, self.start, self.floor
        return (
            self.ring_v.shape == self.ring_k.shape
            and self.sink_k.shape == self.sink_v.shape == (batch, heads, sizes.sink, dim)
            and len({getattr(self, name).dtype for name in ENDS}) == 1
            and seen.shape == start.shape == floor.shape == (batch,)
            and slots % PAGE == 0
            and (center is None or (center.shape, center.dtype) == ((heads, dim), torch.float32))
            and bool(((floor >= 0) & (floor <= seen) & (seen <= columns) & (seen - start <= slots)).all())
            and bool(((start >= sizes.sink) & (start <= np.maximum(sizes.sink, seen))).all())
            and bool(((start == sizes.sink) | (floor - start >= sizes.window)).all())
            and bool((self.prompt.length + self.tail.length <= (start - sizes.sink)[:, None]).all())
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor held, by name."""
        names = (*ENDS, "seen_dev", "start_dev")
        middle = {f"{p}.{n}": t for p in SEGMENTS for n, t in getattr(self, p).tensors().items()}
        more = {}
        if self.center is not None:
            more["center"] = self.center
        if self.values is not None:
            more |= {f"values.{n}": t for n, t in self.values.tensors().items()}
        for name, part in (("eviction", self.eviction), ("reads", self.reads)):
            more |= {} if part is None else {f"{name}.{n}": t for n, t in part.tensors().items()}
        return {**{n: getattr(self, n) for n in names}, "channels": self.channels.index, **middle, **more}


# The whole tokens: the sink, and the window, which is a ring. Keys and values are written alike: a function takes one.


def write_prompt(sink: Tensor, ring: Tensor, new: Tensor, start: int) -> None:
    """Put a prompt [B, H, T, D] without padding into the sink, and from `start` on into the ring."""
    length, slots = new.shape[2], ring.shape[2]
    ends = min(length, sink.shape[2])
    sink[:, :, :ends] = new[:, :, :ends]
    ring[:, :, torch.arange(start, max(start, length), device=ring.device) % slots] = new[:, :, start:]


def write_columns(sink: Tensor, ring: Tensor, new: Tensor, position: Tensor, start: Tensor) -> None:
    """Put each row's own tokens of new [B, H, n, D] into sink and ring; `write_prompt` does not wait for the device.

    position: [B, n], the real index of each column, -1 for padding; start: [B], first token of each row's window
    """
    for part, to, chosen in (
        (ring, position % ring.shape[2], position >= start[:, None]),
        (sink, position, (position >= 0) & (position < sink.shape[2])),
    ):
        row, column = chosen.nonzero(as_tuple=True)
        part[row, :, to[row, column]] = new[row, :, column]


def resized(ring: Tensor, start: Tensor, held: int, slots: int) -> Tensor:
    """The ring with other slots, each token at its new one; start: [B], held: the most tokens of a row's window."""
    old = ring.shape[2]
    index = start[:, None] + torch.arange(min(held, old), device=start.device)
    row = torch.arange(len(index), device=index.device)[:, None]
    moved = ring.new_zeros(*ring.shape[:2], slots, ring.shape[3])
    moved[row, :, index % slots] = ring[row, :, index % old]
    return moved


def before_holes(seen: np.ndarray, real: Tensor) -> np.ndarray:
    """How many real tokens each row [B] has before its last padding behind a token; `crop` must not meet that."""
    there = real.cpu().numpy()
    tokens = seen[:, None] + there.cumsum(-1)
    return np.where(there, 0, tokens).max(-1, initial=0)


# What a captured step reads


@dataclass(frozen=True)
class Addresses:
    """What a captured step reads of one layer."""

    # by name, the rings, the counts and tables on the device, the places of V's kept channels, and what keys lose
    tensors: dict[str, Tensor]
    compiled: tuple[bytes | None, ...]  # on the host, for which numbers of channels it was compiled
    plan: BackendPlan | None  # that whose table is read
    version: int  # of the store

    @classmethod
    def of(cls, store: Store, plan: BackendPlan | None = None) -> Addresses:
        """Those of a compressed layer; plan: what its backend keeps for it."""
        tensors = {name: getattr(store, name) for name in RINGS}
        tensors |= {"channels": store.channels.index, "tail_length": store.tail.length_dev}
        if store.values is not None:
            tensors["ranks"] = store.values.ranks()
        if store.center is not None:
            tensors["center"] = store.center
        counts = (store.channels.count, store.prompt.width, store.channels.first)
        return cls(tensors, tuple(None if n is None else n.tobytes() for n in counts), plan, store.version)

    def key(self) -> tuple[object, ...]:
        """Equal for two layers of which one captured step can read either."""
        tensors = [*self.tensors.values(), *(() if self.plan is None else (self.plan.table,))]
        return *((tensor.data_ptr(), *_form(tensor)) for tensor in tensors), *self.compiled

    def take(self, store: Store) -> bool:
        """Move what `store` holds to these addresses, whose own content is lost; False = not, for a shape differs."""
        store.fit(0)  # a prompt's ring may be shorter than the ring of decoding
        new = Addresses.of(store).tensors
        if {n: _form(t) for n, t in self.tensors.items()} != {n: _form(t) for n, t in new.items()}:
            return False
        for name, here in self.tensors.items():
            shared = here.stride(0) == 0  # the channel table of a mask that all rows share
            (here[:1] if shared else here).copy_(new[name][:1] if shared else new[name])
        for name in RINGS:
            setattr(store, name, self.tensors[name])
        store.channels.index, store.tail.length_dev = self.tensors["channels"], self.tensors["tail_length"]
        if store.values is not None:
            store.values.keep_ranks(self.tensors["ranks"])
        store.center = self.tensors.get("center")
        store.version = self.version + 1  # the plan is out of date, and the address of its table stays
        return True


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
