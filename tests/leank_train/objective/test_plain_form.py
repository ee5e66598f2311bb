"""A stage's loss and gradient against the plain form: each question alone, whole sequences, the model's logits."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto import CONFIG_MAPPING

from leank.shape import kv_shape
from leank_train.data import Batch, Ragged
from leank_train.objective import kl
from leank_train.stages import PruningConfig, Stage1, StageConfig

NAME, SINK, WINDOW = "plain_form", 4, 20
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.3, "max_position_embeddings": 256,
}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 2}
FAMILIES = {
    "llama": {}, "gemma3_text": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, **FULL},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "cohere": {"logit_scale": 0.0625}, "cohere2": {"logit_scale": 0.25, **FULL}, "phi": {},
}  # fmt: skip


class Eq1:
    """What `attention` computes: Eq. 1 for the rows from `context` on, or the full attention if alpha is None."""

    alpha: torch.Tensor | None = None
    context = 0


def attention(module, q, k, v, mask, scaling=None, **_):
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


@pytest.mark.parametrize(("reduction", "at_once"), [("official", None), ("paper", 3 * 61)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_minimises_the_plain_form(monkeypatch, name, reduction, at_once):
    """Two documents of other lengths with two questions each; answers that chunks of three tokens cut."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{**SIZES, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)
    if at_once:
        monkeypatch.setitem(kl.LOGITS_AT_ONCE, "cpu", at_once)
    scores = torch.rand(kv_shape(config), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores[0, 0] = 0
    backbone = SimpleNamespace(model=model, shape=kv_shape(config))
    settings = StageConfig(9, 0.1, objective="kl", reduction=reduction)
    stage = Stage1(backbone, settings, PruningConfig(0.5, sink=SINK, window=WINDOW), scores)
    asked = batch([120, 97], [9, 7, 12, 8], [3, 5, 1, 4])
    loss = stage.distillation(asked)
    (gradient,) = torch.autograd.grad(loss, stage.alpha)
    leaf = scores.clone().requires_grad_()
    wanted = plain_loss(model, asked, leaf, reduction)
    (wanted_gradient,) = torch.autograd.grad(wanted, leaf)
    assert loss > 1e-4
    torch.testing.assert_close(loss, wanted, rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-7, atol=1e-12)
