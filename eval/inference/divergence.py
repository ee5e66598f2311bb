"""How far a method's next-token distributions are from the dense model's, after tokens that both have read alike.

Recall near 100 hides differences between methods; these figures do not saturate. At a token after which the dense model
predicts p and the method q, both over all words w of the vocabulary:

    KL(p || q) = sum over w of p_w (log p_w - log q_w), in nats, and zero only where the two are equal
    top-1 agreement: whether argmax p = argmax q
    loss: -log q of the token that the text goes on with; its exponential is the perplexity
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leank.head import LOGITS_AT_ONCE, Head, divergence


@dataclass(frozen=True)
class Divergence:
    """Figures of n tokens, each a float64 tensor [n] on the host.

    kl: nats; NaN where logits are not finite.
    same: 1 where dense and method have the same likeliest token, else 0.
    loss, dense_loss: nats, and right: 1 where the method's likeliest token is the text's; None without a text.
    """

    kl: Tensor
    same: Tensor
    loss: Tensor | None = None
    dense_loss: Tensor | None = None
    right: Tensor | None = None


@torch.no_grad()
def compare(
    head: Head, dense: Tensor, method: Tensor, targets: Tensor | None = None, chunk: int | None = None
) -> Divergence:
    """Compare the distributions that two runs predict after the same n tokens, in float32 (float64 stays).

    head: the model's output head.
    dense, method: [n, hidden], hidden states of the decoder after each token.
    targets: int [n], the token that the text goes on with; None without a text.
    chunk: tokens whose logits are held at a time; `LOGITS_AT_ONCE` decides by default.
    """
    if chunk is None:
        chunk = max(1, LOGITS_AT_ONCE["cuda" if dense.is_cuda else "cpu"] // head.weight.shape[0])
    texts = [None] * -(-len(dense) // chunk) if targets is None else targets.split(chunk)
    found = [
        torch.stack(_chunk(head.logits(p), head.logits(q), text))
        for p, q, text in zip(dense.split(chunk), method.split(chunk), texts, strict=True)
    ]
    return Divergence(*torch.cat(found, 1).double().cpu())


def _chunk(dense: Tensor, method: Tensor, targets: Tensor | None) -> list[Tensor]:
    """The fields of `Divergence` for logits [n, vocabulary]."""
    p, q = dense.log_softmax(-1), method.log_softmax(-1)
    kl = divergence(p, q)  # NaN where the largest logit of either is NaN or infinite
    found = [kl, (p.argmax(-1) == q.argmax(-1)).to(kl)]
    if targets is not None:
        losses = [-x.gather(-1, targets[:, None]).squeeze(-1) for x in (q, p)]
        found += [*losses, (q.argmax(-1) == targets).to(kl)]
    return found
