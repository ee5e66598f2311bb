"""A stage's loss and gradient compared with a plain form: of each question alone, from the logits of one pass."""

from types import SimpleNamespace

import torch

from leank.shape import kv_shape
from leank_train.data import Batch, Ragged
from leank_train.recipes.paper import Stage1, Stage1Config
from leank_train.recipes.recipe import MaskPruning
from tests.oracles.plain_forward import Form, plain

SINK, WINDOW = 3, 8


def plain_loss(model, batch, alpha, reduction):
    """The KL objective of a batch."""
    losses, tokens = [], 0
    for r, (ids, length) in enumerate(zip(batch.prompts.ids, batch.prompts.lengths, strict=True)):
        document = r * len(batch.documents.ids) // len(batch.prompts.ids)
        whole = torch.cat([batch.documents.ids[document, : batch.documents.lengths[document]], ids[:length]])
        context, found = len(whole) - int(batch.answers.lengths[r]), []
        for form in (Form(context), Form(context, alpha, SINK, WINDOW)):
            with plain(model, form):
                found.append(model(whole[None], use_cache=False).logits[0, context:].log_softmax(-1))
        teacher, student = found
        losses.append((teacher.exp() * (teacher - student)).sum())
        tokens += len(whole) - context
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
    settings = Stage1Config(9, 0.1, objective="kl", reduction=reduction)
    stage = Stage1(backbone, settings, MaskPruning(ratio=0.5, sink=SINK, window=WINDOW), scores)
    asked = batch([30, 25], [4, 2, 6, 3], [3, 5, 1, 4])  # shorter than the sliding windows
    loss = stage.distillation(asked)
    (gradient,) = torch.autograd.grad(loss, stage.alpha)
    leaf = scores.clone().requires_grad_()
    wanted = plain_loss(model, asked, leaf, reduction)
    (wanted_gradient,) = torch.autograd.grad(wanted, leaf)
    assert loss > 1e-6
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0)  # norms of many models round to float32
    assert (gradient - wanted_gradient).norm() < 1e-3 * wanted_gradient.norm()
