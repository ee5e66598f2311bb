"""Special tokens that a sample's text spells are text to the model; those of the chat template stay special."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from leank.eval.benchmarks.base import Row
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prompts import SPECIALS, encode
from leank.eval.methods import Method
from leank.eval.report import summarise
from leank.eval.run.job import Job
from leank.eval.run.replay import Settings
from tests.helpers.replay_tools import Two
from tests.helpers.report_rows import row as result

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}\n\n{{ m.content | trim }}</s>{% endfor %}"
    "<|start|>assistant\n\n"
)
BESIDE = "{{ bos_token }}{% for m in messages %}<|start|>{{ m.content }}</s>{% endfor %}<|start|>"


@pytest.fixture(scope="module", params=[None, TEMPLATE, BESIDE], ids=["bare", "chat", "chat without spaces"])
def tokenizer(request):
    _, made = load_config(ModelConfig())
    made.add_special_tokens({"additional_special_tokens": [AddedToken("<|start|>", special=True)]})
    made.chat_template = request.param
    return made


def row(context, question=" What?", prefix=" It is", preamble=()):
    return Row("t", "0", context, question, ("x",), 4, "ruler_all", answer_prefix=prefix, preamble=preamble)


def as_is(tokenizer, one):
    """Ids of the whole text, special tokens wherever it spells one."""
    text, chat = one.prompt, tokenizer.chat_template is not None
    text = "".join(m["content"] + "\n\n" for m in one.preamble) + text
    if chat:
        text = tokenizer.apply_chat_template(one.messages(), tokenize=False, add_generation_prompt=True)
    return tokenizer(text + one.answer_prefix, add_special_tokens=not chat)["input_ids"]


WORDS = st.text("abc xyz.\n<>|/s日", max_size=30)


@settings(max_examples=25, deadline=None)
@given(WORDS, WORDS, WORDS)
def test_texts_without_special_tokens_have_the_ids_that_they_had(tokenizer, context, question, system):
    one = row(context, f"{question}?", preamble=({"role": "system", "content": f"be {system}!"},))
    if not any(name in one.prompt + system for name in tokenizer.all_special_tokens):
        found = encode(tokenizer, one)
        assert found.ids == as_is(tokenizer, one)
        assert found.specials is None
        assert found == encode(tokenizer, one, specials="as_is")


@pytest.mark.parametrize("special", ["</s>", "<s>", "<|start|>"])
@pytest.mark.parametrize("where", ["context", "question", "prefix", "preamble"])
def test_special_tokens_in_the_text_are_text_and_the_templates_stay(tokenizer, special, where):
    parts = {"context": "one two", "question": " three", "prefix": " four", "preamble": "zero"}
    parts[where] += f" a{special}b "

    def made(parts, **options):
        preamble = ({"role": "system", "content": parts["preamble"]},)
        return encode(tokenizer, row(parts["context"], parts["question"], parts["prefix"], preamble), **options)

    ids = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    without = made({**parts, where: parts[where].replace(special, "c")})
    count = [sum(i in ids for i in found.ids) for found in (made(parts), without, made(parts, specials="as_is"))]
    assert count[0] == count[1] == count[2] - 1
    assert made(parts).specials == "text"
    assert made(parts, specials="as_is").specials == "as_is"
    assert f"a{special}b" in tokenizer.decode(made(parts).ids)
    question = tokenizer.decode(made(parts).ids[made(parts).question :])
    assert question.strip().startswith("three")


def test_a_text_without_a_template_is_what_the_tokenizer_splits(tokenizer):
    one = row("one </s> two")
    if tokenizer.chat_template is None:
        want = tokenizer(one.prompt + one.answer_prefix, split_special_tokens=True)["input_ids"]
        assert encode(tokenizer, one).ids == want


class Stubborn:
    """A tokenizer that makes special tokens of their names whatever it is told."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *args, **options):
        return self.inner(*args, **{**options, "split_special_tokens": False})


def test_a_tokenizer_that_cannot_says_so_once(tokenizer, caplog):
    one, stubborn = row("one </s> two"), Stubborn(tokenizer)
    with caplog.at_level(logging.WARNING, "eval"):
        found = [encode(stubborn, one) for _ in range(2)]
    assert found[0] == found[1] == encode(tokenizer, one, specials="as_is")
    assert len(caplog.records) <= 1
    assert all("they stay special tokens there" in r.getMessage() for r in caplog.records)


def test_only_samples_that_spell_special_tokens_have_another_key():
    text, as_is = (Job(ModelConfig(dtype="float32"), [Method("m")], Two(), Settings(specials=s)) for s in SPECIALS)
    (cell, _), method = Two().cells(), Method("m")
    plain, other = text.key(method, cell, "0"), text.key(method, cell, "0", "text")
    assert plain == as_is.key(method, cell, "0")
    assert "specials" not in text.config(method, cell.task)
    assert len({plain, other, as_is.key(method, cell, "0", "as_is")}) == 3
    rest = {text.key(method, c, s) for c in Two().cells() for s in c.samples} - {plain}
    assert not text.missing(rest | {plain})
    assert not text.missing(rest | {other})
    assert as_is.missing(rest | {other})
    with pytest.raises(ValueError, match="specials='none' must be"):
        Settings(specials="none")


def test_a_report_takes_a_sample_once_and_as_text_first():
    plain = [result("dense", i, 0.0) for i in range(3)]
    as_text = result("dense", 1, 1.0, config=None)
    as_text |= {"config": "other", "settings": {**as_text["settings"], "specials": "text"}}
    for rows in ([*plain, as_text], [as_text, *plain]):
        (run,) = summarise(rows)["runs"]
        assert [(c["method"], c["n"], round(c["score"])) for c in run["overall"]] == [("dense", 3, 33)]
