"""What the attention layers do in each kind of pass: prefill, branch (full), student (Eq. 1), one step of decoding.

Shapes: B documents, R branches, Hq query heads, H KV heads, T or n tokens, D head_dim. `hook.State` is the interface.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from leank_train.forward.fused import fused_attention, side_by_side
from leank_train.forward.kernels import kernel_order, tried_in
from leank_train.forward.plan import Piece, Plan, document_pieces, own_pieces
from leank_train.forward.prefix import Branch, Prefix, to_device
from leank_train.forward.visibility import Visibility, visibility


class _Keeps:
    """K and V of every layer that a pass went through, and its last queries on request."""

    def __init__(self, longest: int, lengths: Tensor, obs_queries: int) -> None:
        self.longest, self.lengths, self.obs_queries = longest, lengths, obs_queries
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.queries: list[Tensor] = []

    def keep(self, k: Tensor, v: Tensor) -> None:
        self.keys.append(k.contiguous())
        self.values.append(v.contiguous())


class PrefillPass(_Keeps):
    """Causal attention by the library's fastest kernel; keeps K and V, and the last queries on request."""

    def __init__(self, longest: int, lengths: Tensor, obs_queries: int, layers: int, kernel: str = "auto") -> None:
        super().__init__(longest, lengths, min(obs_queries, int(lengths.min())))
        self.layers, self.kernel = layers, kernel

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.keep(k, v)
        if self.obs_queries:
            self.queries.append(_last(q, self.lengths, self.obs_queries))
        k, v, group = self.keys[-1], self.values[-1], q.shape[1] // k.shape[1]
        if q.is_cuda and q.dtype == torch.float32:  # no fused float32 kernel shares keys among a group's queries
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        if self.kernel == "flash_attn":
            from flash_attn import flash_attn_func  # an extra that few machines have

            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
        with tried_in(kernel_order(self.kernel, q, self.layers)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)


class FullPass(_Keeps):
    """A branch's full attention on its document and on itself; keeps K and V, and the last queries on request."""

    def __init__(
        self, prefix: Prefix, positions: Tensor, k_positions: Tensor, lengths: Tensor, obs_queries: int
    ) -> None:
        super().__init__(int(k_positions.max()) + 1, lengths, obs_queries)
        self.prefix = prefix
        causal = visibility(positions, prefix.k_positions, "causal")
        pieces = document_pieces(positions, prefix.k_positions, [causal], prefix.place)
        own = visibility(positions, k_positions, "causal")
        self.plan = Plan(pieces + own_pieces(positions, k_positions, len(prefix.lengths), [own], prefix.place))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
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
                f"obs_queries={self.obs_queries}, but only {shortest} queries are at hand for the shortest branch; "
                "prefill with the same obs_queries, or use longer documents"
            )
        return _last(torch.cat([earlier, q], 2), self.lengths + earlier.shape[2], self.obs_queries)


class ScaledPass:
    """Eq. 1 for answer rows over the document, the question and the answer's own K and V."""

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
        pieces = document_pieces(positions, prefix.k_positions, zones, prefix.place)
        for part, at in ((1, question.k_positions), (2, k_positions)):
            zones = [visibility(positions, at, zone, sink, window) for zone in ("dense", "middle")]
            pieces += own_pieces(positions, at, len(prefix.lengths), zones, prefix.place, part)
        self.plan = Plan(pieces)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        documents = len(self.prefix.lengths)
        keys = [self.prefix.keys[layer], *(side_by_side(x, documents) for x in (self.question.keys[layer], k))]
        values = [self.prefix.values[layer], *(side_by_side(x, documents) for x in (self.question.values[layer], v))]
        return fused_attention(
            q, keys, values, self.plan, scale, self.alpha[layer], self.empty_heads, ranks=self.prefix.ranks
        )


class DecodePass:
    """One new token per branch over a cache as deployed; the tail (question, new tokens) lies in buffers made once.

    The middle is that of `eval.cache`: after the context it holds what is neither among the first `sink` tokens nor
    among the last `window`, and the window then grows until it holds `window + flush` tokens, of which the oldest
    `flush` move to the middle. flush=1 is the window of Eq. 1 that slides with every token, one token longer, since
    this window does not count the token that reads it.
    """

    def __init__(
        self, prefix: Prefix, question: Branch, room: int, alpha: Tensor, sink: int, window: int, flush: int
    ) -> None:
        if sink < 0 or window < 1 or flush < 1:
            raise ValueError(f"sink={sink}, window={window}, flush={flush}: need sink >= 0, window >= 1, flush >= 1")
        self.prefix, self.alpha = prefix, _per_layer(alpha, prefix, question)
        self.sink, self.window, self.flush = sink, window, flush
        B, M = len(prefix.lengths), len(question.lengths) // len(prefix.lengths)
        # buffers [B, H, M, T + room, D], so that a view of them lies side by side
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
        """Make room for the token at positions [R, 1]."""
        self.slot += 1
        self.k_positions[:, self.slot] = positions[:, 0]
        start = self._window_start(positions)
        if self.start is None or not torch.equal(start, self.start):  # between moves a document is read alike
            self.start = start
            self.document = document_pieces(
                positions, self.prefix.k_positions, self._zones(positions, self.prefix.k_positions), self.prefix.place
            )
        own = self._zones(positions, self.k_positions)
        documents = len(self.prefix.lengths)
        self.plan = Plan(self.document + own_pieces(positions, self.k_positions, documents, own, self.prefix.place))

    def _window_start(self, positions: Tensor) -> Tensor:
        """First position of the window that the token at positions [R, 1] reads."""
        sealed = (self.context - self.window).clamp(min=self.sink)
        return sealed + (positions - sealed - self.window).clamp(min=0) // self.flush * self.flush

    def _zones(self, positions: Tensor, k_positions: Tensor) -> list[Visibility]:
        return [visibility(positions, k_positions, zone, self.sink, start=self.start) for zone in ("dense", "middle")]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
            buffer[:, :, :, self.slot] = new[:, :, 0].unflatten(0, (buffer.shape[0], -1)).transpose(1, 2)
        keys = [self.prefix.keys[layer], self.keys[layer].flatten(2, 3)]
        values = [self.prefix.values[layer], self.values[layer].flatten(2, 3)]
        return fused_attention(q, keys, values, self.plan, scale, self.alpha[layer], "drop", ranks=self.prefix.ranks)


def _per_layer(alpha: Tensor, prefix: Prefix, question: Branch) -> tuple[Tensor, ...]:
    """Alpha [L, H, D] or [R, L, H, D] -> L times [H, D] or [R, H, D], beside the keys."""
    wanted = [len(prefix.keys), prefix.keys[0].shape[1], prefix.keys[0].shape[3]]
    branches = len(question.lengths)
    if list(alpha.shape) not in (wanted, [branches, *wanted]):
        raise ValueError(
            f"alpha has the shape {list(alpha.shape)}; this model needs [layers, kv_heads, head_dim] = {wanted}, "
            f"or one such mask for each of the {branches} branches"
        )
    return alpha.to(prefix.keys[0].device).unbind(-3)


def _last(q: Tensor, lengths: Tensor, n: int) -> Tensor:
    """The n rows of q [R, Hq, T, D] before each length [R] -> [R, Hq, n, D]."""
    index = to_device(lengths[:, None] - n + torch.arange(n), q.device)  # [R, n]
    return q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
