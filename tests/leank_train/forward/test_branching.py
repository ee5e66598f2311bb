"""Prefill once against the plain full-sequence form of Eq. 1: values, gradients, what a cache decodes, refusals."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from leank.eval.cache import compressed_cache
from leank.mask import ChannelMask
from leank_train.forward.branching import branch, prefill, student
from leank_train.objective.distill import answer_rows
from leank_train.objective.l2 import L2
from tests.conftest import tiny_model
from tests.helpers.branches import ANSWERS, DOCUMENTS, QUESTIONS, batch, pad, scores
from tests.helpers.families import build
from tests.oracles.plain_forward import plain_forward

ZONES = {
    "usual": (3, 6),
    "window shorter than question + answer": (2, 2),
    "window reaches over the question": (4, 11),
    "no sink, self only": (0, 1),
    "sink past the document": (30, 1),
    "prompt shorter than sink + window": (8, 30),
    "window slides past the document's end": (1, 5),
}


@pytest.fixture(scope="module")
def model():
    """One architecture: objective/test_plain_form.py goes through all families."""
    return tiny_model("llama")


def rows(hidden, lengths):
    return torch.cat([h[:n] for h, n in zip(hidden, lengths, strict=True)])


@pytest.mark.parametrize("empty_heads", ["drop", "zero"])
@pytest.mark.parametrize("zone", ZONES)
def test_loss_and_gradient_equal_the_plain_form(model, zone, empty_heads):
    sink, window = ZONES[zone]
    settings = {"sink": sink, "window": window, "empty_heads": empty_heads}
    documents, questions, answers = batch()
    prefix = prefill(model, pad(documents), DOCUMENTS)
    both = [torch.cat(pair) for pair in zip(questions, answers, strict=True)]
    teacher = branch(model, prefix, pad(both), [len(x) for x in both])
    target = torch.cat([h[q : q + a] for h, q, a in zip(teacher.hidden, QUESTIONS, ANSWERS, strict=True)])
    alpha = scores()
    hidden = rows(student(model, prefix, teacher.cut(QUESTIONS), pad(answers), ANSWERS, alpha, **settings), ANSWERS)
    loss = (hidden - target).square().sum()
    (grad,) = torch.autograd.grad(loss, alpha)

    plain_alpha = scores()
    wholes = [torch.cat([documents[r // 2], both[r]]) for r in range(4)]
    contexts = [DOCUMENTS[r // 2] + QUESTIONS[r] for r in range(4)]
    plain_target = torch.cat([plain_forward(model, x, n)[n:] for x, n in zip(wholes, contexts, strict=True)])
    plain = torch.cat(
        [plain_forward(model, x, n, plain_alpha, **settings)[n:] for x, n in zip(wholes, contexts, strict=True)]
    )
    plain_loss = (plain - plain_target).square().sum()
    (plain_grad,) = torch.autograd.grad(plain_loss, plain_alpha)

    torch.testing.assert_close(target, plain_target, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-8, atol=1e-12)
    assert (grad - plain_grad).norm() <= 1e-6 * plain_grad.norm() + 1e-12
    if zone == "usual":
        assert loss > 0.1  # the case is not an empty one
        assert grad[0, 1].abs().min() > 0  # the empty head is taught too


def test_centered_keys_give_pruned_channels_their_mean(model):
    """Eq. 1 with alpha k + (1 - alpha) mean, in the slow form: keys of the middle are rebuilt."""
    documents, questions, answers = batch()
    both = [torch.cat(pair) for pair in zip(questions, answers, strict=True)]
    alpha = scores().detach()
    mean = torch.randn(alpha.shape, dtype=alpha.dtype, generator=torch.Generator().manual_seed(3))
    prefix = prefill(model, pad(documents), DOCUMENTS)
    teacher = branch(model, prefix, pad(both), [len(x) for x in both])
    prefix = prefix.center_(mean)
    zones = {"sink": 3, "window": 6, "empty_heads": "zero"}
    hidden = rows(student(model, prefix, teacher.cut(QUESTIONS), pad(answers), ANSWERS, alpha, **zones), ANSWERS)
    plain = torch.cat(
        [
            plain_forward(model, torch.cat([documents[r // 2], both[r]]), n, alpha, mean=mean, **zones)[n:]
            for r in range(4)
            for n in [DOCUMENTS[r // 2] + QUESTIONS[r]]
        ]
    )
    torch.testing.assert_close(hidden, plain, rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="centered"):
        branch(model, prefix, pad(both), [len(x) for x in both])


def test_keys_are_not_centered_beside_sinks():
    """A softmax with sinks changes if all keys lose the same vector."""
    model, (documents, questions, answers) = build("gpt_oss"), batch()
    prefix = prefill(model, pad(documents), DOCUMENTS)
    question, zones = branch(model, prefix, pad(questions), QUESTIONS), {"sink": 3, "window": 6, "empty_heads": "zero"}
    with pytest.raises(ValueError, match=r"^pruning\.compensation=mean: this model's softmax has .*attention sinks"):
        student(model, prefix.center_(torch.ones(2, 2, 16)), question, pad(answers), ANSWERS, scores(16), **zones)


@pytest.mark.parametrize(
    ("device", "dtype", "error"),
    [
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 0.1),
        pytest.param("cuda", torch.float32, 1e-4, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 0.1, marks=pytest.mark.gpu),
    ],
)
def test_gradient_in_lower_precision(device, dtype, error):
    documents, questions, answers = batch()
    grads = []
    for kind, place in ((torch.float64, "cpu"), (dtype, device)):
        model = tiny_model("llama", initializer_range=0.15).to(place, kind)
        prefix = prefill(model, pad(documents).to(place), DOCUMENTS)
        question = branch(model, prefix, pad(questions).to(place), QUESTIONS)
        alpha = scores().detach().to(place, torch.float32).requires_grad_()
        zones = {"sink": 2, "window": 4, "empty_heads": "drop"}
        hidden = student(model, prefix, question, pad(answers).to(place), ANSWERS, alpha, **zones)
        assert hidden.dtype == kind
        weights = torch.arange(hidden.numel(), device=place).view(hidden.shape).cos()
        grads.append(torch.autograd.grad((hidden.double() * weights).sum(), alpha)[0].double().cpu())
    assert (grads[0] - grads[1]).norm() <= error * grads[0].norm()


@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu():
    """With lengths on the host, prefill, teacher, student and backward are all launched without a look at a result."""
    model, (documents, questions, answers) = tiny_model("llama").to("cuda", torch.bfloat16), batch()
    both = [torch.cat(pair) for pair in zip(questions, answers, strict=True)]
    document_ids, ids, answer_ids = (pad(x).cuda() for x in (documents, both, answers))
    alpha = scores().detach().float().cuda().requires_grad_()
    for mode in ("default", "error"):  # the first round loads kernels
        torch.cuda.set_sync_debug_mode(mode)
        try:
            prefix = prefill(model, document_ids, DOCUMENTS)
            teacher = branch(model, prefix, ids, [len(x) for x in both])
            full = answer_rows(teacher.hidden, torch.tensor(QUESTIONS), answer_ids.shape[1])
            prefix = prefix.center_(torch.ones(alpha.shape))
            zones = {"sink": 2, "window": 4, "empty_heads": "drop"}
            hidden = student(model, prefix, teacher.cut(QUESTIONS), answer_ids, ANSWERS, alpha, **zones)
            L2(None, "official").distance(full, hidden, torch.tensor(ANSWERS)).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert alpha.grad.isfinite().all()


def test_full_attention_is_the_models_own(model):
    documents, questions, _ = batch()
    prefix = prefill(model, pad(documents), DOCUMENTS)
    hidden = branch(model, prefix, pad(questions), QUESTIONS).hidden
    for r in range(4):
        whole = torch.cat([documents[r // 2], questions[r]])[None]
        torch.testing.assert_close(hidden[r, : QUESTIONS[r]], model.model(whole).last_hidden_state[0, -QUESTIONS[r] :])
    assert model.config._attn_implementation == "sdpa"  # the model's own choice is put back


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_a_compressed_cache_decodes_by_the_plain_form(family):
    """What is trained is what is deployed: greedy replies through the cache are those of Eq. 1 as written."""
    model, (documents, questions, _) = build(family), batch()
    mask = scores(16) > 0.4
    mask[1] |= family != "llama"  # a layer with a sliding window, which a cache leaves as it is
    room, zones = 12, {"sink": 2, "window": 5}  # Eq. 1 counts the token that reads its window, a cache does not
    for r in range(4):
        ids = context = torch.cat([documents[r // 2], questions[r]])
        cache = compressed_cache(model, ChannelMask(mask), sink=2, window=4, flush=1)
        found = model.generate(context[None], past_key_values=cache, max_new_tokens=room, eos_token_id=-1)
        for _ in range(room):
            hidden = plain_forward(model, ids, len(context), mask.double(), **zones, empty_heads="drop")
            ids = torch.cat([ids, model.lm_head(hidden[-1]).argmax()[None]])
        assert found[0].tolist() == ids.tolist()


def test_answers_keep_no_copy_of_the_document():
    """What is saved for backward does not grow with the document times anything: one reference to its K and V."""
    model = tiny_model("llama")
    sizes = []
    for length in (40, 200):
        prefix = prefill(model, torch.ones(1, length, dtype=torch.long), [length])
        question = branch(model, prefix, torch.ones(4, 3, dtype=torch.long), [3] * 4)
        shared = {x.data_ptr() for x in (*prefix.keys, *prefix.values)}
        saved = []  # holding them keeps their addresses apart
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            zones = {"sink": 2, "window": 4, "empty_heads": "drop"}
            student(model, prefix, question, torch.ones(4, 2, dtype=torch.long), [2] * 4, scores(), **zones)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        sizes.append(sum(size for pointer, size in storages.items() if pointer not in shared))
    assert sizes[0] == sizes[1]


def test_models_and_inputs_that_do_not_fit_are_named():
    ids = torch.ones(2, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="sliding_window=8"):
        prefill(tiny_model("mistral", sliding_window=8), ids, [9, 9])
    mistral = tiny_model("mistral", sliding_window=12)
    prefix = prefill(mistral, ids, [9, 9])
    branch(mistral, prefix, ids[:, :3], [3, 3])
    with pytest.raises(ValueError, match="sliding_window=12, but a sequence has 13"):
        branch(mistral, prefix, ids[:, :4], [3, 4])
    assert mistral.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="max_position_embeddings=8"):
        prefill(tiny_model("llama", max_position_embeddings=8), ids, [9, 9])
    with pytest.raises(ValueError, match="no rotary positions"):
        prefill(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)), ids, [9, 9])
    llama = tiny_model("llama")
    with pytest.raises(ValueError, match=r"lengths=\[9, 10\]"):
        prefill(llama, ids, [9, 10])
    prefix = prefill(llama, ids, [9, 9])
    with pytest.raises(ValueError, match="3 branches among 2 documents cannot be divided"):
        branch(llama, prefix, torch.ones(3, 2, dtype=torch.long), [2, 2, 2])
