"""What the attention layers do in each kind of pass over the decoder.

`hook.run_decoder` calls `attend(layer, q, k, v, scale)` of one of these in every layer (the protocol `hook.State`):

    PrefillPass   documents                    causal attention by a library kernel; keeps K and V
    FullPass      questions (and answers)      full attention over document and branch; keeps K and V: the teacher
    ScaledPass    answers                      Eq. 1 over document, question and answer: the student
    DecodePass    one new token per branch     attention over a compressed cache as deployed

All but the first plan once which keys their rows read (`plan`), and attend by `fused.fused_attention` in every layer.
`attention` names the shapes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leank.data_gen.amount import amount
from leank.kernels import kernel_order, tried_in
from leank_train.forward.fused import fused_attention, side_by_side
from leank_train.forward.plan import Piece, Plan, document_pieces, own_pieces
from leank_train.forward.prefix import Branch, Prefix, to_device
from leank_train.forward.visibility import Visibility, visibility


class _Keeps:
    """Keeps K and V of every layer of a pass, and each row's last `obs_queries` queries."""

    def __init__(self, longest: int, lengths: Tensor, obs_queries: int) -> None:
        self.longest, self.lengths, self.obs_queries = longest, lengths, obs_queries
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.queries: list[Tensor] = []

    def keep(self, k: Tensor, v: Tensor) -> None:
        self.keys.append(k.contiguous())
        self.values.append(v.contiguous())


class PrefillPass(_Keeps):
    """Causal attention by the library's fastest kernel; keeps K and V.

    longest: tokens of the longest sequence.
    lengths: [B] tokens of each sequence; the rest is padding.
    obs_queries: how many of each sequence's last queries to keep, at most those of the shortest.
    layers: number of layers of the model.
    kernel: one of `kernels.KERNELS`.
    """

    def __init__(self, longest: int, lengths: Tensor, obs_queries: int, layers: int, kernel: str = "auto") -> None:
        super().__init__(longest, lengths, min(obs_queries, int(lengths.min())))
        self.layers, self.kernel = layers, kernel

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention [R, Hq, T, D] within each sequence."""
        self.keep(k, v)
        if self.obs_queries:
            self.queries.append(_last(q, self.lengths, self.obs_queries))
        k, v, group = self.keys[-1], self.values[-1], q.shape[1] // k.shape[1]
        if q.is_cuda and q.dtype == torch.float32:  # no fused float32 kernel lets the queries of a group share keys
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        if self.kernel == "flash_attn":
            from flash_attn import flash_attn_func  # an optional dependency

            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
        with tried_in(kernel_order(self.kernel, q, self.layers)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)


class FullPass(_Keeps):
    """Full attention of each branch over its document and itself; keeps K and V.

    positions: [R, n] of the rows, on the host.
    k_positions: [R, n], the same with -1 for padding.
    lengths: [R] tokens of each branch.
    obs_queries: how many last queries to keep per branch, those of its document included.
    """

    def __init__(
        self, prefix: Prefix, positions: Tensor, k_positions: Tensor, lengths: Tensor, obs_queries: int
    ) -> None:
        super().__init__(int(k_positions.max()) + 1, lengths, obs_queries)
        self.prefix = prefix
        causal = visibility(positions, prefix.k_positions, "causal")
        pieces = document_pieces(positions, prefix.k_positions, [causal], prefix.device)
        own = visibility(positions, k_positions, "causal")
        self.plan = Plan(pieces + own_pieces(positions, k_positions, len(prefix.lengths), [own], prefix.device))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Full attention [R, Hq, n, D] over the branch's document and its own tokens up to each row."""
        self.keep(k, v)
        if self.obs_queries:
            self.queries.append(self._observed(layer, q))
        own = (side_by_side(x, len(self.prefix.lengths)) for x in (k, v))
        keys, values = zip((self.prefix.keys[layer], self.prefix.values[layer]), own, strict=True)
        return fused_attention(q, keys, values, self.plan, scale, ranks=self.prefix.ranks)

    def _observed(self, layer: int, q: Tensor) -> Tensor:
        earlier = q[:, :, :0] if self.prefix.queries is None else self.prefix.queries[layer]
        earlier = earlier.repeat_interleave(q.shape[0] // earlier.shape[0], 0)
        shortest = earlier.shape[2] + int(self.lengths.min())
        if shortest < self.obs_queries:
            raise ValueError(
                f"obs_queries={self.obs_queries}, and the shortest branch has {amount(shortest, 'query')}; "
                "prefill with the same obs_queries, or use longer documents"
            )
        return _last(torch.cat([earlier, q], 2), self.lengths + earlier.shape[2], self.obs_queries)


class ScaledPass:
    """Eq. 1 for the answer rows, over the keys of document (part 0), question (part 1) and answer (part 2).

    The example in `plan` follows the rows of an answer from here to the keys that they read.

    positions: [R, n] of the rows, on the host.
    k_positions: [R, n], the same with -1 for padding.
    alpha: [L, H, D] or [R, L, H, D].
    sink, window: tokens that all rows read with plain queries; the window counts the row itself.
    empty_heads: as in `attention.scaled_attention`.
    """

    def __init__(
        self,
        prefix: Prefix,
        question: Branch,
        positions: Tensor,
        k_positions: Tensor,
        alpha: Tensor,
        sink: int,
        window: int,
        empty_heads: str,
    ) -> None:
        self.prefix, self.question, self.empty_heads = prefix, question, empty_heads
        self.alpha = _per_layer(alpha, prefix, question)
        self.longest = int(k_positions.max()) + 1
        zones = [visibility(positions, prefix.k_positions, zone, sink, window) for zone in ("dense", "middle")]
        pieces = document_pieces(positions, prefix.k_positions, zones, prefix.device)
        for part, at in ((1, question.k_positions), (2, k_positions)):
            zones = [visibility(positions, at, zone, sink, window) for zone in ("dense", "middle")]
            pieces += own_pieces(positions, at, len(prefix.lengths), zones, prefix.device, part)
        self.plan = Plan(pieces)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Eq. 1 for this layer's rows, [R, Hq, n, D]."""
        documents = len(self.prefix.lengths)
        keys = [self.prefix.keys[layer], *(side_by_side(x, documents) for x in (self.question.keys[layer], k))]
        values = [self.prefix.values[layer], *(side_by_side(x, documents) for x in (self.question.values[layer], v))]
        return fused_attention(
            q, keys, values, self.plan, scale, self.alpha[layer], self.empty_heads, ranks=self.prefix.ranks
        )


class DecodePass:
    """One new token per branch and step, over a compressed cache as deployed.

    Call `advance` before each step. The window is that of `eval.cache`: when decoding begins, it holds the last
    `window` tokens of the context. It grows with every token. At `window + flush` tokens its oldest `flush` move to the
    middle. So flush=1 gives the sliding window of Eq. 1 with one token more, because this window does not count the
    token that reads it. Keys of question and new tokens lie in buffers that are allocated once.

    room: new tokens that the buffers can hold.
    alpha: [L, H, D] or [R, L, H, D], masks or scores; heads without channels drop the middle.
    sink, window, flush: tokens, at least 0, 1 and 1.
    """

    def __init__(
        self, prefix: Prefix, question: Branch, room: int, alpha: Tensor, sink: int, window: int, flush: int
    ) -> None:
        if sink < 0 or window < 1 or flush < 1:
            raise ValueError(f"sink={sink}, window={window}, flush={flush}: need sink >= 0, window >= 1, flush >= 1")
        self.prefix, self.alpha = prefix, _per_layer(alpha, prefix, question)
        self.sink, self.window, self.flush = sink, window, flush
        B, M = len(prefix.lengths), len(question.lengths) // len(prefix.lengths)
        # buffers [B, H, M, T + room, D]: flattened over M they are what `side_by_side` makes, without a copy
        self.keys, self.values = (
            [torch.cat([x, x.new_zeros(*x.shape[:2], room, x.shape[3])], 2).unflatten(0, (B, M)) for x in xs]
            for xs in (question.keys, question.values)
        )
        self.keys, self.values = ([x.transpose(1, 2).contiguous() for x in xs] for xs in (self.keys, self.values))
        unused = question.k_positions.new_full((len(question.lengths), room), -1)
        self.k_positions = torch.cat([question.k_positions, unused], 1)
        self.slot = question.k_positions.shape[1] - 1
        self.context = (question.starts + question.lengths)[:, None]  # [R, 1] tokens of document and question
        self.longest = int(self.context.max()) + room
        self.start: Tensor | None = None  # [R, 1] first position of the window
        self.document: tuple[Piece, ...] = ()

    def advance(self, positions: Tensor) -> None:
        """Plan the step whose rows are at positions [R, 1] on the host."""
        self.slot += 1
        self.k_positions[:, self.slot] = positions[:, 0]
        start = self._window_start(positions)
        # until the window moves, all steps read the same ranges
        if self.start is None or not torch.equal(start, self.start):
            self.start = start
            self.document = document_pieces(
                positions, self.prefix.k_positions, self._zones(positions, self.prefix.k_positions), self.prefix.device
            )
        own = self._zones(positions, self.k_positions)
        documents = len(self.prefix.lengths)
        self.plan = Plan(self.document + own_pieces(positions, self.k_positions, documents, own, self.prefix.device))

    def _window_start(self, positions: Tensor) -> Tensor:
        """First position [R, 1] of the window that the rows at positions [R, 1] read."""
        sealed = (self.context - self.window).clamp(min=self.sink)
        return sealed + (positions - sealed - self.window).clamp(min=0) // self.flush * self.flush

    def _zones(self, positions: Tensor, k_positions: Tensor) -> list[Visibility]:
        return [visibility(positions, k_positions, zone, self.sink, start=self.start) for zone in ("dense", "middle")]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Write the new token's k and v into the buffers, and attend over document, question and new tokens."""
        for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
            buffer[:, :, :, self.slot] = new[:, :, 0].unflatten(0, (buffer.shape[0], -1)).transpose(1, 2)
        keys = [self.prefix.keys[layer], self.keys[layer].flatten(2, 3)]
        values = [self.prefix.values[layer], self.values[layer].flatten(2, 3)]
        return fused_attention(q, keys, values, self.plan, scale, self.alpha[layer], "drop", ranks=self.prefix.ranks)


def _per_layer(alpha: Tensor, prefix: Prefix, question: Branch) -> tuple[Tensor, ...]:
    """Alpha [L, H, D] or [R, L, H, D] -> L tensors [H, D] or [R, H, D] on the device of the keys."""
    wanted = [len(prefix.keys), prefix.keys[0].shape[1], prefix.keys[0].shape[3]]
    branches = len(question.lengths)
    if list(alpha.shape) not in (wanted, [branches, *wanted]):
        raise ValueError(
            f"alpha has the shape {list(alpha.shape)}; this model needs [layers, kv_heads, head_dim] = {wanted}, "
            f"or one such mask for each of {amount(branches, 'branch')}"
        )
    return alpha.to(prefix.keys[0].device).unbind(-3)


def _last(q: Tensor, lengths: Tensor, n: int) -> Tensor:
    """The last n rows of q [R, Hq, T, D] within the lengths [R] -> [R, Hq, n, D]."""
    index = to_device(lengths[:, None] - n + torch.arange(n), q.device)  # [R, n]
    return q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
