"""Launches the decode kernels over a compressed layer: its schedule, scratch memory, tile sizes."""

import functools
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import triton
from torch import Tensor

from leank.eval.cache.attention import codes, readers, schedule
from leank.eval.cache.attention.batched import Plain, Plans
from leank.eval.cache.attention.kernels import decode, ring
from leank.eval.cache.attention.kernels.parts import Layer, Queries, Results
from leank.eval.cache.attention.readers import LONG, READERS, WIDE, Config, Reader
from leank.eval.cache.attention.schedule import Part
from leank.eval.cache.attention.softmax import LOG2_E, PLAIN, Softmax
from leank.eval.cache.attention.weights import Weights
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.store import BackendPlan, Store
from leank.eval.cache.storage.upload import scratch, update

MAX_ROWS = 32  # query tokens x heads of a group in one tile; more query tokens take several passes, called chunks
LONG_ROWS = 16  # the same in heads of more than 128 channels, of which 32 rows do not fit a thread's 255 registers
MOVED = 4096  # numbers of K, and of V, that a program of `move` holds in registers at a time
MAX_CHUNKS = 4  # chunks in one launch; the limit bounds the scratch memory
FEW = 32  # pages of the middle for each program, below which a reader may take another `Config`
PlanKind = TypeVar("PlanKind", bound=BackendPlan)


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


@dataclass
class LaunchPlan:
    """The schedule of one store, kept until addresses or capacities change."""

    table: Tensor  # [lines, FIELDS] int64, on the device, with room for the most lines there can be
    version: int
    programs: int
    even: bool  # every channel count is a multiple of 32: no masks in the main loop
    values: int  # the most channels that V keeps, rounded up to a power of two; 0 = all
    reader: Reader | None  # None = the middle is in 16 bits
    few: bool = False  # every program reads few pages of the middle; see FEW
    room: Tensor | None = None  # where the scores of a layer that evicts lie; see kernels.evict


class OnGPU(Plain, Generic[PlanKind]):
    """What the backends in Triton share: tokens into the window and out of it, plans, scratch memory.

    The layers of a cache share the scratch memory, because they run one after the other.
    """

    captures = True

    def __init__(self, programs: int = 0) -> None:
        """Choose the number of programs; 0 = so many per multiprocessor as the launch says."""
        super().__init__()
        self.programs, self.early = programs, True  # early: whether to use programmatic dependent launch for `write`
        self.plans = Plans[PlanKind]()
        self._partials, self._done = torch.empty(0), torch.empty(0, dtype=torch.int32)

    def plan(self, store: Store) -> PlanKind | None:
        return self.plans.get(store)

    def adopt(self, store: Store, plan: Any) -> None:
        if plan is not None:
            self.plans[store] = plan

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
            PDL=self.early and has_dependent_launch(k.device),
        )
        return position

    def move(self, store: Store, due: np.ndarray) -> None:
        batch, heads, slots, dim = store.ring_k.shape
        tail = store.tail
        done = self._scratch(0, dim, batch, tail.k.device)[2]
        if store.middle.bits is not None:
            readers.move(store, done)
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

    def _scratch(self, lines: int, dim: int, counters: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Partial results [lines, dim], their (max, sum) [lines, 2], and counters, which a launch leaves at zero."""
        self._partials = scratch(self._partials, lines * (dim + 2), device)
        self._done = scratch(self._done, counters, device)
        return self._partials, self._partials[lines * dim :], self._done

    def tensors(self) -> dict[str, Tensor]:
        return {"partials": self._partials, "done": self._done}


class Kernel(OnGPU[LaunchPlan]):
    """The backend in Triton and CUDA for layers whose every token is read."""

    def __init__(self, config: Config | None = None, programs: int = 0) -> None:
        """Choose the launch, None = by what a store holds; programs: 0 = `config.per_sm` per multiprocessor."""
        super().__init__(programs)
        self.config, self.early = config, (config or Config()).pdl
        self.weights = Weights()

    def evict(self, store: Store) -> None:
        policy = store.eviction
        choice = None if policy is None else policy.chosen_on_gpu(store.prompt, store.tail, *store.ends())
        if policy is not None and choice is not None:
            room = self.prepare(store).room
            assert room is not None
            self.weights.compact(store, policy, choice, room)

    def attend(self, store: Store, q: Tensor, position: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
        """Attention in one launch; see `batched.attend`. Raises ValueError for what the kernel cannot compute."""
        if not softmax.plain:
            raise ValueError(f'{softmax.why_not_kernel}; use backend="auto" or "torch"')
        plan = self.prepare(store)
        if plan.reader is not None and not scaling > 0:
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
        reader, group = plan.reader, q_heads // heads
        config = self._config(reader, dim, tile_rows, plan.few)
        pdl = config.pdl and has_dependent_launch(q.device)
        chunks = -(-queries // (tile_rows // group))
        most = batch * heads + plan.programs  # upper bound on partial results, for any table
        padded = triton.next_power_of_2(dim)
        partials, stats, done = self._scratch(chunks * most * rows, padded, chunks * batch * heads, q.device)
        out = torch.empty(batch, queries, q_heads, dim, dtype=q.dtype, device=q.device)
        taken = Queries(q, position, q.stride(0), q.stride(1), q.stride(2), queries, scaling * LOG2_E)
        results = Results(out, partials, stats, done)
        if reader and (of_warp := self._warp_bytes(reader)) and group * queries <= codes.ROWS:
            dependent = has_dependent_launch(q.device)
            codes.launch(
                plan.programs, rows, of_warp, reader.codes.GROUP, dependent, plan.table, layer_of(store), taken,
                results, None, reader.codes.PACKED,
            )  # fmt: skip
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
            READ=None if reader is None else reader.read,
            CODES=None if reader is None else reader.codes,
            **({"launch_pdl": True} if pdl else {}),
            num_warps=config.warps,
            num_stages=config.stages,
            maxnreg=config.registers or None,
        )
        return out

    def prepare(self, store: Store) -> LaunchPlan:
        """The store's schedule, made anew if addresses or capacities have changed; in place, for captured graphs."""
        old = self.plan(store)
        if old is not None and old.version == store.version:
            return old
        (batch, heads), dim = store.ring_k.shape[:2], store.ring_k.shape[-1]
        device, bits = store.ring_k.device, store.middle.bits
        reader = None if bits is None else READERS[type(bits)](store)
        programs = self.programs or multiprocessors(device) * self._config(reader, dim, 16).per_sm
        parts = schedule.parts(store) if reader is None else schedule.parts(store, reader.cost, reader.columns)
        of_middle = parts[:, Part.KIND] >= schedule.PROMPT
        few = int(parts[of_middle, Part.TOKENS].sum()) < FEW * PAGE * programs
        config = self._config(reader, dim, 16, few)
        tile = codes.tile(parts[:, Part.TOKENS], programs) if self._warp_bytes(reader) else config.tile
        lines = schedule.cut(parts, programs, tile, config.slow, config.per_tile, config.split)
        most = programs + schedule.PARTS * batch * heads  # every cut and every part begins at most one split
        if old is not None and len(old.table) == most and old.table.device == device:
            table = old.table
        else:
            table = torch.zeros(most, schedule.FIELDS, dtype=torch.int64, device=device)
        update(table[: len(lines)], lines)
        even = bool((store.channels.count % 32 == 0).all())
        values = 0 if store.values is None else max(16, triton.next_power_of_2(int(store.values.count.max())))
        room = (
            None
            if store.eviction is None
            else self.weights.fit(store, store.eviction, None if old is None else old.room)
        )
        plan = LaunchPlan(table, store.version, programs, even, values, reader, few, room)
        self.plans[store] = plan
        return plan

    def _warp_bytes(self, reader: Reader | None) -> tuple[int, int] | None:
        """The memory of a warp of `codes`, where that kernel reads the middle."""
        return reader.warp_bytes if reader is not None and self.config is None else None

    def _config(self, reader: Reader | None, dim: int, tile_rows: int, few: bool = False) -> Config:
        if reader is not None and (tile_rows > 16 or self.config is None):
            return reader.config(tile_rows, few)
        if dim > 128 and self.config is None:
            return LONG
        return WIDE if tile_rows > 16 else self.config or Config()

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), **self.weights.tensors()}


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
