"""Samples through a model: batches, conversations, and decoding."""

import gc
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from leank.eval.benchmarks.base import Row
from leank.eval.cache import compressed_cache
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.graph import DecodeLoop, capturable
from leank.eval.inference.decode import decode
from leank.eval.inference.models import ModelConfig, load_model
from leank.eval.inference.prefill import extend, pad_left, prefill
from leank.eval.inference.prompts import Prompt, encode_turns
from leank.eval.methods import Method, build_method
from leank.eval.methods.prefill.asl import ASL
from leank.eval.methods.prefill.fastkv import FastKV
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.run.job import Progress
from leank.eval.run.replay import Replay, Settings
from tests.helpers.cache_oracle import FAMILIES, tiny_model
from tests.helpers.replay_tools import NEW, SIZES, Letters, alone, methods, prompts, rows
from tests.helpers.text_tokenizers import tokenizer
from tests.helpers.thinned import thinned


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
    thinned(
        [("qwen3", [31, 40], 7), ("llama", [40, 40], None), *((f, [31, 7, 40], None) for f in sorted(FAMILIES))],
        keep=(0, 2),  # in chunks and not, and two families
    ),
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


@pytest.mark.parametrize("lengths", thinned([[40, 29, 33], [40, 40], [40]]), ids=str)
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


ADDED = 3
CONTEXTS, QUESTIONS = (40, 29, 33), ((9, 5, 12), (3, 14, 6), (8, 8, 1))  # tokens of each row; of each turn and row


def every_method():
    return [
        *methods(),
        Method("snapkv", tokens=SnapKV(14, 4), **SIZES),
        Method("h2o", tokens=H2O(14), **SIZES),
    ]


def turns_of(one_cache, count):
    """Prompts of `count` conversations, those of one after the other."""
    made = []
    for row in range(count):
        ids = prompts([CONTEXTS[row], *(turn[row] for turn in QUESTIONS)], seed=row)
        held, found = ids[0], []
        for question in ids[1:]:
            found.append(Prompt([*held, *question], len(held)))
            held = found[-1].ids if one_cache else held
        made += found
    return made


def by_hand(model, method, conversation, one_cache):
    """The replies of one conversation: every turn on a cache of its own, made anew and fed all that comes before."""
    context, replies = conversation[0].ids[: conversation[0].question], []
    for prompt in conversation:
        passed = method.run_prefill(model, torch.tensor([context]), None, 200)
        cache = method.cache(model, passed)
        logits = extend(model, cache, torch.tensor([prompt.ids[len(context) :]]), None)
        reply = []
        for _ in range(ADDED):
            reply.append(int(logits[0].argmax()))
            logits = extend(model, cache, torch.tensor([[reply[-1]]]), None)
        replies.append(reply)
    return replies


@pytest.mark.parametrize("one_cache", [True, False], ids=["conversation", "reuse"])
def test_answers_are_those_of_caches_fed_by_hand(one_cache):
    model, count = tiny_model("llama"), len(CONTEXTS)
    made = turns_of(one_cache, count)
    engine = Replay(model, Letters(), Settings())
    replies = {}
    for method, answers in engine.answers(made, rows(len(made), ADDED), every_method(), 3, one_cache):
        replies[method.label] = got = [answer.tokens for answer in answers]
        for row in range(count):
            want = by_hand(model, method, made[3 * row : 3 * row + 3], one_cache)
            assert got[3 * row : 3 * row + 3] == want, method.label
        assert all(answer.compressed is (None if method.label == "dense" else True) for answer in answers)
        assert not any(answer.dense_only for answer in answers)
    assert sum(reply != replies["dense"] for reply in replies.values()) >= 5


ROWS = [
    Row("t", f"0.{n}", "The magic number for fog is: 17.", f"\nWhat is the magic number for {key}?", (value,), 8,
        "ruler_all", answer_prefix=f" The magic number for {key} is", target=f" {value}.")
    for n, (key, value) in enumerate([("fog", "17"), ("rain", "23"), ("snow", "5")], 1)
]  # fmt: skip


@pytest.mark.parametrize("kind", ["reference", "gpt4", "sentencepiece"])
def test_a_turn_follows_the_turns_before_it(kind):
    """The text is the chat template's whole conversation; without a template, text after text."""
    words = tokenizer(kind)
    made = encode_turns(words, ROWS, one_cache=True)
    for before, after in pairwise(made):
        assert after.ids[: after.question] == before.ids
    text = words.decode(made[-1].ids)
    if words.chat_template:
        messages = [{"role": "user", "content": ROWS[0].prompt}]
        for before, row in pairwise(ROWS):
            messages.append({"role": "assistant", "content": before.answer_prefix + before.target})
            messages.append({"role": "user", "content": row.question})
        want = words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + ROWS[-1].answer_prefix
    else:
        end = words.eos_token or ""
        said = [row.question + row.answer_prefix + row.target + end for row in ROWS]
        want = ROWS[0].context + "".join(said).removesuffix(ROWS[-1].target + end)
    assert squeezed(text).endswith(squeezed(want))
    apart = encode_turns(words, ROWS, one_cache=False)
    assert {prompt.question for prompt in apart} == {made[0].question}


def squeezed(text):
    """A text without blanks, which tokenizers put before words."""
    return "".join(text.split())


def test_a_prompt_that_is_only_one_turn_is_as_before():
    words = tokenizer("reference")
    assert encode_turns(words, ROWS[:1], one_cache=False)[0] == encode_turns(words, ROWS, one_cache=True)[0]


MORE = 100  # three flushes of 32


@pytest.mark.filterwarnings("ignore:attention over the compressed cache")
def test_only_caches_that_the_kernel_reads_whole_are_captured():
    model = tiny_model("llama")
    config = model.config
    keep = torch.ones(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype=torch.bool)
    cache = compressed_cache(model, keep, 4, 16)
    prompt = torch.arange(40)[None] + 5
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    assert not capturable(cache)  # nothing has been read yet
    DecodeLoop(model, cache, torch.tensor([[40]])).step(torch.tensor([[7]]))
    assert cache.get_seq_length() == 41
    assert isinstance(cache.layers[0].backend, Plain)
    assert not capturable(cache)
    for layer in cache.layers:
        layer.backend = SimpleNamespace(captures=True)
    assert capturable(cache)
    cache.layers[1].store.seen[0] = 3  # shorter than the sink
    assert not capturable(cache)
    assert not capturable(prefill(model, prompt, None, 8).fork())


def written_one_by_one(model, ids, eos, most, least):
    """Greedy tokens after the prompt ids [1, T], the end-of-text token that ended them included."""
    tokens = []
    while len(tokens) < most and not (tokens and tokens[-1] in eos):
        with torch.no_grad():
            logits = model(torch.cat([ids, torch.tensor([tokens], dtype=torch.long)], 1)).logits[0, -1]
        if len(tokens) < least:
            logits[eos] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens


def test_rows_end_at_their_own_bounds_and_no_step_follows_the_last():
    model, prompts = tiny_model("llama"), [[7, 8, 9, 4], [5, 6], [11, 3, 2]]
    free = written_one_by_one(model, torch.tensor(prompts[:1]), [], 12, 0)
    for at in (0, 3, 5):
        eos = free[at : at + 2]  # with at least at + 1 tokens, the last of them is the first of these if it may be
        for most, least in (([6, 1, 9], [0, 0, 0]), ([8, 8, 0], [at + 1, 0, 0]), ([1, 8, 1], [1, 0, 0]),
                            ([8, 8, 9], [at, 0, at + 2])):  # fmt: skip
            ids, real = pad_left(prompts, 0, "cpu")
            dense = prefill(model, ids, real, max(most))
            found, steps, broken = decode(model, dense.fork(), dense.logits, real, dense.lengths, eos, most, least)
            rows = zip(prompts, most, least, strict=True)
            wanted = [written_one_by_one(model, torch.tensor([p]), eos, n, m) for p, n, m in rows]
            assert found == [[token for token in row if token not in eos] for row in wanted]
            assert steps == max(map(len, wanted)) - 1  # the first token comes from the prompt's pass
            assert broken == [None] * 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        {"channels": {"name": "lowest_frequencies", "ratio": 0.7}},
        {"channels": {"name": "think", "ratio": 0.6}, "bits": {"name": "kivi", "bits": 4}},
    ],
    ids=["static channels", "packed, channels of each prompt"],
)
@pytest.mark.parametrize("lengths", [[400, 400], [420, 180, 300]], ids=["equal", "padded"])
def test_a_captured_loop_gives_the_tokens_of_an_eager_one(config, lengths, captures, monkeypatch):
    model = load_model(ModelConfig())
    chosen = build_method("one", config, {"sink": 16, "window": 96})
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 4000, (n,), generator=generator).tolist() for n in lengths]
    ids, real = pad_left(prompts, 0, model.device)
    found = []
    for least in (MORE, 16):  # never captured, captured
        monkeypatch.setattr("leank.eval.inference.decode.CAPTURE_FOR", least)
        dense = prefill(model, ids, real, MORE, chosen.obs_queries)
        cache, n = chosen.cache(model, dense), [MORE] * len(lengths)
        found.append(decode(model, cache, dense.logits, real, dense.lengths, [], n, n))
    assert captures == [1]
    assert found[0] == found[1]


def test_a_long_batch_says_which_method_has_answered(monkeypatch, caplog):
    clock = iter([0.0, 5.0, 25.0, 25.0, 30.0])
    monkeypatch.setattr("leank.eval.run.job.time.perf_counter", lambda: next(clock))
    cell = SimpleNamespace(place="niah at 1024", length=1024)
    progress = Progress([(cell, ("0",), [Method("dense")]), (cell, ("1",), [Method("dense")])])
    with caplog.at_level("INFO"):
        for number in (1, 2, 3):
            progress.answered(cell.place, "dense", number, 3)
    assert [record.getMessage() for record in caplog.records] == [
        "niah at 1024, batch 1 of 2: dense has answered, method 2 of 3"
    ]
