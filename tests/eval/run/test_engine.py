"""One dense pass and N short decodes give the tokens of N separate generate() calls."""

import gc

import pytest
import torch

from leank.eval.inference.decode import greedy
from leank.eval.inference.prefill import pad_left, prefill
from leank.eval.inference.prompts import Prompt
from leank.eval.methods import Method
from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from tests.helpers.cache_oracle import FAMILIES, tiny_model
from tests.helpers.replay_tools import NEW, SIZES, Letters, alone, methods, prompts, rows


class Encoding(Letters):
    """One that encodes, too."""

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}


def replay_tokens(model, ids, question=None, new_tokens=NEW, **settings):
    engine = Replay(model, Letters(), Settings(**settings))
    made = [Prompt(i, len(i) - 3 if question is None else question) for i in ids]
    return {
        m.label: [a.tokens for a in answers]
        for m, answers in engine.answers(made, rows(len(ids), new_tokens), methods())
    }


@pytest.mark.parametrize(
    ("family", "lengths", "chunk"),
    [*((family, [31, 7, 40], None) for family in sorted(FAMILIES)), ("llama", [40, 40], None), ("qwen3", [31, 40], 7)],
)
def test_tokens_are_those_of_separate_runs(family, lengths, chunk):
    model, ids = tiny_model(family), prompts(lengths)
    got = replay_tokens(model, ids, prefill_chunk=chunk)
    different = 0
    for method in methods():
        for row, prompt in enumerate(ids):
            dense = prefill(model, torch.tensor([prompt]), None, 0, method.obs_queries)
            assert got[method.label][row] == alone(model, method, prompt, NEW, dense)
        different += got[method.label] != got["dense"]
    assert different >= 3  # else the test would not notice a method that does nothing
    assert len({tuple(answer[0] for answer in answers) for answers in got.values()}) == 1  # dense's first tokens


def test_end_of_text_ends_a_row_and_min_new_tokens_holds_it_off():
    model, (ids,) = tiny_model("llama"), prompts([40])
    free = alone(model, Method("dense"), ids, NEW, None)
    eos = free[5]
    dense = prefill(model, torch.tensor([ids]), None, NEW)

    def run(least):
        return greedy(model, dense.fork(), dense.logits, None, dense.lengths, [eos], [NEW], [least])

    assert run(0)[0] == [free[: free.index(eos)]]
    assert run(0)[1] == free.index(eos)
    held = alone(model, Method("dense"), ids, NEW, None, eos=eos, min_new_tokens=9)
    assert run(9)[0][0] == [t for t in held if t != eos]


def test_rows_of_a_batch_have_their_own_limits():
    model, ids = tiny_model("llama"), prompts([40, 22])
    padded, real = pad_left(ids, 0, "cpu")
    dense = prefill(model, padded, real, NEW)
    tokens, _, _ = greedy(model, dense.fork(), dense.logits, real, dense.lengths, [], [4, NEW], [0, 0])
    assert [len(t) for t in tokens] == [4, NEW]
    assert tokens[0] == alone(model, Method("dense"), ids[0], 4, None)


def test_a_stop_string_ends_a_row():
    model, (ids,) = tiny_model("llama"), prompts([40])
    free = alone(model, Method("dense"), ids, NEW, None)
    engine = Replay(model, Letters(), Settings())
    stop = f" {free[3]} "
    ((_, (answer,)),) = engine.answers([Prompt(ids, 30)], rows(1, stop=(stop,)), [Method("dense")])
    assert answer.tokens == free[: len(answer.tokens)]
    assert answer.steps < NEW - 1
    assert stop in answer.text


@pytest.mark.parametrize("least", [0, 1, 4])
@pytest.mark.parametrize("at", [0, 3])
def test_the_last_token_of_an_end_is_as_end_of_text(at, least):
    """LongBench's samsum: the token for a newline ends the reply, and is forbidden where end-of-text is."""
    model, (ids,) = tiny_model("llama"), prompts([40])
    end = alone(model, Method("dense"), ids, NEW, None)[at]
    engine = Replay(model, Encoding(), Settings())
    made = rows(1, ends=(f"1 {end}",), min_new_tokens=least)
    ((_, (answer,)),) = engine.answers([Prompt(ids, 30)], made, [Method("dense")])
    held = alone(model, Method("dense"), ids, NEW, None, eos=end, min_new_tokens=least)
    assert answer.tokens == [t for t in held if t != end]


@pytest.mark.parametrize("lengths", [[40], [40, 40], [40, 29, 33]], ids=str)
def test_before_question_reads_the_question_through_the_compressed_cache(lengths):
    """As a second turn of generate(): context, then question, into one cache."""
    from leank.eval.cache import compressed_cache
    from leank.eval.cache.hook import ATTENTION

    model, ids = tiny_model("qwen3"), prompts(lengths)
    engine = Replay(model, Letters(), Settings(compress="before_question"))
    cuts = [n - 2 - i for i, n in enumerate(lengths)]
    made = [Prompt(i, cut) for i, cut in zip(ids, cuts, strict=True)]
    for method, answers in engine.answers(made, rows(len(ids)), methods()):
        for prompt, cut, answer in zip(ids, cuts, answers, strict=True):
            dense = prefill(model, torch.tensor([prompt[:cut]]), None, 8, method.obs_queries)
            cache = dense.fork()
            if method.channels:
                keep = method.channels.keep_mask(dense, model.config)
                cache = compressed_cache(model, keep if keep.ndim == 3 else keep[0], **SIZES)
                model.set_attn_implementation(ATTENTION)
                model(torch.tensor([prompt[:cut]]), past_key_values=cache)
            logits = model(torch.tensor([prompt[cut:]]), past_key_values=cache).logits[0, -1]
            assert answer.tokens[0] == int(logits.argmax())


def test_sliding_layers_stay_as_they_are():
    """Mistral's own window: every method gives the dense tokens, and no method disturbs another."""
    model, ids = tiny_model("mistral", sliding_window=16), prompts([40, 40])
    got = replay_tokens(model, ids)
    assert all(answers == got["dense"] for answers in got.values())
    for row, prompt in enumerate(ids):
        assert got["dense"][row] == alone(model, Method("dense"), prompt, NEW, None)


def test_sliding_layers_refuse_padding_between_context_and_question():
    """Questions of two lengths in a batch: the shorter one's padding would take its context's place in the window."""
    model, made = tiny_model("mistral", sliding_window=9), [Prompt(ids, 30) for ids in prompts([33, 32])]

    def tokens(made, batch_size):
        engine = Replay(model, Letters(), Settings(compress="before_question", batch_size=batch_size))
        return [
            answer.tokens for _, answers in engine.answers(made, rows(len(made)), methods()[:1]) for answer in answers
        ]

    with pytest.raises(ValueError, match=r"batch_size=2 with compress=before_question .* use batch_size=1"):
        tokens(made, 2)
    assert tokens(made, 1)[1] != tokens(made[1:], 1)[0]  # what is refused: together they differ


def test_observed_queries_are_those_of_a_pass_in_chunks_and_keep_no_others_in_memory():
    model = tiny_model("llama")
    ids, real = pad_left([torch.arange(5, 45).tolist(), torch.arange(7, 37).tolist()], 0, "cpu")
    whole, chunked = (prefill(model, ids, real, 4, obs_queries=6, chunk=chunk) for chunk in (None, 4))
    for one, other in zip(whole.layers, chunked.layers, strict=True):
        assert one.queries.shape[2] == 6
        torch.testing.assert_close(one.queries, other.queries)
        assert one.queries.untyped_storage().nbytes() == one.queries.nbytes


def test_a_dense_rows_bytes_are_those_that_it_has_alone():
    """Of prompts that are padded together; rows of a compressed cache have equal shares of it."""
    model, ids = tiny_model("llama"), prompts([40, 12, 33])
    asl = Method("asl", prefill=ASL(budget=20, window=4, layer=0), **SIZES)  # the second prompt is read whole
    engine, made = Replay(model, Letters(), Settings()), [Prompt(i, len(i) - 3) for i in ids]
    together = {m.label: a for m, a in engine.answers(made, rows(3), [Method("dense"), asl])}
    for row, prompt in enumerate(made):
        for _, (answer,) in engine.answers([prompt], rows(1), [Method("dense")]):
            assert together["dense"][row].bytes == answer.bytes
    values = 2 * 2 * 2 * 8  # K and V, layers, heads, channels
    assert [answer.bytes["total"] for answer in together["dense"]] == [8 * values * len(i) for i in ids]  # float64
    first, *others = (answer.bytes for answer in together["asl"])
    assert others == [first, first]
    assert first["total"] == pytest.approx(
        sum(first.values()) - first["total"], abs=len(first)
    )  # shares are whole bytes


def test_allocated_bytes_of_a_pass_of_its_own_are_those_of_its_cache(monkeypatch):
    """The pass leaves K and V that its cache shares or copies: then allocated is the cache and little else."""

    def living(replay):
        gc.collect()
        storages = [t.untyped_storage() for t in gc.get_objects() if type(t) is torch.Tensor]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    monkeypatch.setattr(Replay, "_counts", True)
    monkeypatch.setattr(Replay, "_allocated", living)
    model, ids = tiny_model("llama"), prompts([200, 200])
    early, few = FastKV(layer=0, budget=64), SnapKV(budget=40, queries=8)
    passes = [Method("fastkv", prefill=early, **SIZES), Method("both", prefill=early, tokens=few, **SIZES)]
    engine = Replay(model, Letters(), Settings())
    made = [Prompt(i, len(i) - 3) for i in ids]
    for _, answers in engine.answers(made, rows(2), passes):
        held = answers[0].bytes
        assert held["total"] <= held["allocated"] < held["total"] + 20_000


def test_answers_say_at_which_layer_a_pass_selected():
    """None for a method that looks for no layer, -1 where it found none: the short prompt is read whole."""
    some = [Method("dense"), Method("asl", prefill=ASL(20, None, 4, 3, layer=0))]
    made = [Prompt(i, 3) for i in prompts([40, 12])]
    found = Replay(tiny_model("llama"), Letters(), Settings()).answers(made, rows(2, 3), some)
    assert [[a.selected_layer for a in answers] for _, answers in found] == [[None, None], [0, -1]]
