"""Prefill once: a document's K and V are computed once, and every question and answer is a branch from its end.

Eq. 1 changes answer rows only, so the context does not depend on alpha and needs neither a second pass nor a gradient:

    prefix  = prefill(model, documents, lengths)                       # K, V of B documents
    teacher = branch(model, prefix, questions_and_answers, lengths)    # R = B * M branches, full attention
    hidden  = student(model, prefix, teacher.cut(question_lengths), answers, lengths, alpha, sink=4, window=64, ...)

Branch r continues document r // M. Token ids are padded on the right with any valid id. Lengths should be on the host,
so that no pass waits for the GPU (see `prefix`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leank.data_gen.amount import amount
from leank.shape import check_decoder
from leank_train.forward.hook import run_decoder
from leank_train.forward.passes import Branch, FullPass, PrefillPass, Prefix, ScaledPass, checked_lengths
from leank_train.forward.plan import to_device


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    document_ids: Tensor,
    lengths: Sequence[int] | Tensor,
    kernel: str = "auto",
) -> Prefix:
    """Prefill the documents with full causal attention.

    document_ids: [B, P], right-padded.
    lengths: [B], at least 1.
    kernel: one of `kernels.KERNELS`.

    Raises ValueError for a model whose mask cannot be learned (`hook.check_decoder`), bad lengths, or documents longer
    than the model's positions.
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

    ids: [R, T], right-padded; R is a multiple of B.
    lengths: [R], at least 1.

    Raises ValueError if R is no multiple of B, or for bad lengths.
    """
    lengths, starts = checked_lengths(lengths, ids), _starts(prefix, ids)
    positions, k_positions = _positions(starts, lengths, ids)
    state = FullPass(prefix, positions, k_positions)
    hidden = run_decoder(model, ids, to_device(positions, ids.device), state)
    return Branch(state.keys, state.values, k_positions, lengths, starts, hidden)


@torch.no_grad()
def prefill_and_branch(
    model: PreTrainedModel,
    document_ids: Tensor,
    document_lengths: Sequence[int] | Tensor,
    ids: Tensor,
    lengths: Sequence[int] | Tensor,
    kernel: str = "auto",
) -> tuple[Prefix, Branch]:
    """`prefill` and `branch` in one pass, for one branch per document.

    document_ids: [B, P], right-padded.
    document_lengths: [B], at least 1.
    ids: [B, T], right-padded.
    lengths: [B], at least 1.
    kernel: one of `kernels.KERNELS`.
    """
    check_decoder(model)
    starts, lengths = checked_lengths(document_lengths, document_ids), checked_lengths(lengths, ids)
    P, T = document_ids.shape[1], ids.shape[1]
    own_at, own = _positions(starts, lengths, ids)
    at = to_device(own_at, ids.device)  # [B, T], columns of the branch in its row
    whole = torch.cat([document_ids, ids.new_zeros(ids.shape)], 1).scatter(1, at, ids)
    positions = torch.arange(P + T, device=ids.device).expand_as(whole)
    state = PrefillPass(int((starts + lengths).max()), model.config.num_hidden_layers, kernel)
    hidden = run_decoder(model, whole, positions, state)

    def tail(x: Tensor) -> Tensor:  # [B, H, P + T, D] -> [B, H, T, D]
        return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    k_positions = _positions(torch.zeros_like(starts), starts, document_ids)[1]
    prefix = Prefix([k[:, :, :P] for k in state.keys], [v[:, :, :P] for v in state.values], k_positions, starts)
    rows = hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[2]))
    return prefix, Branch([tail(k) for k in state.keys], [tail(v) for v in state.values], own, lengths, starts, rows)


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
    """Run the answer tokens with the scaled attention of Eq. 1; the gradient reaches alpha.

    question: the branches up to their answers.
    answer_ids: [R, N], right-padded.
    lengths: [R], at least 1.
    alpha: [L, H, D] or [R, L, H, D].
    sink, window: tokens that Eq. 1 does not scale; the window counts the row itself.
    empty_heads: as in `attention.scaled_attention`.

    Returns hidden states [R, N, hidden] after the final norm. Those past a length mean nothing; leave them out of the
    loss.
    """
    lengths, starts = checked_lengths(lengths, answer_ids), question.starts + question.lengths
    positions, k_positions = _positions(starts, lengths, answer_ids)
    state = ScaledPass(prefix, question, positions, k_positions, alpha, sink, window, empty_heads)
    hidden = run_decoder(model, answer_ids, to_device(positions, answer_ids.device), state)
    if alpha.requires_grad and not hidden.requires_grad:  # no row had a middle: the gradient is zero, not an error
        hidden = hidden + 0.0 * alpha.sum()
    return hidden


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
