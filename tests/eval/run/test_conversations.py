"""Several questions about one context, turn after turn on one cache or each on a copy of the context's."""

from itertools import pairwise

import pytest
import torch

from leank.eval.benchmarks.base import Row
from leank.eval.inference.prefill import extend
from leank.eval.inference.prompts import Prompt, encode_turns
from leank.eval.methods import Method
from leank.eval.methods.tokens.h2o import H2O
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.eval.run.replay import Replay
from leank.eval.run.settings import Settings
from tests.helpers.cache_oracle import tiny_model
from tests.helpers.replay_tools import SIZES, Letters, methods, prompts, rows
from tests.helpers.text_tokenizers import tokenizer

NEW = 5
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
        for _ in range(NEW):
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
    for method, answers in engine.answers(made, rows(len(made), NEW), every_method(), 3, one_cache):
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
