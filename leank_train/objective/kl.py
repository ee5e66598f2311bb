"""The KL objective: the divergence of the student's next-token distributions from the teacher's at the answer tokens.

The paper's objective (`distill.l2_loss`) weighs all directions of hidden states alike. The model's output head W shows
which of them decide the next token, so this objective compares softmax(W h_full) with softmax(W h_scaled).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from leank_train.common.autograd import AutogradContext
from leank_train.forward.kernels import HALF
from leank_train.forward.prefix import to_device
from leank_train.objective.distill import FLOAT16_FACTOR, REDUCTIONS, counted

OBJECTIVES = ("l2", "kl")
LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}  # of one model in one chunk of answer tokens; each costs about 40 bytes
WORDS_AT_ONCE = 8192  # rows of a half-precision head that are cast to float32 at a time, on a CPU
PROBE_ERROR = 0.05  # of the largest logit: a half-precision model rounds, a missing scale or cap is far beyond


@dataclass(frozen=True, eq=False)
class Head:
    """The output head of a decoder: logits = cap * tanh(z / cap) with z = multiplier * (W h + b).

    weight: W [vocabulary, hidden], on the device of the hidden states.
    bias: b [vocabulary], or None.
    multiplier: factor of the logits (1 / logits_scaling of Granite, logit_scale of Cohere).
    cap: final_logit_softcapping of Gemma 2, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    multiplier: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """Return the head of a decoder; raise ValueError if it has none."""
        found, config = model.get_output_embeddings(), model.config
        if found is None or not isinstance(getattr(found, "weight", None), Tensor):
            raise ValueError(f"model={config.model_type} has no output head for objective=kl; use objective=l2")
        multiplier = getattr(config, "logit_scale", None) or 1.0
        multiplier /= getattr(config, "logits_scaling", None) or 1.0
        cap = getattr(config, "final_logit_softcapping", None)
        return cls(found.weight, getattr(found, "bias", None), float(multiplier), cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] of hidden states [rows, hidden], in float32 (float64 stays)."""
        z = _product(hidden, self.weight.mT)
        z = (z if self.bias is None else z + self.bias.to(z)) * self.multiplier
        return z if self.cap is None else self.cap * torch.tanh(z / self.cap)

    def pull_back(self, d_logits: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of hidden states [rows, hidden].

        d_logits, logits: [rows, vocabulary], gradient and values of the logits.
        """
        if self.cap is not None:
            d_logits = d_logits * (1 - (logits / self.cap).square())
        factor = FLOAT16_FACTOR if self.weight.dtype == torch.float16 else 1.0  # most words' gradients are tiny
        return _product(d_logits * factor, self.weight) * (self.multiplier / factor)


def check_head(model: PreTrainedModel) -> None:
    """Raise ValueError if `Head` gives other logits than the model itself.

    The model's own forward pass runs on two given hidden states, one of them large, instead of its decoder's.
    """
    head, config = Head.of(model), model.config
    device = head.weight.device
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, head.weight.shape[1], generator=generator) * torch.tensor([[1.0], [30.0]])
    hidden = hidden.to(device, head.weight.dtype)
    probe = copy.copy(model)
    probe._modules = {**model._modules, model.base_model_prefix: _Fixed(hidden)}
    with torch.no_grad():
        wanted = probe(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False).logits[0].float()
        error = (head.logits(hidden[0]).float() - wanted).abs().amax(-1)
    if not (error <= PROBE_ERROR * wanted.abs().amax(-1)).all():
        raise ValueError(
            f"model={config.model_type} does more to its logits than objective=kl knows of "
            f"(they differ by {error.max().item():.3g}); use objective=l2"
        )


class _Fixed(torch.nn.Module):
    """A decoder that returns the same hidden states whatever it is given."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: object, **kwargs: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of each row, in nats, from the logarithms of distributions p and q, [rows, vocabulary].

    It is never negative. sum of (q - p) = 0 is added to the sum of p (log p - log q), so that no large terms cancel
    where p and q are near: rounding is of second order in their distance, as KL is.
    """
    gap = q - p
    terms = torch.where(gap < 1, p.exp() * (gap.expm1() - gap), q.exp() - p.exp() * (1 + gap))
    return terms.sum(-1).clamp(min=0)


def kl_loss(
    head: Head, full: Tensor, scaled: Tensor, lengths: Tensor, reduction: str = "official", chunk: int | None = None
) -> Tensor:
    """Return KL(softmax(W h_full) || softmax(W h_scaled)) at the answer tokens, computed in float32 (float64 stays).

    head: the model's output head.
    full, scaled: [R, N, hidden], hidden states of teacher and student; only `scaled` gets a gradient.
    lengths: [R], on the host, answer tokens of each sequence.
    reduction: "official" is the mean over all answer tokens, "paper" their sum over the number of sequences R.
    chunk: answer tokens whose logits are held at a time; LOGITS_AT_ONCE decides by default.

    Raises ValueError for an unknown reduction, or an answer without tokens.
    """
    if chunk is None:
        chunk = max(1, LOGITS_AT_ONCE["cuda" if full.is_cuda else "cpu"] // head.weight.shape[0])
    rows, share = _rows(full, lengths, reduction)
    return _KL.apply(scaled.flatten(0, 1)[rows], full.flatten(0, 1)[rows], head, chunk) * share


def kl_loss_reference(
    head: Head, full: Tensor, scaled: Tensor, lengths: Tensor, reduction: str = "official", chunk: int | None = None
) -> Tensor:
    """Compute `kl_loss` with all logits at once and by autograd, as its tests' oracle; `chunk` has no effect."""
    rows, share = _rows(full, lengths, reduction)
    teacher, student = (head.logits(x.flatten(0, 1)[rows]).log_softmax(-1) for x in (full.detach(), scaled))
    return F.kl_div(student, teacher, reduction="sum", log_target=True) * share


def _rows(hidden: Tensor, lengths: Tensor, reduction: str) -> tuple[Tensor, float]:
    """Return the indices of answer tokens among R * N, on the device of `hidden`, and the factor of their sum."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is unknown; use official or paper")
    rows = counted(lengths, hidden.shape[1]).flatten().nonzero().squeeze(1)
    return to_device(rows, hidden.device), 1 / (len(rows) if reduction == "official" else len(lengths))


class _Context(AutogradContext, Protocol):
    dtype: torch.dtype


class _KL(torch.autograd.Function):
    """The sum over rows; d logits = softmax(student) - softmax(teacher) is pulled back at once: no logits are kept."""

    @staticmethod
    def forward(ctx: _Context, scaled: Tensor, full: Tensor, head: Head, chunk: int) -> Tensor:
        total, gradients = [], []
        for full_rows, scaled_rows in zip(full.split(chunk), scaled.split(chunk), strict=True):
            logits = head.logits(scaled_rows)
            student = logits.log_softmax(-1)
            teacher = head.logits(full_rows).log_softmax(-1)
            total.append(divergence(teacher, student).sum())
            if ctx.needs_input_grad[0]:
                gradients.append(head.pull_back(student.exp_().sub_(teacher.exp_()), logits))
        ctx.dtype = scaled.dtype
        ctx.save_for_backward(*([torch.cat(gradients)] if gradients else []))
        return torch.stack(total).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, d_total: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * d_total).to(ctx.dtype), None, None, None


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [rows, m] @ b [m, n] in at least float32, without a float32 copy of all of b, a view of the head."""
    if b.is_cuda and b.dtype in HALF:
        return torch.mm(a.to(b.dtype), b, out_dtype=torch.float32)
    dtype = torch.promote_types(b.dtype, torch.float32)
    a = a.to(dtype)
    if b.dtype == dtype:
        return a @ b
    if b.is_contiguous():  # W: words are rows of b, over which is summed
        parts = zip(a.split(WORDS_AT_ONCE, 1), b.split(WORDS_AT_ONCE), strict=True)
        return torch.stack([x @ y.to(dtype) for x, y in parts]).sum(0)
    return torch.cat([a @ y.to(dtype) for y in b.split(WORDS_AT_ONCE, 1)], 1)
