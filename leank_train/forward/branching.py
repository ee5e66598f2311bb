"""Prefill once: a document's K and V are computed once, and every question and answer is a branch from its end.

Eq. 1 changes answer rows only, so the context does not depend on alpha and needs neither a second pass nor a gradient:

    prefix  = prefill(model, documents, lengths)                       # K, V of B documents
    teacher = branch(model, prefix, questions_and_answers, lengths)    # R = B * M branches, full attention
    hidden  = student(model, prefix, teacher.cut(question_lengths), answers, lengths, alpha, sink=4, window=64, ...)

Branch r continues document r // M. Token ids are padded on the right with any valid id. Lengths should be on the host,
so that no pass waits for the GPU. What the attention layers do in each pass is one class (the protocol `hook.State`).
All but the first plan once which keys their rows read (`plan`), and attend by `fused.fused_attention`, which names the
shapes, in every layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from leank.data_gen.amount import amount
from leank.eval.cache.attention import dense
from leank.eval.cache.attention.softmax import Softmax
from leank.kernels import kernel_order, tried_in
from leank.shape import check_decoder
from leank_train.forward.fused import fused_attention, side_by_side
from leank_train.forward.hook import run_decoder
from leank_train.forward.plan import Plan, document_pieces, own_pieces, to_device, visibility


@dataclass(frozen=True)
class Prefix:
    """Prefilled documents."""

    keys: list[Tensor]  # keys, values: [B, H, P, D] per layer
    values: list[Tensor]
    k_positions: Tensor  # [B, P] on the host, -1 for padding
    lengths: Tensor  # [B] on the host, tokens of each document
    ranks: dist.ProcessGroup | None = None  # processes with a share of the P tokens; None: this has all
    mean_keys: Tensor | None = None  # [L, H, D], what has been subtracted from all keys (`center_`)
    first_cell: int | None = None  # of a share: its token at which the cells of a layout begin; None: cells are cut

    def center_(self, mean_keys: Tensor) -> Self:
        """Subtract mean_keys [L, H, D] from the keys, in place: the students of this prefix prune towards the means.

        A softmax does not change if all keys lose the same vector. After that, Eq. 1 with k - mean is Eq. 1 with
        alpha k + (1 - alpha) mean. Call it once, when the teacher has read the keys.
        """
        mean_keys = to_device(mean_keys, self.device).to(self.keys[0].dtype)
        for keys, mean in zip(self.keys, mean_keys, strict=True):
            keys.sub_(mean[:, None])
        return replace(self, mean_keys=mean_keys)

    @property
    def device(self) -> torch.device:
        """Device of keys and values."""
        return self.keys[0].device


@dataclass(frozen=True)
class Branch:
    """Branches that continue the documents with full attention."""

    keys: list[Tensor]  # keys, values: [R, H, T, D] per layer, of the branch's own tokens
    values: list[Tensor]
    k_positions: Tensor  # [R, T] on the host, -1 for padding
    lengths: Tensor  # [R] on the host, the branch's own tokens
    starts: Tensor  # [R] on the host, tokens of its document
    hidden: Tensor  # [R, T, hidden] after the final norm

    def cut(self, lengths: Sequence[int] | Tensor) -> Self:
        """The first lengths [R] tokens of each branch, such as the question of a pass over question and answer."""
        lengths = checked_lengths(lengths, self.k_positions)
        longest = int(lengths.max())
        seen = torch.arange(longest) < lengths[:, None]
        return replace(
            self,
            keys=[k[:, :, :longest] for k in self.keys],
            values=[v[:, :, :longest] for v in self.values],
            k_positions=self.k_positions[:, :longest].masked_fill(~seen, -1),
            lengths=lengths,
            hidden=self.hidden[:, :longest],
        )


def checked_lengths(lengths: Sequence[int] | Tensor, ids: Tensor) -> Tensor:
    """Lengths [R] of ids [R, T] on the host. Raises ValueError if they are not R numbers from 1 to T."""
    lengths = torch.as_tensor(lengths).cpu()
    if lengths.shape != ids.shape[:1] or lengths.min() < 1 or lengths.max() > ids.shape[1]:
        wanted = amount(ids.shape[0], "number")
        raise ValueError(f"lengths={lengths.tolist()} must be {wanted} from 1 to {ids.shape[1]}")
    return lengths


@torch.no_grad()
def prefill(
    model: PreTrainedModel, document_ids: Tensor, lengths: Sequence[int] | Tensor, kernel: str = "auto"
) -> Prefix:
    """Prefill the documents with full causal attention.

    document_ids: [B, P], right-padded; lengths: [B], at least 1; kernel: one of `kernels.KERNELS`.
    Raises ValueError for a model whose mask cannot be learned (`leank.shape.check_decoder`), bad lengths, or documents
    longer than the model's positions.
    """
    check_decoder(model)
    lengths = checked_lengths(lengths, document_ids)
    positions = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    state = PrefillPass(int(lengths.max()), model.config.num_hidden_layers, kernel)
    run_decoder(model, document_ids, positions, state)
    # Causal rows never see later tokens, so right padding needs no mask: branches must not see its keys.
    k_positions = _positions(torch.zeros_like(lengths), lengths, document_ids)[1]
    return Prefix(state.keys, state.values, k_positions, lengths)


@torch.no_grad()
def branch(model: PreTrainedModel, prefix: Prefix, ids: Tensor, lengths: Sequence[int] | Tensor) -> Branch:
    """Continue the documents with full attention.

    ids: [R, T], right-padded; lengths: [R], at least 1. Raises ValueError if R is no multiple of B, or for bad lengths.
    """
    lengths, starts = checked_lengths(lengths, ids), _starts(prefix, ids)
    positions, k_positions = _positions(starts, lengths, ids)
    state = FullPass(prefix, positions, k_positions)
    hidden = run_decoder(model, ids, to_device(positions, ids.device), state)
    return Branch(state.keys, state.values, k_positions, lengths, starts, hidden)


def student(
    model: PreTrainedModel,
    prefix: Prefix,
    question: Branch,
    answer_ids: Tensor,
    lengths: Sequence[int] | Tensor,
    alpha: Tensor,
    *,
    sink: int,
    window: int,
    empty_heads: str,
) -> Tensor:
    """Run the answer tokens with the scaled attention of Eq. 1; the gradient reaches alpha [L, H, D].

    question: the branches up to their answers; answer_ids: [R, N], right-padded; lengths: [R], at least 1.
    sink, window: tokens that Eq. 1 does not scale; the window counts the row itself.
    empty_heads: as in `fused.fused_attention`.
    Returns hidden states [R, N, hidden] after the final norm. Those past a length mean nothing.
    """
    positions, k_positions = answer_positions(question, answer_ids, lengths)
    state = ScaledPass(prefix, question, positions, k_positions, alpha, sink, window, empty_heads)
    hidden = run_decoder(model, answer_ids, to_device(positions, answer_ids.device), state)
    if alpha.requires_grad and not hidden.requires_grad:  # no row had a middle: the gradient is zero, not an error
        hidden = hidden + 0.0 * alpha.sum()
    return hidden


def answer_positions(question: Branch, ids: Tensor, lengths: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the answers' rows and keys, `_positions`; ids: [R, N], lengths: [R]."""
    return _positions(question.starts + question.lengths, checked_lengths(lengths, ids), ids)


def _starts(prefix: Prefix, ids: Tensor) -> Tensor:
    """Position at which each branch begins, [R]: its document's length."""
    branches, left_over = divmod(ids.shape[0], len(prefix.lengths))
    if left_over or not branches:
        shares = f"{amount(ids.shape[0], 'branch')} among {amount(len(prefix.lengths), 'document')}"
        raise ValueError(f"every document needs as many branches as the others: {shares} cannot be divided evenly")
    return prefix.lengths.repeat_interleave(branches)


def _positions(starts: Tensor, lengths: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [R, T] on the host: of rows, which go on through padding, and of keys, where padding is -1 (unseen)."""
    steps = torch.arange(ids.shape[1])
    positions = starts[:, None] + steps
    return positions, positions.masked_fill(steps >= lengths[:, None], -1)


class Keeps:
    """Keeps K and V of every layer of a pass."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def keep(self, k: Tensor, v: Tensor) -> None:
        self.keys.append(k.contiguous())
        self.values.append(v.contiguous())


class PrefillPass(Keeps):
    """Causal attention by one of `kernels.KERNELS`, or the fastest; keeps K and V.

    Sinks need a log-sum-exp, which the library's flash kernel has, and soft-capped logits run in plain PyTorch.
    """

    def __init__(self, longest: int, layers: int, kernel: str = "auto") -> None:
        super().__init__(longest)
        self.layers, self.kernel = layers, kernel

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Causal attention [R, Hq, T, D] within each sequence."""
        self.keep(k, v)
        k, v, group = self.keys[-1], self.values[-1], q.shape[1] // k.shape[1]
        if not softmax.plain:
            return dense.attend(q, k, v, scale, softmax=softmax).transpose(1, 2)
        if q.is_cuda and q.dtype == torch.float32:  # no fused float32 kernel lets the queries of a group share keys
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        if self.kernel == "flash_attn":
            from flash_attn import flash_attn_func  # an optional dependency

            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)
        with tried_in(kernel_order(self.kernel, q, self.layers)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)


class FullPass(Keeps):
    """Full attention of each branch over its document and itself; keeps K and V; positions as from `_positions`."""

    def __init__(self, prefix: Prefix, positions: Tensor, k_positions: Tensor) -> None:
        super().__init__(int(k_positions.max()) + 1)
        if prefix.mean_keys is not None:
            raise ValueError("the keys of this prefix are centered: let the teacher read them before")
        self.prefix = prefix
        causal = visibility(positions, prefix.k_positions, "causal")
        pieces = document_pieces(positions, prefix.k_positions, [causal], prefix.device)
        own = visibility(positions, k_positions, "causal")
        self.plan = Plan(pieces + own_pieces(positions, k_positions, len(prefix.lengths), [own], prefix.device))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Full attention [R, Hq, n, D] over the branch's document and its own tokens up to each row."""
        self.keep(k, v)
        own = (side_by_side(x, len(self.prefix.lengths)) for x in (k, v))
        keys, values = zip((self.prefix.keys[layer], self.prefix.values[layer]), own, strict=True)
        return fused_attention(q, keys, values, self.plan, scale, ranks=self.prefix.ranks, softmax=softmax)


class ScaledPass:
    """Eq. 1 for the answer rows, over the keys of document (part 0), question (part 1) and answer (part 2).

    The example in `plan` follows the rows of an answer from here to the keys that they read; arguments: `student`.
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
        if prefix.mean_keys is not None:
            centered = [k - mean[:, None] for k, mean in zip(question.keys, prefix.mean_keys, strict=True)]
            question = replace(question, keys=centered)
        self.prefix, self.question, self.empty_heads = prefix, question, empty_heads
        self.alpha = alpha.to(prefix.device).unbind(0)
        self.longest = int(k_positions.max()) + 1
        zones = [visibility(positions, prefix.k_positions, zone, sink, window) for zone in ("dense", "middle")]
        pieces = document_pieces(positions, prefix.k_positions, zones, prefix.device)
        for part, at in ((1, question.k_positions), (2, k_positions)):
            zones = [visibility(positions, at, zone, sink, window) for zone in ("dense", "middle")]
            pieces += own_pieces(positions, at, len(prefix.lengths), zones, prefix.device, part)
        self.plan = Plan(pieces)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softmax: Softmax) -> Tensor:
        """Eq. 1 for this layer's rows, [R, Hq, n, D]. Raises ValueError for means, if keys must not be centered."""
        self.check_means(softmax)
        keys, values = self.parts(layer, k, v)
        return fused_attention(
            q, keys, values, self.plan, scale, self.alpha[layer], self.empty_heads, ranks=self.prefix.ranks,
            softmax=softmax,
        )  # fmt: skip

    def check_means(self, softmax: Softmax) -> None:
        """Raise ValueError for mean keys under a softmax that changes if all keys lose the same vector."""
        if self.prefix.mean_keys is not None and not softmax.plain:
            raise ValueError(
                "pruning.compensation=mean: this model's softmax has soft-capped logits or attention sinks, which "
                "change if all keys lose their mean; set pruning.compensation=none"
            )

    def parts(self, layer: int, k: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the three parts, [B, H, T, D] each; k, v: [R, H, n, D], those of the answers."""
        documents = len(self.prefix.lengths)
        if self.prefix.mean_keys is not None:
            k = k - self.prefix.mean_keys[layer, :, None]
        keys = [self.prefix.keys[layer], *(side_by_side(x, documents) for x in (self.question.keys[layer], k))]
        values = [self.prefix.values[layer], *(side_by_side(x, documents) for x in (self.question.values[layer], v))]
        return keys, values
