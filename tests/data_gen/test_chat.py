"""Prompts through a chat template and without one."""

import copy

import pytest

from leank.data_gen.chat import prompt, rendered, template, template_tokens
from leank.data_gen.task import Request
from leank.data_gen.tasks import TASKS
from leank.data_gen.tokens import TokenCounter
from tests.helpers.text_tokenizers import tokenizer


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
