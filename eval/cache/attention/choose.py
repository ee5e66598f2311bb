"""Launches a decoding step that chooses what it reads: scores, choice, attention over what was chosen."""

from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor

from leank.eval.cache.attention import batched
from leank.eval.cache.attention.kernels import choose as kernels
from leank.eval.cache.attention.kernels.parts import Queries, Results
from leank.eval.cache.attention.launch import OnGPU, layer_of, multiprocessors
from leank.eval.cache.attention.ranking import Bounds, Ranking, places
from leank.eval.cache.attention.softmax import LOG2_E, PLAIN, Softmax
from leank.eval.cache.storage.store import Store
from leank.eval.cache.storage.upload import scratch, update

ROWS = 16  # of a tile: the fewest that tensor cores take; a group has no more query heads
MOST_BLOCK = 16384  # candidates that a program of `choose` holds in registers
LINE, LONGEST = 8, 14  # pages or runs of a line, of which `choose` holds several: the fewest and the most
ALIGNED = 16  # scores of a query head begin at multiples of so many


@dataclass(frozen=True)
class ChosenConfig:
    """How the kernels of a step are launched."""

    tile: int = 32  # tile, warps, per_sm: of the attention: tokens at a time, and programs per multiprocessor
    warps: int = 4
    per_sm: int = 2
    span: int = 64  # slots of sink and window that a program reads
    score_tile: int = 64  # score_tile, label_tile: of the scores: pages at a time, and tokens of 16 labels
    label_tile: int = 256
    score_warps: int = 4  # score_warps, score_per_sm: of the scores
    score_per_sm: int = 2
    held: int = 16  # of the choice, one program per query head: tokens that a thread holds, and about as many pages
    run: int = 8  # tokens of a run, whose best is found with the scores
    merge: int = 16  # partial results that a merge reads at a time


@dataclass
class ChosenPlan:
    """Where one store lies, kept until addresses or capacities change."""

    table: Tensor  # [B H, FIELDS] int64, on the device; a captured step reads it where it is
    version: int  # of the store
    group: int  # query heads per KV head, for whose scores there is room
    scores: Tensor  # float32, which the table points to
    # step, label_step: divide every channel count, and every number of channels that are read as labels: 16, 8 or 1
    step: int
    label_step: int
    # channels, labels: a power of two that is at least the channels of any head, and the same of label channels
    channels: int
    labels: int
    room: int  # pages or tokens of a head's middle that there is room for


class Chosen(OnGPU[ChosenPlan]):
    """The backend in Triton for layers that choose what they read; several query tokens run in plain PyTorch."""

    def __init__(self, config: ChosenConfig | None = None, programs: int = 0) -> None:
        """Choose the launch; programs: number of programs, 0 = so many per multiprocessor as `config` says."""
        super().__init__(programs)
        self.chosen_config = config or ChosenConfig()
        self._scores, self._chosen = torch.empty(0), torch.empty(0, dtype=torch.int32)
        self._group = 1  # query heads per KV head, known with the first query

    def _programs(self, store: Store, per_sm: int, units: int) -> int:
        """Programs for each of `units` equal pieces of work."""
        programs = self.programs or multiprocessors(store.ring_k.device) * per_sm
        return max(1, -(-programs // units))

    def attend(self, store: Store, q: Tensor, position: Tensor, scaling: float, softmax: Softmax = PLAIN) -> Tensor:
        batch, q_heads, queries, dim = q.shape
        self._group = q_heads // store.ring_k.shape[1]
        if queries > 1 or not softmax.plain:
            return batched.attend(store, q, position, scaling, softmax)
        q = q if q.stride(-1) == 1 else q.contiguous()
        config, plan, ranking = self.chosen_config, self.prepare(store), ranking_of(store)
        (heads, slots), group = store.ring_k.shape[1:3], self._group
        chosen = self.select(store, q, plan, ranking)
        ends = -(-store.sizes.sink // config.span) - (-slots // config.span)
        shares = max(1, -(-ranking.most * ranking.page // config.tile))
        shares = min(shares, self._programs(store, config.per_sm, batch * q_heads))
        rows = triton.next_power_of_2(group)
        partials, stats, done = self._scratch(batch * heads * (ends + shares) * rows, dim, batch * heads, q.device)
        out = torch.empty(batch, 1, q_heads, dim, dtype=q.dtype, device=q.device)
        kernels.attend[(batch * heads, ends + group * shares)](
            layer_of(store),
            plan.table,
            Queries(q, position.contiguous(), q.stride(0), q.stride(1), q.stride(2), 1, scaling * LOG2_E),
            Results(out, partials, stats, done),
            *(chosen, ranking.most, ends, shares),
            H=heads,
            GROUP=group,
            D=dim,
            C=plan.channels,
            TILE=config.tile,
            SPAN=config.span,
            M=ROWS,
            ROWS=rows,
            MERGE_LINES=config.merge,
            PER=ranking.page,
            STEP=plan.step,
            num_warps=config.warps,
            num_stages=1,  # a program has few tiles, so nothing is read ahead
        )
        return out

    def select(self, store: Store, q: Tensor, plan: ChosenPlan, ranking: Ranking) -> Tensor:
        """The pages or tokens that each query head reads, [B Hq, most] int32; what lies past the last is anything."""
        config, (batch, q_heads, _, dim) = self.chosen_config, q.shape
        heads = store.ring_k.shape[1]
        by_token, index = ranking.bounds is None, store.channels.index
        cap = triton.next_power_of_2(max(1, ranking.most)) if by_token else 0
        self._chosen = scratch(self._chosen, batch * q_heads * (ranking.most + cap), q.device)
        words = store.ring_k.view(torch.float32)
        given = (store.ring_k, words, q, index, plan.table, store.tail.length_dev, *q.stride()[:2], index.stride(0))
        shape = {"H": heads, "GROUP": q_heads // heads, "D": dim, "M": ROWS, "STEP": plan.step}
        grid = (batch * heads, self._programs(store, config.score_per_sm, batch * heads))
        if by_token:
            tile = max(config.score_tile, config.label_tile * 16 // plan.labels)  # as many bytes with more labels
            kernels.score_tokens[grid](
                *given, **shape, TILE=tile, RUN=config.run, C=plan.labels, LABEL_STEP=plan.label_step,
                BITS=ranking.bits, num_warps=config.score_warps,
            )  # fmt: skip
        else:
            kernels.score_pages[grid](
                *given, **shape, TILE=config.score_tile, PER=ranking.page, num_warps=config.score_warps
            )
        lines, width = lines_held(-(-plan.room // config.run) if by_token else plan.room)
        last = max(8, min(MOST_BLOCK // config.run, cap))
        kernels.choose[(batch * q_heads,)](
            *(words, self._chosen, plan.table, store.tail.length_dev, ranking.most),
            GROUP=q_heads // heads,
            PER=ranking.page,
            RUN=config.run,
            WIDTH=width,
            LINES=lines,
            LAST=last,
            CAP=cap,
            num_warps=min(32, max(1, max(lines * LINE, last * config.run if by_token else 0) // config.held // 32)),
            num_stages=1,
        )
        return self._chosen

    def move(self, store: Store, due: np.ndarray) -> None:
        super().move(store, due)
        self.prepare(store, int(due.max()))

    def prepare(self, store: Store, moved: int = 0) -> ChosenPlan:
        old, ranking = self.plan(store), ranking_of(store)
        if old is not None and (old.version, old.group) == (store.version, self._group):
            plan = old
        else:
            room = store.prompt.length + store.tail.capacity
            if ranking.bounds is not None and ranking.bounds.widen(store, room):
                moved = max(1, int(room.max()))
            plan = self.plans[store] = self._plan(store, ranking, old, int((-(-room // ranking.page)).max()))
        if ranking.bounds is not None and moved:
            self._bound(store, plan, ranking.bounds, moved)
        return plan

    def _plan(self, store: Store, ranking: Ranking, old: ChosenPlan | None, room: int) -> ChosenPlan:
        """The plan of a store as it is now; room: the most pages or tokens of a head that there is room for."""
        device, count, first = store.ring_k.device, store.channels.count, store.channels.first
        runs, room = (-(-n // ALIGNED) * ALIGNED for n in (-(-room // self.chosen_config.run), room))
        size = store.prompt.length.size * self._group * (room + runs)
        scores = self._scores if old is None or old.scores.device != device else old.scores
        if scores.numel() < size or scores.device != device:
            if self._scores.numel() < size or self._scores.device != device:
                self._scores = torch.empty(size + size // 8, device=device)  # plans may still point to the one before
            scores = self._scores
        lines = places(store, ranking, scores, room, runs, self._group)
        table = torch.empty(lines.shape, dtype=torch.int64, device=device) if old is None else old.table
        if table.shape != lines.shape or table.device != device:
            table = torch.empty(lines.shape, dtype=torch.int64, device=device)
        update(table, lines)
        labels = count if first is None else first
        step, label_step = (16 if not (n % 16).any() else 1 for n in (count, labels))
        label_step = max(label_step, min(step, 8))  # some channels more are read, in whole vectors
        wide, label_wide = (max(16, triton.next_power_of_2(int(n.max()))) for n in (count, labels))
        return ChosenPlan(table, store.version, self._group, scores, step, label_step, wide, label_wide, room)

    def _bound(self, store: Store, plan: ChosenPlan, bounds: Bounds, moved: int) -> None:
        """Bring the bounds of the pages that hold the last `moved` tokens of each head up to date."""
        heads = store.prompt.length.size
        programs = min(self._programs(store, self.chosen_config.score_per_sm, heads), -(-moved // bounds.page) + 1)
        kernels.bound[(heads, programs)](
            *(store.ring_k, plan.table, store.tail.length_dev, moved),
            D=store.ring_k.shape[-1],
            PER=bounds.page,
            CHUNK=min(32, triton.next_power_of_2(bounds.page)),
        )
        bounds.settle(store)

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "scores": self._scores, "chosen": self._chosen}


def lines_held(candidates: int) -> tuple[int, int]:
    """Lines that a program of `choose` holds of so many pages or runs, and how many of these a line has.

    There is room for 1/16 more, as the middle grows under a captured step and each count reads what is past the lines
    again. So where a power of two is full, lines grow longer rather than twice as many.
    """
    wanted = candidates + candidates // 16 + 1
    lines = max(8, min(MOST_BLOCK // LINE, triton.next_power_of_2(-(-wanted // LONGEST))))
    return lines, min(LONGEST, max(LINE, -(-wanted // (2 * lines)) * 2))


def ranking_of(store: Store) -> Ranking:
    """How a layer that chooses what it reads ranks its middle."""
    ranking = getattr(store.reads, "ranking", None)
    assert isinstance(ranking, Ranking)
    return ranking
