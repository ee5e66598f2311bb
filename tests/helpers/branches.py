"""A small batch of documents, questions and answers of uneven lengths, and a step on it, for tests of branches."""

import torch

from leank.shape import kv_shape
from leank_train.forward.branching import branch, student
from leank_train.forward.stored import stored_student

DOCUMENTS, QUESTIONS, ANSWERS = [23, 17], [4, 7, 1, 5], [3, 1, 5, 2]  # two branches per document, uneven


def pad(rows):
    """Token ids [rows, longest], padded on the right with 7."""
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True, padding_value=7)


def tokens(lengths, seed):
    """Random rows of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 50, (n,), generator=generator) for n in lengths]


def batch():
    """The tokens of documents, questions and answers."""
    return tokens(DOCUMENTS, 1), tokens(QUESTIONS, 2), tokens(ANSWERS, 3)


def scores(dim=8):
    """Random alpha [L, H, D] with an empty head in layer 0, by default of `tests.conftest.tiny_model`."""
    alpha = torch.rand(2, 2, dim, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    alpha[0, 1] = 0  # an empty head
    alpha[1, 0, :4] = 0
    return alpha.requires_grad_()


def widths(dim=8):
    """Random widths [L, H, D + 2] of a layout that is being learned, off the grid, with a head that fades."""
    found = 0.1 + 9 * torch.rand(2, 2, dim + 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found[..., -2:-1] += 2
    found[..., -1] = 1
    found[0, 1, -1] = 0.4
    return found.requires_grad_()


def step(model, prefix, sink, window, empty_heads, layout=False):
    """What training takes from a prefix: the teacher's rows, the student's, and the gradient.

    layout: whether the student reads a layout of bits.
    """
    _, questions, answers = batch()
    both = [torch.cat(pair) for pair in zip(questions, answers, strict=True)]
    teacher = branch(model, prefix, pad(both), [len(x) for x in both])
    question, alpha = teacher.cut(QUESTIONS), (widths if layout else scores)(kv_shape(model.config).head_dim)
    zones, run = {"sink": sink, "window": window}, stored_student if layout else student
    hidden = run(model, prefix, question, pad(answers), ANSWERS, alpha, **zones, empty_heads=empty_heads)
    seen = torch.arange(hidden.shape[1]) < torch.tensor(ANSWERS)[:, None]
    loss = (hidden[seen] * torch.arange(hidden[seen].numel()).view(hidden[seen].shape).cos()).sum()
    (gradient,) = torch.autograd.grad(loss, alpha)
    return [teacher.hidden, hidden.detach(), gradient]
