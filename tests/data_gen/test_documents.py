"""Documents have the length asked for and their chat template; a mixture is a list of them addressed by index."""

import copy
import itertools
import pickle
import time
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from itertools import islice

import pytest
from transformers import PreTrainedTokenizerFast

from leank.data_gen.chat import prompt, rendered, template, template_tokens
from leank.data_gen.task import Document, Request
from leank.data_gen.tasks import TASKS, Mixture
from leank.data_gen.tasks.chain import Chain
from leank.data_gen.tasks.niah import Niah
from leank.data_gen.tasks.passkey import Passkey
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import KINDS, tokenizer
from tests.helpers.thinned import thinned

TRAINING = ("kv", "multivalue", "multikey", "multiquery", "passkey", "text", "quote", "code", "few_shot", "turns")
OTHERS = tuple(name for name in TASKS if name not in TRAINING and not name.startswith(("qa", "prompts")))


def tokens(document: Document, kind: str) -> int:
    """Tokens of the document with its longest question and answer, as a model reads it."""
    texts = [document.context + q.question + q.answer_prefix + q.target for q in document.questions]
    return max(len(ids) for ids in tokenizer(kind)(texts)["input_ids"])


def build(name: str, length: int, kind: str, questions: int) -> Document:
    task = TASKS[name]
    if isinstance(task, Passkey) and length < 2048:  # ten passkeys of 32 words take a thousand tokens
        task = replace(task, num_passkeys=4)
    if isinstance(task, Chain) and length < 4096:  # a step takes some 22 tokens
        task = replace(task, steps=length // 64)
    return task.build(Request(name, length, TokenCounter(tokenizer(kind)), 5, 2, questions))


@pytest.mark.parametrize(
    ("name", "length", "kind"),
    thinned(
        [*itertools.product(TRAINING, (1024, 16384), KINDS), *itertools.product(OTHERS, (1024, 6000), KINDS)],
        keep=5,  # every task, every tokenizer, and both lengths with each
    ),
)
def test_documents_have_the_exact_length(name, length, kind):
    document = build(name, length, kind, questions=3 if name in TRAINING else 1)
    assert 0.98 * length <= tokens(document, kind) <= length
    assert name in OTHERS or abs(document.length - tokens(document, kind)) <= 3


@pytest.mark.parametrize("reserve", [0, 40])
def test_a_reserve_is_left_for_the_chat_template(reserve):
    document = TASKS["kv"].build(Request("kv", 2048, TokenCounter(tokenizer("reference")), 0, 0, reserve=reserve))
    assert 2048 - reserve - 10 <= tokens(document, "reference") <= 2048 - reserve
    assert document.length <= 2048


@pytest.mark.parametrize("haystack", ["noise", "essay", "needle"])
@pytest.mark.parametrize("key_type", ["words", "numbers", "uuids"])
def test_every_haystack_and_key_type(haystack, key_type):
    task = Niah(haystack, key_type, "words", num_keys=3, num_values=2, num_queries=2)
    document = task.build(Request("mine", 1500, TokenCounter(tokenizer("gpt4")), 0, 0, questions=2))
    assert 0.98 * 1500 <= tokens(document, "gpt4") <= 1500


@pytest.mark.parametrize("name", ["kv", "multivalue", "passkey"])
def test_a_96k_sample_takes_less_than_a_second(name):
    counter = TokenCounter(tokenizer("reference"))
    seconds = []
    for index in range(3):
        start = time.process_time()
        TASKS[name].build(Request(name, 98_304, counter, 0, index, questions=4))
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1, f"{name}: {seconds}"  # of this process, about 0.25: the machine may be busy


def test_texts_that_never_recur_are_not_kept():
    counter = TokenCounter(tokenizer("reference"))
    for name in ("kv", "vt", "cwe", "fwe", "passkey"):
        TASKS[name].build(Request(name, 4096, counter, 0, 0))
        TASKS[name].build(Request(name, 4096, counter, 0, 0, exact=False))
    assert max(map(len, counter._cache)) < 3000


@pytest.mark.parametrize("kind", KINDS)
def test_what_tokenizer_json_says_of_padding_and_truncation_does_not_change_a_count(kind):
    """Such a file keeps both from whatever its last user did, and a batch of the wrapper leaves its own."""
    texts = ["one", "two words", " and a longer line of text." * 9]
    right = [len(ids) for ids in tokenizer(kind)(texts, add_special_tokens=False)["input_ids"]]
    backends = [deepcopy(tokenizer(kind).backend_tokenizer) for _ in range(3)]
    backends[0].enable_padding(pad_id=0, pad_token="<pad>")
    backends[1].enable_padding(pad_id=0, pad_token="<pad>", length=300)
    backends[2].enable_truncation(5)
    for backend in backends:
        counter = TokenCounter(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>"))
        assert counter.counts(texts) == right
        counter.tokenizer(texts, padding="max_length", truncation=True, max_length=7)
        assert counter.counts(texts, remember=False) == right
        assert TokenCounter(counter.tokenizer).counts(texts) == right


def sample(reserve: int = 0):
    request = Request(
        "niah_single_1", 512, TokenCounter(tokenizer("sentencepiece")), 0, 0, exact=False, reserve=reserve
    )
    return TASKS["niah_single_1"].build(request).samples()[0]


def test_a_base_model_reads_plain_text():
    row = sample()
    assert prompt(row, tokenizer("reference"), chat=False) == row.context + row.question + row.answer_prefix


def test_the_answer_prefix_stands_after_the_assistant_header():
    row = sample()
    text = prompt(row, tokenizer("sentencepiece"), chat=True)
    assert text == f"<s><|user|>\n{row.context}{row.question}<|end|>\n<|assistant|>\n{row.answer_prefix}"
    turn = [{"role": "user", "content": row.context + row.question}]
    official = tokenizer("sentencepiece").apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text == official + row.answer_prefix


def test_a_prompt_with_its_template_stays_within_the_length():
    chat = tokenizer("sentencepiece")
    reserve = template_tokens(chat)
    whole, plain = (
        len(chat(prompt(sample(), chat, chat=c), add_special_tokens=not c)["input_ids"]) for c in (True, False)
    )
    assert abs(reserve - (whole - plain)) <= 1  # pieces join at a seam, and special tokens are counted once
    row = sample(reserve)
    ids = chat(prompt(row, chat, chat=True), add_special_tokens=False)["input_ids"]
    assert len(ids) + row.max_new_tokens <= 512


DATED = (  # as Llama 3.2, gpt-oss and Granite write the date
    "{%- if strftime_now is defined %}{%- set day = strftime_now('%d %b %Y') %}{%- else %}{%- set day = 'none' %}"
    "{%- endif %}{{ day }}: ",
    '{%- macro head() -%}{{ strftime_now( "%Y-%m-%d" ) }}{%- endmacro -%}{{ head() }}: ',
    "\n {% set date_string = strftime_now('%B %d, %Y') -%}{{ date_string }}: ",
)


@pytest.mark.parametrize(
    ("start", "shown"), [*zip(DATED, ("26 Jul 2024", "2024-07-26", "\nJuly 26, 2024"), strict=True)]
)
def test_a_date_in_the_template_is_the_same_on_any_day(start, shown):
    chat = copy.deepcopy(tokenizer("sentencepiece"))
    plain = rendered(chat, [{"role": "user", "content": "a question"}])
    chat.chat_template = start + chat.chat_template
    assert rendered(chat, [{"role": "user", "content": "a question"}]) == f"{shown}: {plain}"
    assert shown in template(chat)[0]


def test_tokenizers_without_a_usable_template_are_refused():
    with pytest.raises(ValueError, match=r"has no chat template; set chat=False"):
        prompt(sample(), tokenizer("reference"), chat=True)

    class Upper:
        name_or_path = "shouting"
        chat_template = "x"

        @staticmethod
        def apply_chat_template(turns, **_):
            return turns[0]["content"].upper()

    with pytest.raises(ValueError, match=r"tokenizer='shouting'.*does not show"):
        template(Upper())


WEIGHTS = {"kv": 1.0, "multivalue": 2.0, "multikey": 1.0, "multiquery": 1.0, "vt": 1.0, "fwe": 1.0}


@pytest.fixture(scope="module")
def mixture() -> Mixture:
    return Mixture(WEIGHTS, tokenizer("reference"), 1024, 2048, seed=3, questions=2)


def test_a_document_is_that_of_its_index_alone(mixture):
    """Whatever was made before, in whichever order, and in another process: ranks and workers share nothing else."""
    expected = [mixture[i] for i in range(8)]
    fresh = Mixture(WEIGHTS, tokenizer("reference"), 1024, 2048, seed=3, questions=2)
    assert [fresh[i] for i in reversed(range(8))] == expected[::-1]
    assert [pickle.loads(pickle.dumps(mixture))[i] for i in (5, 2)] == [expected[5], expected[2]]
    request = Request("cwe", 2048, TokenCounter(tokenizer("reference")), 0, 7, exact=False)
    used = TASKS["cwe"].build(request)
    assert used == TASKS["cwe"].build(request)  # from what the counter remembers
    assert used == TASKS["cwe"].build(replace(request, counter=TokenCounter(tokenizer("reference"))))


def test_seeds_and_indices_give_other_documents(mixture):
    other = replace(mixture, seed=4)
    contexts = [m[i].context for m in (mixture, other) for i in range(10)]
    assert len(set(contexts)) == 20


def test_lengths_are_uniform_and_shared_by_a_group(mixture):
    lengths = [mixture.length_of(i) for i in range(3000)]
    assert min(lengths) < 1034
    assert max(lengths) > 2038
    quarters = Counter((n - 1024) * 4 // 1025 for n in lengths)
    assert all(650 < n < 850 for n in quarters.values()), quarters
    grouped = replace(mixture, per_length=4)
    assert all(len({grouped.length_of(4 * i + k) for k in range(4)}) == 1 for i in range(50))
    assert len({grouped.length_of(4 * i) for i in range(50)}) > 40


def test_tasks_are_drawn_by_their_weights(mixture):
    light = Mixture({"niah_single_1": 1, "vt": 3, "fwe": 0}, tokenizer("reference"), 1000, 1000, seed=1)
    drawn = Counter(light[i].task for i in range(200))
    assert set(drawn) == {"niah_single_1", "vt"}
    assert 120 < drawn["vt"] < 180


def test_questions_a_document(mixture):
    for document in islice((mixture[i] for i in range(20)), 20):
        assert len(document.questions) == (1 if document.task == "fwe" else 2)
        assert len(document.samples()) == len(document.questions)
