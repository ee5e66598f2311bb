"""The output head of a decoder, and the divergence of the next-token distributions that it gives."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from leank.kernels import HALF

# logits of one model in one chunk of answer tokens, about 40 bytes each; on a CPU each chunk casts W anew
LOGITS_AT_ONCE = {"cpu": 2**23, "cuda": 2**24}
WORDS_AT_ONCE = 8192  # rows of a half-precision head that are cast to float32 at a time, on a CPU
PROBE_ERROR = 0.05  # of the largest logit: a half-precision model rounds, a missing scale or cap is far beyond
FLOAT16_FACTOR = 4096.0


@dataclass(frozen=True, eq=False)
class Head:
    """The output head of a decoder: logits = cap * tanh(z / cap) with z = multiplier * (W h + b)."""

    weight: Tensor  # W [vocabulary, hidden], on the device of the hidden states
    bias: Tensor | None = None  # b [vocabulary], or None
    multiplier: float = 1.0  # factor of the logits (1 / logits_scaling of Granite, logit_scale of Cohere)
    cap: float | None = None  # final_logit_softcapping of Gemma 2, or None

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
        """Return the gradient of hidden states [rows, hidden]; d_logits, logits: [rows, vocabulary]."""
        if self.cap is not None:
            d_logits = d_logits * (1 - (logits / self.cap).square())
        factor = FLOAT16_FACTOR if self.weight.dtype == torch.float16 else 1.0  # most words' gradients are tiny
        return _product(d_logits * factor, self.weight) * (self.multiplier / factor)


def check_head(model: PreTrainedModel) -> None:
    """Raise ValueError if `Head` gives other logits than the model for two given hidden states, one of them large."""
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
