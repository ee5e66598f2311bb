"""The attention that tokens receive, and the tokens that leave by it, on a GPU; `Eviction` is the plain form."""

import numpy as np
import torch
from torch import Tensor

from leank.eval.cache.attention.kernels import evict
from leank.eval.cache.storage.eviction import Choice, Eviction
from leank.eval.cache.storage.segment import PAGE, kept_room
from leank.eval.cache.storage.store import Store
from leank.eval.cache.storage.upload import scratch, update

BLOCK = 256  # tokens whose weights a program adds, or whose scores it moves, at a time
SLICE = 64  # channels of a token that a program moves
PROGRAMS = 1056  # that add weights, at most: eight per multiprocessor of a large GPU


class Weights:
    """The attention weights of layers that evict. The layers of a cache share its scratch memory.

    A captured step reads the addresses of both on the device, so that larger ones can replace them between steps.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0)
        self._at = torch.zeros(1, dtype=torch.int64)  # the address of the scratch memory
        self._rows = 0  # query rows of a KV head in one launch, the most so far

    def fit(self, store: Store, policy: Eviction, room: Tensor | None) -> Tensor:
        """Give the scores and the scratch memory a column for every token that the layer has room for.

        room: of an earlier call for this layer, which is changed in place; None = there was none
        Returns int64 [2] on the device, the scores' address and columns.
        """
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
        capacity = kept_room(tail.capacity, left, store.sizes.flush)
        roomy = capacity is not tail.capacity
        new = tail.fresh(tail.channels, capacity, tail.values) if roomy else tail
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
