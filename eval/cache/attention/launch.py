"""Launches the decode kernel, over a middle in 16 bits or in KIVI's pages: work tables, scratch memory, tile sizes."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from leank.eval.cache.attention import codes, work
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.kernels import banded, decode, evict, packed, ring
from leank.eval.cache.attention.kernels.parts import Layer, Queries, Results
from leank.eval.cache.attention.softmax import LOG2_E, PLAIN, Softmax
from leank.eval.cache.storage.banded import PAGE_ROOM, Banded, effort, page_room
from leank.eval.cache.storage.codecs import PageSegment
from leank.eval.cache.storage.eviction import Choice, Eviction
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.store import GROWTH, Store
from leank.eval.cache.storage.upload import scratch, update, upload

MAX_ROWS = 32  # query tokens x heads of a group in one tile; more query tokens take several passes, called chunks
LONG_ROWS = 16  # the same in heads of more than 128 channels, of which 32 rows do not fit a thread's 255 registers
MOVED = 4096  # numbers of K, and of V, that a program of `move` holds in registers at a time
MAX_CHUNKS = 4  # chunks in one launch; the limit bounds the scratch memory
AHEAD = 4 * PAGE_ROOM  # bytes of pages that a program may ask for before it needs them, where that is a choice
SHARED = 208_000  # bytes that a program has for them at most
EFFORT = 8.5  # bytes of sink and window that a program reads in the time of an instruction of each warp
BLOCK = 256  # tokens whose weights a program adds, or whose scores it moves, at a time
SLICE = 64  # channels of a token that a program moves
PROGRAMS = 1056  # that add weights, at most: eight per multiprocessor of a large GPU
ROOMY = 2  # a tail with room for more than so many times the tokens that stay makes way for a smaller one
FEW = 32  # pages of the middle for each program, below which a codec's kernel may take another `Config`


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a GPU has programmatic dependent launch: a kernel's blocks may start before the previous kernel ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def moved(dim: int) -> int:
    """Tokens that a program of `move` holds in registers at a time."""
    return min(32, MOVED // triton.next_power_of_2(dim))


@dataclass(frozen=True)
class Config:
    """How the decode kernel is launched."""

    tile: int = 64  # tokens that a program reads at a time, 64 or 128
    warps: int = 4  # warps, stages: of a program
    stages: int = 3
    registers: int = 0  # limit per thread, 0 = none
    per_sm: int = 2  # programs per multiprocessor
    # lines of partial results that a merge asks for at a time, if that many rows at once keep all threads busy; a line
    # is one query row's
    merge: int = 64
    slow: float = 0.85  # how much longer a byte of the middle takes than one of sink and window, whose tiles have masks
    # per_tile, piece: what it costs to read a tile, beside its bytes, and to start a piece; see work.cut
    per_tile: int = work.TILE_BYTES
    piece: int = work.PIECE_BYTES
    pdl: bool = True  # whether to use programmatic dependent launch, where the GPU has it


WIDE = Config(warps=8)  # for tiles of more than 16 rows
# For heads of more than 128 channels: a program has as many warps, and asks for as many bytes ahead, as two of 128.
LONG = Config(warps=8, per_sm=1)
# With a page more on its way, 8 warps' pages of 128 channels take 147 KB, and two programs do not fit a multiprocessor.
WIDE_PACKED = replace(WIDE, stages=2, pdl=False)
# By bits: the costs of a packed middle follow its bytes, and it gained nothing from programmatic dependent launch.
_BYTES = Config(slow=1.0, per_tile=0, piece=16384, pdl=False)
PACKED = {8: _BYTES, 4: replace(_BYTES, slow=1.6), 2: replace(_BYTES, slow=1.6)}
# Where every program has few pages, another one on its way gains nothing, and a piece's start counts.
PACKED_FEW = {b: replace(_BYTES, stages=2, slow=slow, piece=65536) for b, slow in ((8, 1.3), (4, 1.6), (2, 2.5))}


@dataclass(frozen=True)
class CodecKernels:
    """The kernels of a codec, which `Codec.kernels` names; `packed_kernels` makes those of KIVI's pages."""

    # the Triton function that reads a part's codes within the decode kernel, with the parameters of
    # `kernels.packed.read`
    read: Any
    codes: tuple[Any, ...]  # what `read` is compiled for, a tuple with names
    share: float  # bytes of a number of the middle, over those of a number of the cache
    # the launch for tiles of so many rows; the other argument says whether every program has few pages
    config: Callable[[int, bool], Config]
    # launches what `Store.move` does; its tensor, int32 [>= B], is zero before and after
    move: Callable[[Store, Tensor], None]
    rooms: tuple[int, int] | None = None
    """Where `codes` can run: the memory that a warp of its kernel has for K and V, in bytes."""
    heads: np.ndarray | None = None
    """[H, 4], where heads differ: numbers of 16 bits that a token's K and V take, and what the work table then has as
    its channels of K and of V; None = what it has is both."""


def kernels_of(store: Store) -> CodecKernels | None:
    """The kernels of the store's codec, made by the "module:function" that it names; None = 16 bits."""
    codec = store.middle.bits
    if codec is None or codec.kernels is None:
        return None
    module, function = codec.kernels.split(":")
    return getattr(importlib.import_module(module), function)(store)


def packed_kernels(store: Store) -> CodecKernels:
    """The kernels of a store whose middle is packed."""
    packing, base = store.middle.bits, store.ring_k
    assert isinstance(packing, Packing)

    def config(tile_rows: int, few: bool) -> Config:
        if tile_rows > 16:
            return WIDE_PACKED
        return (PACKED_FEW if few else PACKED)[packing.bits]

    return CodecKernels(
        read=packed.read,
        codes=packed.Codes(packing.bits, packing.group, base.is_cuda),
        share=packing.cell(base.dtype) / (packing.group * base.itemsize),
        config=config,
        move=_move_packed,
    )


def _move_packed(store: Store, done: Tensor) -> None:
    packing, tail, index = store.middle.bits, store.tail, store.channels.index
    assert isinstance(packing, Packing)
    batch, heads, slots, dim = store.ring_k.shape
    packed.move[(batch, heads)](
        *(store.ring_k, store.ring_v, tail.k, tail.v, index, tail.places()),
        *(store.seen_dev, store.start_dev, tail.length_dev, done),
        *(index.stride(0), slots, store.sizes.window, store.sizes.flush),
        H=heads,
        D=dim,
        PAGE=PAGE,
        BITS=packing.bits,
        CELL=packing.group,
    )


def banded_kernels(store: Store) -> CodecKernels:
    """The kernels of a store whose heads have bands of several widths."""
    codec, base, tail = store.middle.bits, store.ring_k, store.tail
    assert isinstance(codec, Banded)
    assert isinstance(tail, PageSegment)
    n, dim = codec.counts, base.shape[-1]
    pages = tuple(page_room(form, dim, base.itemsize) for form in codec.forms)
    rooms = codes.rooms(*tail.page_bytes()) if codes.can_read(base.device, base.dtype, dim) else None
    per_sm = codes.per_sm(rooms, dim, base.device) if rooms else 0
    rooms = rooms if per_sm else None
    # Programs share what takes time: bytes, or instructions where these take longer.
    if rooms:
        instructions = codes.effort(n, codec.value_bits, dim) * codes.BYTES_OF_EFFORT
    else:
        of_forms = [effort(form, dim) * EFFORT for form in codec.forms] or [0]
        instructions = np.take(of_forms, codec.form_of_heads)
    k, v = (page[0] for page in tail.page_bytes())
    k = np.where(n.any(-1), np.maximum(k, instructions - v), 0)
    of_v = codec.form_of_heads << 20 | np.array(codec.value_bits) << 26
    signs = n[:, 0] | n[:, 1] << 10 | n[:, 2] << 20, n[:, 3] | n[:, 4] << 10 | of_v

    def config(tile_rows: int, few: bool) -> Config:
        # `banded.stages_of` says how many pages each form asks for ahead, so that all launches have one compiled kernel
        found = replace((PACKED_FEW if few else PACKED)[4], stages=3, slow=1.0)
        if rooms:
            found = replace(found, per_sm=per_sm, per_tile=1024)
        if tile_rows > 16:  # of which ptxas of CUDA 12.8 gives a thread 32 registers if it is not told
            found = replace(WIDE_PACKED, registers=255)
        return found if found.warps * max(pages, default=0) < SHARED else replace(found, warps=4)

    return CodecKernels(
        read=banded.read,
        codes=banded.Codes(codec.forms, pages, AHEAD, base.is_cuda),
        share=1.0,
        config=config,
        move=_move_banded,
        rooms=rooms,
        heads=np.stack([*(np.ceil(x / (PAGE * base.itemsize)) for x in (k, v)), *signs], -1).astype(np.int64),
    )


def _say(table: np.ndarray, of: type[work.Part] | type[work.Column], of_heads: np.ndarray) -> None:
    """Put two numbers of every head [H, 2] in place of its channels of K and V, in the middle's lines of a table."""
    lines = np.flatnonzero(table[:, of.KIND] >= work.PROMPT)
    table[lines[:, None], [of.CHANNELS, of.WIDTH]] = of_heads[table[lines, of.HEAD]]


def _move_banded(store: Store, done: Tensor) -> None:
    """Pack the tokens that are due, in one launch."""
    codec, tail, index = store.middle.bits, store.tail, store.channels.index
    assert isinstance(codec, Banded)
    batch, heads, slots, dim = store.ring_k.shape
    bands = np.concatenate([codec.counts, np.array(codec.value_bits)[:, None]], 1).astype(np.int32)
    banded.move[(batch, heads)](
        *(store.ring_k, store.ring_v, tail.k, tail.v, index, tail.places(), upload(bands, index.device)),
        *(store.seen_dev, store.start_dev, tail.length_dev, done),
        *(index.stride(0), slots, store.sizes.window, store.sizes.flush),
        H=heads,
        D=dim,
        PAGE=PAGE,
    )


class Uncopied:
    """Is not copied with a store: it holds addresses, and a copied store, which lies elsewhere, makes its own."""

    def __deepcopy__(self, memo: object) -> None:
        """Nothing."""


@dataclass
class LaunchPlan(Uncopied):
    """The work table of one store, kept until addresses or capacities change."""

    table: Tensor  # [lines, FIELDS] int64, on the device, with room for the most lines there can be
    version: int
    programs: int
    even: bool  # every channel count is a multiple of 32: no masks in the main loop
    values: int  # the most channels that V keeps, rounded up to a power of two; 0 = all
    codec: CodecKernels | None  # None = the middle is in 16 bits
    few: bool = False  # every program reads few pages of the middle; see FEW
    room: Tensor | None = None  # where the scores of a layer that evicts lie; see kernels.evict


class Weights:
    """The attention weights of layers that evict. The layers of a cache share its scratch memory.

    A captured step reads the addresses of both on the device, so that larger ones can replace them between steps.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0)
        self._at = torch.zeros(1, dtype=torch.int64)  # the address of the scratch memory
        self._rows = 0  # query rows of a KV head in one launch, the most so far

    def fit(self, store: Store, room: Tensor | None) -> Tensor | None:
        """Give the scores and the scratch memory a column for every token that the layer has room for.

        room: of an earlier call for this layer, which is changed in place; None = there was none
        Returns int64 [2] on the device, the scores' address and columns; None if the layer does not evict.
        """
        policy = store.eviction
        if policy is None:
            return None
        columns = store.sizes.sink + int(store.tail.capacity.max()) + store.ring_k.shape[2]
        policy.reserve(columns)
        self._hold(store, columns)
        room = scratch(torch.zeros(2, dtype=torch.int64) if room is None else room, 2, policy.scores.device)
        update(room, np.array([policy.scores.data_ptr(), columns]))
        return room

    def scratch(self, store: Store, policy: Eviction, rows: int) -> Tensor:
        """Where the scratch memory lies, int64 [1], once it has room for `rows` query rows of every KV head."""
        self._rows = max(self._rows, rows)
        self._hold(store, policy.scores.shape[-1])
        return self._at

    def _hold(self, store: Store, columns: int) -> None:
        need, device = store.tail.length.size * self._rows * (columns + 1), store.ring_k.device
        before, self._scratch = self._scratch, scratch(self._scratch, need, device)
        if self._scratch is not before:
            self._at = scratch(self._at, 1, device)
            update(self._at, np.array([self._scratch.data_ptr()]))

    def add(self, store: Store, policy: Eviction, room: Tensor, position: Tensor, group: int, rows: int) -> None:
        """Add the weights of the step whose logits are in the scratch memory; the reference is `Eviction.add`.

        room: from `fit`; position: [B, Q], the real index of each query, -1 for padding
        group: query heads per KV head; rows: query rows of a KV head in the launch
        """
        places, columns = store.tail.length.size, policy.scores.shape[-1]
        evict.add_weights[(places, max(1, min(PROGRAMS // places, -(-columns // BLOCK))))](
            *(self._at, room, position, store.seen_dev, store.start_dev, store.tail.length_dev),
            *(policy.decay, position.shape[1], store.sizes.sink, places),
            H=store.tail.length.shape[1],
            GROUP=group,
            ROWS=rows,
            BLOCK=BLOCK,
        )

    def compact(self, store: Store, policy: Eviction, choice: Choice, room: Tensor) -> None:
        """Drop tokens that do not stay from the tail, and their scores, in two launches; see `Eviction.prune`."""
        tail, (stay, left) = store.tail, choice
        most, dim = stay.shape[-1], tail.head_dim
        roomy = (tail.capacity > ROOMY * (left + GROWTH)).any()
        new = tail.fresh(tail.channels, np.where(left > 0, left + GROWTH, 0), tail.values) if roomy else tail
        source = torch.empty(stay.shape, dtype=torch.int32, device=stay.device)
        evict.drop[(left.size,)](
            *(stay.contiguous().view(torch.uint8), source, room, store.seen_dev, store.start_dev, tail.length_dev),
            *(most, store.sizes.sink),
            H=left.shape[1],
            TILE=BLOCK,
        )
        evict.compact[(left.size, 2 * dim // SLICE)](
            *(tail.k, tail.v, new.k, new.v, tail.places(), new.places(), source, tail.length_dev, most, int(roomy)),
            D=dim,
            SLICE=SLICE,
            PAGE=PAGE,
        )
        new.length, new.length_dev = left, tail.length_dev
        store.tail = new
        store.version += bool(roomy)
        policy.held = store.held()

    def tensors(self) -> dict[str, Tensor]:
        """Scratch memory held, by name; without layers that evict there is none."""
        return {"logits": self._scratch} if self._scratch.numel() else {}


class Kernel(Plain):
    """The backend in Triton. The layers of a cache share its scratch memory, because they run one after the other."""

    captures = True

    def __init__(self, config: Config | None = None, programs: int = 0) -> None:
        """Choose the launch, None = by what a store holds; programs: 0 = `config.per_sm` per multiprocessor."""
        self.config, self.programs = config, programs
        self._partials, self._done = torch.empty(0), torch.empty(0, dtype=torch.int32)
        self.weights = Weights()

    def write(self, store: Store, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, new, dim = k.shape
        if new > MAX_ROWS:
            return store.write(k, v)
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        position = torch.empty(batch, new, dtype=torch.int64, device=k.device)
        ring.write[(batch,)](
            *(k, v, store.ring_k, store.ring_v, store.seen_dev, position, *k.stride()[:3], *v.stride()[:3]),
            *(new, store.ring_k.shape[2], k if store.center is None else store.center),
            H=heads,
            PADDED=triton.next_power_of_2(heads),
            D=dim,
            CENTER=store.center is not None,
            PDL=(self.config or Config()).pdl and has_dependent_launch(k.device),
        )
        return position

    def move(self, store: Store, due: np.ndarray) -> None:
        batch, heads, slots, dim = store.ring_k.shape
        tail, codec = store.tail, kernels_of(store)
        done = self._scratch(0, dim, batch, tail.k.device)[2]
        if codec is not None:
            codec.move(store, done)
        else:
            index = store.channels.index
            ranks = index if store.values is None else store.values.ranks()
            ring.move[(batch, heads)](
                *(store.ring_k, store.ring_v, tail.k, tail.v, index, ranks, tail.places()),
                *(store.seen_dev, store.start_dev, tail.length_dev, done, index.stride(0), ranks.stride(0)),
                *(slots, store.sizes.window, store.sizes.flush),
                H=heads,
                D=dim,
                TILE=moved(dim),
                PAGE=tail.page,
                VALUES=int(store.values is not None),
            )
        tail.length += np.where(tail.capacity > 0, due[:, None], 0)

    def evict(self, store: Store) -> None:
        policy = store.eviction
        choice = None if policy is None else policy.chosen(store.prompt, store.tail, *store.ends(), kernel=True)
        if policy is not None and choice is not None:
            room = self.prepare(store).room
            assert room is not None
            self.weights.compact(store, policy, choice, room)

    def attend(self, store: Store, q: Tensor, position: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
        """Attention in one launch; see `batched.attend`. Raises ValueError for what the kernel cannot compute."""
        if not softmax.plain:
            raise ValueError(f'{softmax.why_not_kernel}; use backend="auto" or "torch"')
        plan = self.prepare(store)
        if plan.codec is not None and not scaling > 0:
            raise ValueError(f'scaling={scaling} of logits must be positive for a packed middle; use backend="torch"')
        queries, group = q.shape[2], q.shape[1] // store.ring_k.shape[1]
        most = MAX_ROWS if q.shape[-1] <= 128 else LONG_ROWS
        tile_rows = min(most, max(16, triton.next_power_of_2(group * queries)))
        per_chunk = tile_rows // group
        at_once = per_chunk if store.eviction is not None else MAX_CHUNKS * per_chunk
        if queries > at_once:
            pieces = zip(q.split(at_once, 2), position.split(at_once, 1), strict=True)
            return torch.cat([self.attend(store, *piece, scaling) for piece in pieces], 1)
        rows = min(tile_rows, triton.next_power_of_2(group * min(queries, per_chunk)))
        q, position = q if q.stride(-1) == 1 else q.contiguous(), position.contiguous()
        out = self._launch(store, plan, q, position, scaling, tile_rows, rows)
        if store.eviction is not None and plan.room is not None:
            self.weights.add(store, store.eviction, plan.room, position, group, rows)
        return out

    def _launch(
        self, store: Store, plan: LaunchPlan, q: Tensor, position: Tensor, scaling: float, tile_rows: int, rows: int
    ) -> Tensor:
        """Attention of q [B, Hq, Q, D] in tiles of tile_rows rows, of which the first `rows` may hold a query."""
        (batch, q_heads, queries, dim), heads = q.shape, store.ring_k.shape[1]
        codec, group = plan.codec, q_heads // heads
        config = self._config(codec, dim, tile_rows, plan.few)
        pdl = config.pdl and has_dependent_launch(q.device)
        chunks = -(-queries // (tile_rows // group))
        most = batch * heads + plan.programs  # upper bound on partial results, for any table
        padded = triton.next_power_of_2(dim)
        partials, stats, done = self._scratch(chunks * most * rows, padded, chunks * batch * heads, q.device)
        out = torch.empty(batch, queries, q_heads, dim, dtype=q.dtype, device=q.device)
        taken = Queries(q, position, q.stride(0), q.stride(1), q.stride(2), queries, scaling * LOG2_E)
        results = Results(out, partials, stats, done)
        if (of_warp := self._rooms(codec)) and group * queries <= codes.ROWS:
            dependent = has_dependent_launch(q.device)
            codes.launch(plan.programs, rows, of_warp, dependent, plan.table, layer_of(store), taken, results)
            return out
        form = decode.Form(
            H=heads,
            GROUP=group,
            D=dim,
            TILE=config.tile,
            M=tile_rows,
            ROWS=rows,
            MERGE_LINES=max(1, config.merge // max(rows, config.warps)),
            EVEN=plan.even,
            PAGE=PAGE,
            FIELDS=work.FIELDS,
            WARPS=config.warps,
            VALUES=plan.values,
            WEIGHTS=plan.room is not None,
            PDL=pdl,
        )
        weights = (done, done)
        if plan.room is not None and store.eviction is not None:
            weights = (self.weights.scratch(store, store.eviction, rows), plan.room)
        decode.decode[(plan.programs, chunks)](
            layer_of(store),
            plan.table,
            taken,
            results,
            *weights,
            most,
            batch * heads,
            F=form,
            READ=None if codec is None else codec.read,
            CODES=None if codec is None else codec.codes,
            **({"launch_pdl": True} if pdl else {}),
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=config.registers or None,
        )
        return out

    def prepare(self, store: Store) -> LaunchPlan:
        """The store's work table, made anew if addresses or capacities have changed; in place, for captured graphs."""
        old = store.plan if isinstance(store.plan, LaunchPlan) else None
        if old is not None and old.version == store.version:
            return old
        (batch, heads), dim = store.ring_k.shape[:2], store.ring_k.shape[-1]
        device = store.ring_k.device
        codec = kernels_of(store)
        programs = self.programs or multiprocessors(device) * self._config(codec, dim, 16).per_sm
        parts = work.parts(store)
        if codec is not None and codec.heads is not None:
            _say(parts, work.Part, codec.heads[:, :2])
        few = int(parts[parts[:, work.Part.KIND] >= work.PROMPT, work.Part.TOKENS].sum()) < FEW * PAGE * programs
        config = self._config(codec, dim, 16, few)
        share = 1.0 if codec is None else codec.share
        tile = codes.tile(parts[:, work.Part.TOKENS], programs) if self._rooms(codec) else config.tile
        lines = work.cut(parts, programs, tile, share * config.slow, config.per_tile, config.piece)
        if codec is not None and codec.heads is not None:
            _say(lines, work.Column, codec.heads[:, 2:])
        most = programs + work.PARTS * batch * heads  # every cut and every part begins at most one piece
        if old is not None and len(old.table) == most and old.table.device == device:
            table = old.table
        else:
            table = torch.zeros(most, work.FIELDS, dtype=torch.int64, device=device)
        update(table[: len(lines)], lines)
        even = bool((store.channels.count % 32 == 0).all())
        values = 0 if store.values is None else max(16, triton.next_power_of_2(int(store.values.count.max())))
        room = self.weights.fit(store, None if old is None else old.room)
        plan = LaunchPlan(table, store.version, programs, even, values, codec, few, room)
        store.plan = plan
        return plan

    def _rooms(self, codec: CodecKernels | None) -> tuple[int, int] | None:
        """The memory of a warp of `codes`, where that kernel reads the middle."""
        return codec.rooms if codec is not None and self.config is None else None

    def _config(self, codec: CodecKernels | None, dim: int, tile_rows: int, few: bool = False) -> Config:
        if codec is not None and (tile_rows > 16 or self.config is None):
            return codec.config(tile_rows, few)
        if dim > 128 and self.config is None:
            return LONG
        return WIDE if tile_rows > 16 else self.config or Config()

    def _scratch(self, lines: int, dim: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Partial results [lines, dim], their (max, sum) [lines, 2], and counters, which a launch leaves at zero."""
        self._partials = scratch(self._partials, lines * (dim + 2), device)
        self._done = scratch(self._done, counters, device)
        return self._partials, self._partials[lines * dim :], self._done

    def tensors(self) -> dict[str, Tensor]:
        return {"partials": self._partials, "done": self._done, **self.weights.tensors()}


def layer_of(store: Store) -> Layer:
    """The store's tensors as the kernels take them."""
    base, index = store.ring_k, store.channels.index
    ranks = index if store.values is None else store.values.ranks()
    return Layer(
        base,
        base if store.middle.bits is None else base.view(torch.uint8),
        index,
        ranks,
        store.seen_dev,
        store.start_dev,
        store.tail.length_dev,
        index.stride(0),
        ranks.stride(0),
        store.sizes.sink,
        base.shape[2],
    )
