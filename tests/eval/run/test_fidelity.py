"""Every method reads the same tokens as it would decode them, and is compared with the dense model there."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from leank.eval.benchmarks.base import Row
from leank.eval.cache import CompressedLayer
from leank.eval.inference import decode
from leank.eval.inference.prefill import pad_left
from leank.eval.inference.prompts import Prompt
from leank.eval.inference.sampling import GREEDY, Sampling
from leank.eval.methods import Method
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.channels.leank import LeanK
from leank.eval.methods.prefill.gemfilter import GemFilter
from leank.eval.methods.reads.quest import Quest
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.lethe import Lethe
from leank.eval.run.fidelity import compare
from leank.eval.run.replay import Replay, Settings
from leank.head import Head
from leank.mask import ChannelMask
from leank.shape import kv_shape
from leank.versions import CACHE
from tests.helpers.cache_oracle import random_keep, tiny_model
from tests.helpers.replay_tools import SIZES, Letters, methods, prompts
from tests.helpers.thinned import thinned

NEW = 14


def every():
    """Methods of every axis, those that evict or choose while decoding among them."""
    return [
        *methods(),
        Method("h2o", tokens=H2O(12), **SIZES),
        Method("lethe", tokens=Lethe(sparse_ratio=2.0, evict_at=12, segments=4), **SIZES),
        Method("kivi", bits=KIVI(bits=2, group=4), **SIZES),
        Method("quest", reads=Quest(budget=16, page=4), **SIZES),
        Method("gemfilter", prefill=GemFilter(layer=0, budget=20), **SIZES),
    ]


def rows(count, **settings):
    return [Row("t", str(i), "c", "q", ("x",), NEW, "ruler_all", **settings) for i in range(count)]


def replayed(model, ids, made=None, chosen=None, question=None, **settings):
    engine = Replay(model, Letters(), Settings(**settings))
    cuts = [len(i) - 5 if question is None else question for i in ids]
    asked = [Prompt(i, cut) for i, cut in zip(ids, cuts, strict=True)]
    return {m.label: a for m, a in engine.answers(asked, made or rows(len(ids)), chosen or every())}


def read_one_by_one(model, cache, ids, real):
    """The slow form of decode.read: a call of the model for each token."""
    start = cache.get_seq_length()
    masks = [None if real is None else real[:, : start + i + 1] for i in range(ids.shape[1])]
    return torch.cat([decode.states(model, cache, ids[:, i : i + 1], mask) for i, mask in enumerate(masks)], 1)


@pytest.mark.parametrize(("family", "lengths"), thinned([("llama", [31, 12, 40]), ("qwen3", [40])]), ids=str)
def test_several_tokens_at_once_give_what_token_by_token_gives(family, lengths):
    """In float64, so that only the order of additions differs."""
    model, ids = tiny_model(family), prompts(lengths)
    padded, real = pad_left(ids, 0, "cpu")
    follow = torch.tensor(prompts([23] * len(ids), seed=3))
    for method in every():
        found = []
        for read in (decode.read, read_one_by_one):
            prompt = method.run_prefill(model, padded, real, 23)
            more = torch.ones_like(follow, dtype=torch.bool)
            mask = None if prompt.real is None else torch.cat([prompt.real, more], 1)
            found.append(read(model, method.cache(model, prompt), follow, mask))
        cache, ended = method.cache(model, prompt), []
        decoded, stepped = decode.read_as_decoded(model, cache, follow, prompt.real, prompt.lengths, 7, ended.append)
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[0], decoded, rtol=1e-9, atol=1e-9)
        assert (ended, stepped) == ([7, 14, 21, 23], False)


def test_the_fast_form_takes_fewer_passes_except_where_single_steps_count(monkeypatch):
    model, ids = tiny_model("llama"), torch.tensor(prompts([40]))
    follow, passes = torch.tensor(prompts([24])), {}
    whole = CompressedLayer._pass
    for method in every():
        widths = []
        monkeypatch.setattr(CompressedLayer, "_pass", lambda *a, w=widths: (w.append(a[2].shape[2]), whole(*a))[1])
        decode.read(model, method.cache(model, method.run_prefill(model, ids, None, 24)), follow, None)
        passes[method.label] = widths
    layers = model.config.num_hidden_layers
    assert passes["lethe"] == [1] * 24 * layers
    assert passes["dense"] == []
    assert passes["leank"] == passes["quest"] == passes["h2o"] == [4] * 6 * layers  # flush 4: moves after 4, 8, ...


def test_long_texts_are_read_in_parts(monkeypatch):
    model, method = tiny_model("llama"), every()[1]
    passed = method.run_prefill(model, torch.tensor(prompts([40])), None, 24)
    follow, found = torch.tensor(prompts([24])), []
    for limit in (24, 7):
        monkeypatch.setattr(decode, "AT_ONCE", limit)
        found.append(decode.read(model, method.cache(model, passed), follow, None))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("compress", "lengths"),
    thinned([(c, n) for c in ("after_question", "before_question") for n in ([40], [40, 29, 33])], keep=(1, 2)),
    ids=str,
)
def test_a_method_agrees_everywhere_if_and_only_if_it_writes_the_same_reply(compress, lengths):
    found = replayed(tiny_model("llama"), prompts(lengths), fidelity=NEW, compress=compress)
    different = 0
    for label, answers in found.items():
        for mine, dense in zip(answers, found["dense"], strict=True):
            first = compress == "before_question"
            assert mine.fidelity["tokens"] == NEW + first
            if label == "dense":
                assert (mine.fidelity["kl"], mine.fidelity["top1"]) == (0, 1)
            # the last distribution decides a token behind the reply, and a prefill of its own the first one
            if mine.fidelity["top1"] == 1 and label != "gemfilter":
                assert mine.tokens == dense.tokens
            if mine.tokens != dense.tokens:
                different += 1
                assert mine.fidelity["kl"] > 0
                assert mine.fidelity["top1"] < 1 or label == "gemfilter"
    assert different >= 3


@torch.no_grad()
@pytest.mark.parametrize("lengths", thinned([[31, 17, 40], [40]]), ids=str)
def test_the_figures_of_a_reply_are_those_of_decoding_by_hand(lengths):
    """Each row alone, each token alone, logits of the whole model; replies of a batch differ in length."""
    model, ids = tiny_model("qwen2"), prompts(lengths)
    made = [replace(row, max_new_tokens=9 - 3 * i) for i, row in enumerate(rows(len(ids)))]
    found = replayed(model, ids, made, fidelity=8)
    for method in every():
        for row, prompt in enumerate(ids):
            most = min(8, 9 - 3 * row)
            reply, logits = found["dense"][row].tokens[:most], []
            for one in (Method("dense"), method):
                alone = one.run_prefill(model, torch.tensor([prompt]), None, most)
                cache = one.cache(model, alone)
                steps = [
                    model(torch.tensor([[token]]), **{CACHE: cache}, position_ids=alone.lengths[:, None] + i)
                    for i, token in enumerate(reply)
                ]  # fmt: skip
                logits.append(torch.cat([step.logits[0] for step in steps]).log_softmax(-1))
            p, q = logits
            got = found[method.label][row].fidelity
            assert got["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-6, abs=1e-9)
            assert got["top1"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())
            assert (got["tokens"], got["loss"], got["non_finite"]) == (most, None, None)


@torch.no_grad()
@pytest.mark.parametrize(
    ("lengths", "sampling"), [([40], GREEDY), ([31, 17, 40], Sampling(temperature=0.8))], ids=["greedy", "sampled"]
)
def test_figures_by_position_are_those_of_decoding_by_hand(lengths, sampling):
    """Each row alone, each token alone, dense without a cache; replies of a batch differ in length."""
    model, ids, block = tiny_model("qwen2"), prompts(lengths), 4
    made = [replace(row, max_new_tokens=11 - 3 * i) for i, row in enumerate(rows(len(ids)))]
    found = replayed(model, ids, made, by_position=block, sampling=sampling)
    for method in every():
        for row, prompt in enumerate(ids):
            answer = found[method.label][row]
            reply = answer.tokens
            assert reply == found["dense"][row].tokens
            assert len(reply) == 11 - 3 * row
            whole = model(torch.tensor([prompt + reply])).logits[0].log_softmax(-1)
            if sampling == GREEDY:
                assert reply == whole[len(prompt) - 1 : -1].argmax(-1).tolist()
            p = whole[len(prompt) :]
            alone = method.run_prefill(model, torch.tensor([prompt]), None, len(reply))
            cache, steps, held = method.cache(model, alone), [], []
            for place, token in enumerate(reply):
                at = alone.lengths[:, None] + place
                steps.append(model(torch.tensor([[token]]), **{CACHE: cache}, position_ids=at).logits[0])
                if (place + 1) % block == 0 or place + 1 == len(reply):
                    held.append(cache.memory().total if method.axes else 0)
            q = torch.cat(steps).log_softmax(-1)
            kl, same = (p.exp() * (p - q)).sum(-1), (p.argmax(-1) == q.argmax(-1)).double()
            along, parts = answer.fidelity["along"], range(0, len(reply), block)
            assert along["block"] == block
            assert along["kl"] == pytest.approx([float(kl[i : i + block].mean()) for i in parts], rel=1e-6, abs=1e-9)
            assert along["top1"] == [float(same[i : i + block].mean()) for i in parts]
            assert answer.fidelity["kl"] == pytest.approx(float(kl.mean()), rel=1e-6, abs=1e-9)
            assert answer.score == answer.fidelity["top1"] == float(same.mean())
            assert answer.fidelity["tokens"] == len(reply)
            assert len(along["seconds"]) == len(along["bytes"]) == len(parts)
            ends = [len(prompt) + min(i + block, len(reply)) for i in parts]
            if not method.axes:
                dense = [2 * 8 * end * math.prod(kv_shape(model.config)) for end in ends]
                assert along["bytes"] == along["planned"] == dense
                continue
            assert len(along["tables"]) == len(parts)
            known = [a - b for a, b in zip(along["bytes"], along["tables"], strict=True)]
            assert along["planned"] in (known, [None] * len(parts))
            if len(lengths) == 1:
                assert along["bytes"] == held


def test_a_reply_that_is_known_is_read_and_not_written_again():
    model, ids = tiny_model("llama"), prompts([40, 29])
    asked = [Prompt(i, len(i)) for i in ids]
    engine = Replay(model, Letters(), Settings(by_position=5))
    whole = {m.label: a for m, a in engine.answers(asked, rows(2), methods())}
    other = [5, 6, 7]
    for known in ([whole["dense"][0].tokens, None], [other, None], [other, other]):
        again = {m.label: a for m, a in engine.answers(asked, rows(2), methods()[1:3], known=known)}
        for row, reply in enumerate(known):
            for label, answers in again.items():
                assert answers[row].tokens == (whole["dense"][row].tokens if reply is None else reply)
                if answers[row].tokens == whole["dense"][row].tokens:
                    mine, then = (a[row].fidelity for a in (answers, whole[label]))
                    assert mine["along"]["kl"] == pytest.approx(then["along"]["kl"], rel=1e-9)
    with pytest.raises(ValueError, match="beyond the model's vocab_size"):
        list(engine.answers(asked, rows(2), methods(), known=[[10**6], None]))


def test_a_text_is_read_by_position_too():
    model, ids = tiny_model("llama"), prompts([44, 40])
    whole, steps = (replayed(model, ids, text_rows(2), question=20, by_position=n) for n in (0, 7))
    for label, answers in whole.items():
        for one, two in zip(answers, steps[label], strict=True):
            along = two.fidelity.pop("along")
            tokens = one.fidelity["tokens"]
            sizes = [min(7, tokens - start) for start in range(0, tokens, 7)]
            total = sum(kl * size for kl, size in zip(along["kl"], sizes, strict=True))
            assert total / tokens == pytest.approx(one.fidelity["kl"], rel=1e-9, abs=1e-9)
            for name, value in one.fidelity.items():
                assert two.fidelity[name] == (value if value is None else pytest.approx(value, rel=1e-9, abs=1e-9))
            assert one.score == two.score


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fidelity": 4}, "fidelity=4 beside by_position=8"),
        ({"compress": "before_question"}, "compress=before_question beside by_position=8"),
        ({"sampling": Sampling(temperature=1.0, replies=2)}, "sampling.replies=2 beside by_position=8"),
    ],
)
def test_what_by_position_excludes_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Settings(by_position=8, **given)
    engine = Replay(tiny_model("llama"), Letters(), Settings(by_position=8))
    with pytest.raises(ValueError, match="by_position=8: t has conversations"):
        list(engine.answers([Prompt([3] * 9, 5)] * 2, rows(2), methods(), turns=2))


def test_measuring_changes_no_reply_and_costs_no_time_of_the_reply():
    model, ids = tiny_model("llama"), prompts([40, 22])
    without, with_it = (replayed(model, ids, fidelity=n) for n in (0, 6))
    for label, answers in without.items():
        for a, b in zip(answers, with_it[label], strict=True):
            assert (a.tokens, a.bytes, a.middle_tokens, a.compressed, a.steps) == (
                b.tokens, b.bytes, b.middle_tokens, b.compressed, b.steps,
            )  # fmt: skip
            assert a.fidelity is None
            assert b.fidelity["tokens"] == 6


def test_methods_without_a_dense_pass_of_their_own_are_compared_with_one():
    model, ids = tiny_model("llama"), prompts([40, 33])
    alone, among = (replayed(model, ids, chosen=c, fidelity=5) for c in ([every()[-1]], every()))
    assert [a.fidelity for a in alone["gemfilter"]] == [a.fidelity for a in among["gemfilter"]]


def text_rows(count):
    return rows(count, read=True)


@torch.no_grad()
@pytest.mark.parametrize("batch", [[40], [44, 40, 31]], ids=str)
def test_a_text_is_read_behind_its_prefilled_beginning(batch):
    model, ids, cut = tiny_model("llama"), prompts(batch), 20
    found = replayed(model, ids, text_rows(len(ids)), question=cut)
    for row, prompt in enumerate(ids):
        whole = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        targets = torch.tensor(prompt[cut + 1 :])
        loss = -whole[cut:-1].gather(-1, targets[:, None]).mean()
        dense = found["dense"][row]
        assert dense.fidelity["loss"] == dense.fidelity["dense_loss"] == pytest.approx(float(loss))
        assert dense.fidelity["tokens"] == len(prompt) - cut - 1
        assert dense.score == float((whole[cut:-1].argmax(-1) == targets).double().mean())
        for answers in found.values():
            assert answers[row].fidelity["dense_loss"] == pytest.approx(float(loss))
            assert (answers[row].text, answers[row].dense_only) == ("", False)
        assert found["leank"][row].compressed
        assert found["leank"][row].fidelity["kl"] > 0


def test_logits_that_are_not_finite_are_said_so(monkeypatch):
    model, ids = tiny_model("llama"), prompts([40, 40])
    broken = Method("broken", LeanK(ChannelMask(random_keep(0))), **SIZES)
    made = Method.cache

    def cache(self, *given):
        found = made(self, *given)
        if self.label == "broken":
            found.layers[0].store.sink_v[1] = torch.nan
        return found

    monkeypatch.setattr(Method, "cache", cache)
    whole, nan = replayed(model, ids, chosen=[broken], fidelity=4)["broken"]
    assert whole.fidelity["non_finite"] is None
    assert nan.fidelity == {
        "tokens": 4, "kl": None, "top1": None, "loss": None, "dense_loss": None, "non_finite": 0,
    }  # fmt: skip
    _, nan = replayed(model, ids, text_rows(2), [broken], question=20)["broken"]
    assert (nan.non_finite, nan.score) == (0, None)


def test_a_head_that_is_not_known_is_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model.lm_head), "forward", lambda self, x: x @ self.weight.mT * 3)
    with pytest.raises(ValueError, match="compared with dense by KL"):
        replayed(model, prompts([40]), fidelity=4)


WORDS, HIDDEN = 37, 6


def drawn_states(seed, tokens, scale, dtype):
    draw = torch.Generator().manual_seed(seed)
    head = Head(torch.randn(WORDS, HIDDEN, generator=draw, dtype=dtype), multiplier=0.5, cap=30.0)
    hidden = [scale * torch.randn(tokens, HIDDEN, generator=draw, dtype=dtype) for _ in range(2)]
    return head, *hidden, torch.randint(WORDS, (tokens,), generator=draw)


@hypothesis_settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**30), st.integers(1, 9), st.floats(0.01, 20), st.integers(1, 10), st.booleans())
def test_figures_are_those_of_torch_in_float64(seed, tokens, scale, chunk, single):
    dtype = torch.float32 if single else torch.float64
    head, dense, method, targets = drawn_states(seed, tokens, scale, dtype)
    found = compare(head, dense, method, targets, chunk)
    p, q = (head.logits(x).double().log_softmax(-1) for x in (dense, method))
    close = {"rtol": 1e-3, "atol": 1e-4} if single else {"rtol": 1e-9, "atol": 1e-9}
    wanted = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found["kl"], wanted, **close)
    torch.testing.assert_close(found["loss"], F.nll_loss(q, targets, reduction="none"), **close)
    torch.testing.assert_close(found["dense_loss"], F.nll_loss(p, targets, reduction="none"), **close)
    assert torch.equal(found["top1"], (p.argmax(-1) == q.argmax(-1)).double())
    assert torch.equal(found["right"], (q.argmax(-1) == targets).double())
    assert (found["kl"] >= 0).all()
    assert not compare(head, dense, dense, None, chunk)["kl"].any()


def test_a_token_whose_logits_are_not_finite_has_no_divergence():
    head, dense, method, _ = drawn_states(0, 5, 1.0, torch.float32)
    head = Head(head.weight)
    method[3] = torch.nan
    dense[1, 0] = torch.inf
    assert compare(head, dense, method)["kl"].isnan().tolist() == [False, True, False, True, False]
    assert "loss" not in compare(head, dense, method)
