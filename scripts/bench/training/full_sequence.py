"""The plain form of a training step, to compare with: teacher and student over all tokens, with recomputation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from leank_train.forward.attention import Keys, scaled_attention
from leank_train.forward.hook import NAME, run_decoder
from leank_train.forward.visibility import visibility
from leank_train.objective import distill


class FullSequencePass:
    """Equation 1 over the whole sequence: causal attention for every row, then the answer rows again with alpha.

    The context rows do not depend on alpha, but they share the layer's output tensor with rows that do, so autograd
    goes through all of them. Prefilling once avoids this.
    """

    def __init__(self, length: int, answer: int, alpha: Tensor, sink: int, window: int, device: torch.device) -> None:
        self.longest, self.answer, self.alpha = length, answer, alpha
        at = torch.arange(length, device=device)[None]
        self.zones = [visibility(at[:, -answer:], at, zone, sink, window) for zone in ("dense", "middle")]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer, [B, H, S, D]: causal for all rows, scaled by alpha for the answer's."""
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        rows = scaled_attention(q[:, :, -self.answer :], [Keys(k, v, *self.zones)], self.alpha[layer], scale, "zero")
        return torch.cat([out[:, :, : -self.answer], rows], 2)


def full_sequence(model: PreTrainedModel, ids: Tensor, answer: int, alpha: Tensor, sink: int, window: int) -> Tensor:
    """Loss of the plain form on ids [1, S], whose last `answer` tokens are the answer; alpha gets its gradient."""
    at = torch.arange(ids.shape[1], device=ids.device)[None]
    ones = torch.ones_like(alpha)
    with torch.no_grad():
        state = FullSequencePass(ids.shape[1], answer, ones, sink, window, ids.device)
        full = run_decoder(model, ids, at, state)[:, -answer:]
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)  # also while the backward pass recomputes
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    state = FullSequencePass(ids.shape[1], answer, alpha, sink, window, ids.device)
    scaled = run_decoder(model, ids, at, state)[:, -answer:]
    loss = distill.l2_loss(full, scaled, torch.tensor([answer]), "official")
    distill.backward(loss)
    model.gradient_checkpointing_disable()
    model.set_attn_implementation(before)
    model.eval()
    return loss.detach()
