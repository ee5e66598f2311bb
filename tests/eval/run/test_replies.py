"""Replies: several a sample, repeatable row by row and reported by sample; thoughts, limits and stop strings."""

import copy
import dataclasses
import json
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from leank.data_gen.chat import set_arguments
from leank.eval.inference.models import ModelConfig
from leank.eval.inference.prefill import extend
from leank.eval.inference.prompts import Prompt, encode, overhead, without_thoughts
from leank.eval.inference.sampling import Sampling, probabilities, uniforms
from leank.eval.methods import Method
from leank.eval.report import summarise, write_diff, write_report
from leank.eval.report.sampled import majority, pass_at
from leank.eval.report.tables import tables
from leank.eval.rows import Collected, Results, read
from leank.eval.run.job import Job, repeated
from leank.eval.run.replay import Replay, Settings
from leank.stats import interval
from tests.helpers.cache_oracle import tiny_model
from tests.helpers.replay_tools import Letters, Two, methods, prompts, rows
from tests.helpers.report_rows import row, stored
from tests.helpers.text_tokenizers import KINDS, tokenizer

HOT = Sampling(temperature=1.0, top_p=0.95, top_k=30, replies=3, seed=5)
TIMES = ("seconds", "batch", "cache_bytes")


class Words(Letters):
    """Every sample has a prompt of its own."""

    def __call__(self, text, **options):
        ids = prompts([40], seed=len(text))[0]
        return {"input_ids": ids, "offset_mapping": [(i, i + 1) for i in range(40)]}


class Several(Two):
    """`Two` with prompts that differ from sample to sample."""

    def row(self, cell, sample, tokenizer, overhead):
        made = super().row(cell, sample, tokenizer, overhead)
        return dataclasses.replace(made, context="c" * (1 + int(sample) + 2 * (cell.task == "b")))


def tokens(lengths, sampling=HOT, some=None, **given):
    engine = Replay(tiny_model("llama"), Letters(), Settings(sampling=sampling, **given))
    made = [Prompt(ids, len(ids) - 3) for ids in lengths]
    found = engine.answers(made, rows(len(made)), methods() if some is None else some)
    return {method.label: [answer.tokens for answer in answers] for method, answers in found}


def test_replies_are_those_of_drawing_by_hand():
    """Dense, token by token: the number of the step passes through the cumulative probabilities."""
    model, (ids,) = tiny_model("llama"), prompts([40])
    found = tokens([ids], some=[Method("dense")])["dense"]
    for reply, got in enumerate(found):
        logits, written = extend(model, (cache := DynamicCache(config=model.config)), torch.tensor([ids]), None), []
        for number in uniforms(HOT.seed, ids, reply, len(got)):
            shares = probabilities(logits, HOT)[0]
            passed = (shares / shares.sum()).cumsum(0)
            written.append(int((passed <= number).sum()))
            logits = extend(model, cache, torch.tensor([[written[-1]]]), None)
        assert got == written
    assert len({tuple(reply) for reply in found}) == HOT.replies


@pytest.mark.parametrize("compress", ["after_question", "before_question"])
def test_a_reply_depends_neither_on_the_batch_nor_on_how_many_there_are(compress):
    ids = prompts([40, 29, 33])
    together = tokens(ids, compress=compress)
    for at, prompt in enumerate(ids):
        alone = tokens([prompt], Sampling(1.0, 0.95, 30, 2, 5), compress=compress)
        assert {name: some[3 * at : 3 * at + 2] for name, some in together.items()} == alone
    if compress == "after_question":  # the first token comes from the dense pass
        assert len({tuple(reply[0] for reply in some) for some in together.values()}) == 1
    assert len({json.dumps(some) for some in together.values()}) >= 4  # methods do differ


def test_turns_of_a_conversation_have_replies_of_their_own():
    context, *questions = prompts([40, 5, 9])
    made, held = [], context
    for question in questions:
        made.append(Prompt([*held, *question], len(held)))
        held = made[-1].ids
    engine = Replay(tiny_model("llama"), Letters(), Settings(sampling=HOT))
    for method, found in engine.answers(made, rows(2), methods(), 2, one_cache=True):
        assert len({tuple(answer.tokens) for answer in found}) == 2 * HOT.replies
        alone = Replay(tiny_model("llama"), Letters(), Settings(sampling=Sampling(1.0, 0.95, 30, 1, 5)))
        ((_, one),) = alone.answers(made, rows(2), [method], 2, one_cache=True)
        assert [answer.tokens for answer in one] == [found[0].tokens, found[HOT.replies].tokens]


def job(sampling=HOT, **given):
    return Job(ModelConfig(dtype="float32"), methods()[:2], Several(), Settings(max_new_tokens=5, sampling=sampling,
                                                                               **given))  # fmt: skip


def said(found):
    return sorted(json.dumps({k: v for k, v in one.items() if k not in TIMES}) for one in found)


def test_rows_are_equal_over_batches_shards_and_resumed_runs(tmp_path):
    whole = Collected()
    assert job().run(whole, tiny_model("llama"), Words()) == 2 * 3 * 3
    assert {(one["reply"], one["settings"]["sampling"]["temperature"]) for one in whole.rows} == {
        (reply, 1.0) for reply in range(3)
    }
    batched = Collected()
    job(batch_size=2).run(batched, tiny_model("llama"), Words())
    assert said(batched.rows) == said(whole.rows)
    for shard in (0, 1):
        with Results(tmp_path / "shards", f"-{shard}-of-2") as results:
            job(shard=f"{shard}/2").run(results, tiny_model("llama"), Words())
    assert said(read(tmp_path / "shards")) == said(whole.rows)
    with Results(tmp_path / "killed") as results:
        for one in whole.rows[1::2]:
            results.append(one)
        assert job().run(results, tiny_model("llama"), Words()) == 9
        assert job().run(results, tiny_model("llama"), Words()) == 0
    assert said(read(tmp_path / "killed")) == said(whole.rows)
    more = Collected()
    more.keys = {*whole.keys}
    assert job(Sampling(1.0, 0.95, 30, 4, 5)).run(more, tiny_model("llama"), Words()) == 2 * 3  # the fourth replies


def test_greedy_rows_are_as_they_were():
    found = Collected()
    job(Sampling()).run(found, tiny_model("llama"), Words())
    assert not any({"reply", "stated"} & one.keys() or "sampling" in one["settings"] for one in found.rows)
    assert {key.reply for key in found.keys} == {0}


def test_a_text_has_no_replies():
    engine = Replay(tiny_model("llama"), Letters(), Settings(sampling=HOT))
    with pytest.raises(ValueError, match=r"sampling.temperature=1.0: task t reads texts and writes no replies"):
        next(engine.answers([Prompt(prompts([40])[0], 20)], rows(1, read=True), [Method("dense")]))


SCORES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=7)


@settings(max_examples=60)
@given(SCORES, st.data())
def test_pass_at_k_is_the_mean_best_score_of_every_choice_of_k_replies(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    assert pass_at(scores, k) == pytest.approx(np.mean([max(some) for some in combinations(scores, k)]))
    assert pass_at(scores, 1) == pytest.approx(np.mean(scores))


def test_pass_at_more_than_all_replies_is_refused():
    with pytest.raises(ValueError, match="pass@3 of 2 replies"):
        pass_at([0.0, 1.0], 3)


@pytest.mark.parametrize(
    ("stated", "scores", "wanted"),
    [
        (["7", "7", "8"], [1, 1, 0], 1),
        (["7", "8", "8"], [1, 0, 0], 0),
        (["7", "8"], [1, 0], 0.5),
        ([None, None, "7"], [0, 0, 1], 1),
        ([None, None], [0, 0], 0),
    ],
)
def test_most_replies_decide(stated, scores, wanted):
    assert majority(stated, scores) == wanted


def sampled_rows(seed=0, replies=4, samples=6):
    draw = np.random.default_rng(seed)
    return [
        row(method, sample, float(score), reply=reply, stated=str(int(score)) if draw.random() < 0.9 else None)
        for method in ("dense", "leank")
        for sample in range(samples)
        for reply, score in enumerate(draw.integers(0, 2, replies))
    ]


def test_figures_are_over_samples(tmp_path):
    made = sampled_rows()
    (run,) = summarise(made)["runs"]
    of = {
        name: np.array([r["score"] for r in made if r["method"] == name]).reshape(6, 4) for name in ("dense", "leank")
    }
    dense, leank = run["overall"]
    assert (leank["n"], leank["pairs"]) == (6, 6)
    assert leank["score"] == pytest.approx(100 * of["leank"].mean())
    assert (leank["score_low"], leank["score_high"]) == pytest.approx(interval([100 * of["leank"].mean(1)]))
    gain = 100 * (of["leank"] - of["dense"]).mean(1)
    assert leank["difference"] == pytest.approx(gain.mean())
    assert (leank["difference_low"], leank["difference_high"]) == pytest.approx(interval([gain]))
    two = run["sampled"][1]
    best = [100 * pass_at(scores.tolist(), 2) for scores in of["leank"]]
    assert two["pass_2"] == pytest.approx(np.mean(best))
    assert (two["pass_2_low"], two["pass_2_high"]) == pytest.approx(interval([best]))
    assert two["pass_4_difference"] == pytest.approx(100 * (of["leank"].max(1) - of["dense"].max(1)).mean())
    assert two["majority"] is not None
    assert (run["sampled"][0]["pass_2_difference"], dense["difference"]) == (None, None)


def test_replies_without_an_answer_do_not_vote():
    made = [
        row(method, sample, score, reply=reply, stated=stated)
        for method in ("dense", "leank")
        for sample in range(3)
        for reply, (score, stated) in enumerate([(1.0, "7"), (0.0, None), (0.0, None)])
    ]
    (run,) = summarise(made)["runs"]
    assert [record["majority"] for record in run["sampled"]] == [100, 100]


def test_reports_and_comparisons_have_tables_of_replies(tmp_path):
    write_report(stored(tmp_path, sampled_rows()))
    text = (tmp_path / "summary.md").read_text()
    assert "## 4 replies a sample" in text
    assert "| pass@2 | pass@2 minus dense | pass@4 |" in " ".join(text.split())
    assert "maj@4 minus dense" in text
    _, table = write_diff(tmp_path, "dense", "leank")
    assert "95% bootstrap interval" in table
    assert ", reply 3" in (tmp_path / "diff_dense_leank.md").read_text()


def test_samples_that_lack_replies_have_no_votes():
    made = [one for one in sampled_rows() if (one["sample"], one["reply"]) != ("2", 3)]
    (run,) = summarise(made)["runs"]
    assert [record["n"] for record in run["sampled"]] == [5, 5]
    assert [record["n"] for record in run["overall"]] == [6, 6]


@pytest.mark.parametrize(
    ("reply", "thinking", "left"),
    [
        ("7", False, "7"),
        ("<think>a</think> 7", False, " 7"),
        ("a</think> 7", True, " 7"),
        ("a</think> 7", False, " 7"),
        ("<think>a</think> 7 <think>b</think> 8", False, " 8"),
        ("<think>a", False, None),
        ("a 7", True, None),
        ("<think>a</think> 7 <think>b", False, None),
        ("", True, None),
        ("", False, ""),
    ],
)
def test_what_follows_the_last_thought_is_left(reply, thinking, left):
    assert without_thoughts(reply, thinking) == left


class Thinking(Words):
    """Every reply is a thought that never ends, and holds the answer."""

    def decode(self, ids, **options):
        return "<think> x"


def test_a_thought_that_never_ends_scores_nothing_and_is_marked():
    for thinks, score, cut in ((True, 0.0, "thought"), (False, 1.0, "limit")):
        found = Collected()
        dataclasses.replace(job(Sampling()), thinks=thinks).run(found, tiny_model("llama"), Thinking())
        assert {(one["score"], one["cut"], one["prediction"]) for one in found.rows} == {(score, cut, "<think> x")}
        assert ("thought" in found.rows[0]["settings"]) == thinks


def test_a_reply_that_ends_by_itself_is_not_cut():
    model, ids = tiny_model("llama"), prompts([40])
    ((_, (free,)),) = Replay(model, Letters(), Settings()).answers(
        [Prompt(ids[0], 37)], rows(1), [Method("dense")]
    )  # fmt: skip
    assert free.limited
    for stop in ((f" {free.tokens[3]} ",), (f" {free.tokens[-1]}",)):
        ((_, (answer,)),) = Replay(model, Letters(), Settings()).answers(
            [Prompt(ids[0], 37)], rows(1, stop=stop), [Method("dense")]
        )
        assert not answer.limited


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), max_size=30))
def test_repeated_4_grams_are_those_that_stand_before(tokens):
    grams = [tokens[at : at + 4] for at in range(len(tokens) - 3)]
    again = sum(gram in grams[:at] for at, gram in enumerate(grams))
    assert repeated(tokens) == pytest.approx(again / len(grams) if grams else 0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_stop_strings_are_found_where_the_whole_text_has_them(kind, data):
    """After each token, the end of the text says what the whole text says."""
    words = tokenizer(kind)
    engine = Replay(tiny_model("llama"), words, Settings())
    ids = words("The river runs\n\nthrough the old town. 12 日本 " * 3, add_special_tokens=False)["input_ids"]
    special = words.all_special_ids[:1]
    ids = data.draw(st.lists(st.sampled_from([*ids, *special]) | st.sampled_from(special or ids), max_size=60))
    text = words.decode(ids, skip_special_tokens=True)
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = tuple(filter(None, (text[at : at + data.draw(st.integers(1, 12))], "zzz")))
    stopped = engine.stops(rows(1, stop=stop))
    for end in range(1, len(ids) + 1):
        whole = words.decode(ids[:end], skip_special_tokens=True)
        assert stopped(0, ids[:end]) == any(one in whole for one in stop)
        if stopped(0, ids[:end]):
            break


def test_lengths_and_cuts_of_replies_stand_in_a_table(tmp_path):
    draw = np.random.default_rng(0)
    made = [
        row(name, sample, 1.0, new_tokens=int(draw.integers(10, 90)), repeated=0.25,
            cut=[None, "limit", "thought"][sample % 3])
        for name in ("dense", "leank") for sample in range(6)
    ]  # fmt: skip
    (run,) = summarise(made)["runs"]
    of = {name: np.array([r["new_tokens"] for r in made if r["method"] == name]) for name in ("dense", "leank")}
    two = run["replies"][1]
    assert two["new_tokens_difference"] == pytest.approx((of["leank"] - of["dense"]).mean())
    assert (two["cut"], two["in_thought"], two["repeated"]) == pytest.approx((200 / 3, 100 / 3, 25))
    write_report(stored(tmp_path, made))
    assert "## Replies" in (tmp_path / "summary.md").read_text()
    alike = [{**one, "new_tokens": 5} for one in made]
    assert not any(table.title == "Replies" for table in tables(summarise(alike)["runs"][0]))


TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{{ name if name is defined else '' }}"
)


def test_arguments_reach_every_text_of_the_template():
    plain, given = copy.deepcopy(tokenizer("sentencepiece")), copy.deepcopy(tokenizer("sentencepiece"))
    plain.chat_template = given.chat_template = TEMPLATE
    asked = {"enable_thinking": False, "name": 'a "b" \\ é日'}
    set_arguments(given, asked)
    one = rows(1)[0]
    text = plain.apply_chat_template(one.messages(), tokenize=False, add_generation_prompt=True, **asked)
    assert given.apply_chat_template(one.messages(), tokenize=False, add_generation_prompt=True) == text
    assert encode(given, one).ids == plain(text, add_special_tokens=False)["input_ids"]
    assert (encode(plain, one).thinking, encode(given, one).thinking) == (True, False)
    assert overhead(given) > overhead(plain)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"enable_thinkin": False}, "model.chat_arguments.enable_thinkin=False: the chat template reads no such name"),
        ({"name": [1]}, r"model.chat_arguments.name=\[1\] must be true, false, null, a number or a text"),
    ],
)
def test_arguments_that_the_template_does_not_read_are_refused(asked, message):
    words = copy.deepcopy(tokenizer("sentencepiece"))
    words.chat_template = TEMPLATE
    with pytest.raises(ValueError, match=message):
        set_arguments(words, asked)
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        set_arguments(tokenizer("gpt4"), asked)


def test_arguments_are_part_of_a_model_and_only_if_there_are_any():
    assert "chat_arguments" not in ModelConfig().identity()
    assert ModelConfig(chat_arguments={"a": 1}).identity()["chat_arguments"] == {"a": 1}


def test_distance_from_dense_is_that_of_the_greedy_reply_and_stands_in_the_first_row():
    ids = prompts([40, 29])
    made = [Prompt(one, len(one) - 3) for one in ids]

    def found(sampling):
        engine = Replay(tiny_model("llama"), Letters(), Settings(sampling=sampling, fidelity=4))
        return {m.label: [a.fidelity for a in some] for m, some in engine.answers(made, rows(2), methods()[:2])}

    greedy, drawn = found(Sampling()), found(HOT)
    for name, some in drawn.items():
        assert some[:: HOT.replies] == greedy[name]
        assert some[1 : HOT.replies] == [None, None]
