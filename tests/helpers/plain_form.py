"""A plain form of the loss of Eq. 1, and a stage's loss and gradient compared with it.

It shares no code with leank_train: transformers runs the model on each question alone, an attention function of its
own scales the middle for answer rows, and the loss is taken from the model's logits.
"""

from types import SimpleNamespace

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from leank.shape import kv_shape
from leank_train.data import Batch, Ragged
from leank_train.stages import PruningConfig, Stage1, StageConfig

NAME, SINK, WINDOW = "plain_form", 3, 8


class Eq1:
    """What `attention` computes: Eq. 1 for the rows from `context` on, or the full attention if alpha is None."""

    alpha: torch.Tensor | None = None
    context = 0


def attention(module, q, k, v, attention_mask, scaling=None, **_):
    """Eq. 1 as it stands: every row beside every key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    row, column = torch.arange(k.shape[2])[:, None], torch.arange(k.shape[2])
    logits = q @ k.mT
    if Eq1.alpha is not None:
        alpha = Eq1.alpha[module.layer_idx].repeat_interleave(q.shape[1] // Eq1.alpha.shape[1], 0)
        middle = (row >= Eq1.context) & (column >= SINK) & (column <= row - WINDOW)
        logits = torch.where(middle, (q * alpha[:, None]) @ k.mT, logits)
    weights = (scaling * logits).masked_fill(column > row, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def plain_loss(model, batch, alpha, reduction):
    """The KL objective of a batch. Leaves the model with the plain attention."""
    model.set_attn_implementation(NAME)
    losses, tokens = [], 0
    for r, (ids, length) in enumerate(zip(batch.prompts.ids, batch.prompts.lengths, strict=True)):
        document = r * len(batch.documents.ids) // len(batch.prompts.ids)
        whole = torch.cat([batch.documents.ids[document, : batch.documents.lengths[document]], ids[:length]])
        Eq1.context = len(whole) - int(batch.answers.lengths[r])
        found = []
        for Eq1.alpha in (None, alpha):
            found.append(model(whole[None], use_cache=False).logits[0, Eq1.context :].log_softmax(-1))
        teacher, student = found
        losses.append((teacher.exp() * (teacher - student)).sum())
        tokens += len(whole) - Eq1.context
    return torch.stack(losses).sum() / (tokens if reduction == "official" else len(losses))


def batch(documents, questions, answers):
    """Random tokens of these numbers: B documents, and questions and answers of B * M branches."""
    generator = torch.Generator().manual_seed(0)

    def words(count):
        return torch.randint(3, 61, (count,), generator=generator).tolist()

    replies = [words(n) for n in answers]
    prompts = [words(n) + reply for n, reply in zip(questions, replies, strict=True)]
    return Batch(Ragged.of([words(n) for n in documents]), Ragged.of(prompts), Ragged.of(replies))


def compare(model, reduction="official"):
    """Two documents of other lengths with two questions each."""
    config = model.config.get_text_config(decoder=True)
    scores = torch.rand(kv_shape(config), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores[0, 0] = 0
    backbone = SimpleNamespace(model=model, shape=kv_shape(config))
    settings = StageConfig(9, 0.1, objective="kl", reduction=reduction)
    stage = Stage1(backbone, settings, PruningConfig(0.5, sink=SINK, window=WINDOW), scores)
    asked = batch([30, 25], [4, 2, 6, 3], [3, 5, 1, 4])  # shorter than the sliding windows
    loss = stage.distillation(asked)
    (gradient,) = torch.autograd.grad(loss, stage.alpha)
    leaf = scores.clone().requires_grad_()
    wanted = plain_loss(model, asked, leaf, reduction)
    (wanted_gradient,) = torch.autograd.grad(wanted, leaf)
    assert loss > 1e-6
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)  # norms of many models round to float32
    assert (gradient - wanted_gradient).norm() < 1e-3 * wanted_gradient.norm()
