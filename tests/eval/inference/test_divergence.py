"""The figures of two next-token distributions are those of the formulas, computed by torch in float64."""

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.run.fidelity import compare
from leank.head import Head

WORDS, HIDDEN = 37, 6


def states(seed, tokens, scale, dtype):
    draw = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(WORDS, HIDDEN, generator=draw, dtype=dtype), multiplier=0.5, cap=30.0)
    hidden = [scale * torch.randn(tokens, HIDDEN, generator=draw, dtype=dtype) for _ in range(2)]
    return head, *hidden, torch.randint(WORDS, (tokens,), generator=draw)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**30), st.integers(1, 9), st.floats(0.01, 20), st.integers(1, 10), st.booleans())
def test_figures_are_those_of_torch_in_float64(seed, tokens, scale, chunk, single):
    dtype = torch.float32 if single else torch.float64
    head, dense, method, targets = states(seed, tokens, scale, dtype)
    found = compare(head, dense, method, targets, chunk)
    p, q = (head.logits(x).double().log_softmax(-1) for x in (dense, method))
    close = {"rtol": 1e-3, "atol": 1e-4} if single else {"rtol": 1e-9, "atol": 1e-9}
    wanted = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found.kl, wanted, **close)
    torch.testing.assert_close(found.loss, F.nll_loss(q, targets, reduction="none"), **close)
    torch.testing.assert_close(found.dense_loss, F.nll_loss(p, targets, reduction="none"), **close)
    assert torch.equal(found.same, (p.argmax(-1) == q.argmax(-1)).double())
    assert torch.equal(found.right, (q.argmax(-1) == targets).double())
    assert (found.kl >= 0).all()
    assert not compare(head, dense, dense, None, chunk).kl.any()


def test_a_token_whose_logits_are_not_finite_has_no_divergence():
    head, dense, method, _ = states(0, 5, 1.0, torch.float32)
    head = Head(head.weight)
    method[3] = torch.nan
    dense[1, 0] = torch.inf
    assert compare(head, dense, method).kl.isnan().tolist() == [False, True, False, True, False]
    assert compare(head, dense, method).loss is None
