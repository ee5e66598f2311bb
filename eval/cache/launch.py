"""Launches the decode kernel: work tables, scratch memory, tile sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from eval.cache import kernel, work
from eval.cache.pages import PAGE
from eval.cache.store import Store

MAX_ROWS = 64  # query tokens x heads of a group that one tile holds; more query tokens take several passes


@dataclass(frozen=True)
class Config:
    """tile: tokens read at a time (64 or 128); warps, stages: of a program; per_sm: programs per multiprocessor."""

    tile: int = 64
    warps: int = 4
    stages: int = 3
    per_sm: int = 2


@dataclass
class Plan:
    """The work table of one store, kept until addresses or capacities change."""

    table: Tensor  # [lines, FIELDS] int64, on the device; may have room for more lines than are in use
    version: int
    programs: int
    partials: int
    even: bool  # every channel count is a multiple of 32: no masks in the main loop


class TritonAttend:
    """`reference.attend` as one kernel launch; shared by the layers of a cache, because they run one after the other."""

    def __init__(self, config: Config | None = None, programs: int = 0):
        """programs: number of programs, 0 = `config.per_sm` per multiprocessor."""
        self.config, self.programs = config or Config(), programs
        self._partials = self._done = torch.empty(0)

    def __call__(self, store: Store, q: Tensor, position: Tensor, scaling: float) -> Tensor:
        """See `reference.attend`."""
        plan = self._plan(store)
        batch, q_heads, queries, dim = q.shape
        heads, slots = store.ring_k.shape[1:3]
        group = q_heads // heads
        if q.stride(-1) != 1:
            q = q.contiguous()
        tile_rows = min(MAX_ROWS, max(16, triton.next_power_of_2(group * queries)))
        per_chunk = tile_rows // group
        chunks = -(-queries // per_chunk)
        rows = min(tile_rows, triton.next_power_of_2(group * min(queries, per_chunk)))
        partials, stats, done = self._scratch(chunks, plan.partials, rows, dim, batch * heads, q.device)
        out = torch.empty(batch, queries, q_heads, dim, dtype=q.dtype, device=q.device)
        tail = store.seen_dev if store.tail is None else store.tail.length_dev
        kernel.decode[(plan.programs, chunks)](
            *(store.ring_k, q, out, store.channels.index, plan.table, store.seen_dev, store.start_dev, tail),
            *(position.contiguous(), partials, stats, done),
            *(scaling * 1.4426950408889634, q.stride(0), q.stride(1), q.stride(2), store.channels.index.stride(0)),
            *(queries, plan.partials, batch * heads, slots),
            HEADS=heads,
            GROUP=group,
            D=dim,
            TILE=self.config.tile,
            M=tile_rows,
            ROWS=rows,
            PARTS=max(1, 64 // rows),
            EVEN=plan.even,
            PAGE=PAGE,
            FIELDS=work.FIELDS,
            num_warps=self.config.warps,
            num_stages=self.config.stages,
        )
        return out

    def _plan(self, store: Store) -> Plan:
        """The store's work table, made anew if the store has changed; in place where it fits, for captured graphs."""
        old: Plan | None = store.plan
        if old is not None and old.version == store.version:
            return old
        device = store.ring_k.device
        programs = self.programs
        if not programs:
            programs = torch.cuda.get_device_properties(device).multi_processor_count * self.config.per_sm
        table, partials = work.cut(work.units(store), programs, self.config.tile, store.ring_k.shape[3])
        even = bool((store.channels.count % 32 == 0).all())
        if old is not None and len(old.table) >= len(table):
            old.table[: len(table)].copy_(torch.from_numpy(table))
            store.plan = Plan(old.table, store.version, programs, partials, even)
        else:
            room = torch.zeros(len(table) + len(table) // 4, work.FIELDS, dtype=torch.int64)
            room[: len(table)] = torch.from_numpy(table)
            store.plan = Plan(room.to(device), store.version, programs, partials, even)
        return store.plan

    def _scratch(self, chunks: int, partials: int, rows: int, dim: int, places: int, device: torch.device):
        """Partial results [chunks, partials, rows, D], their (max, sum), and the counters, which kernels leave at zero."""
        size = chunks * partials * rows
        if self._partials.numel() < size * (dim + 2) or self._partials.device != device:
            self._partials = torch.empty(size * (dim + 2), dtype=torch.float32, device=device)
        if self._done.numel() < chunks * places or self._done.device != device:
            self._done = torch.zeros(chunks * places, dtype=torch.int32, device=device)
        return self._partials, self._partials[size * dim :], self._done

    def tensors(self) -> dict[str, Tensor]:
        """Scratch memory held, by name."""
        return {"partials": self._partials, "done": self._done}
