"""How a backbone turns the parts of a prompt into token ids, and what ends a reply."""

from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from leank.backbone import Backbone, eos_ids
from leank.eval.benchmarks.row import Row
from leank.eval.inference.prompts import encode
from tests.helpers.text_tokenizers import tokenizer

CONTEXT, QUESTION, PREFIX = "A document about ships.", "\nWhat is it about?", " It is about"


@pytest.fixture
def ends_every_text():
    """A tokenizer of a base model that puts <s> before and </s> behind every text."""
    backend = tokenizer("sentencepiece").backend_tokenizer
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert made.convert_ids_to_tokens(made(CONTEXT)["input_ids"])[-1] == "</s>"
    return made


def test_a_document_is_not_ended_before_its_question(ends_every_text):
    backbone = Backbone(None, ends_every_text, "model")
    ids = backbone.encode_context(CONTEXT)
    plain = ends_every_text(CONTEXT, add_special_tokens=False)["input_ids"]
    assert ids == [ends_every_text.bos_token_id, *plain]


@pytest.mark.parametrize("specials", ["text", "as_is"])
@pytest.mark.parametrize("context", [CONTEXT, "A document about </s>."])
def test_a_prompt_is_not_ended_before_its_reply(ends_every_text, context, specials):
    row = Row("task", "1", context, QUESTION, ("ships",), 8, "ruler_all", answer_prefix=PREFIX)
    found = encode(ends_every_text, row, chat=False, specials=specials)
    names = ends_every_text.convert_ids_to_tokens(found.ids)
    assert names[0] == "<s>"
    assert names[-1] == "out"
    assert "".join(names[found.question :]).replace("▁", " ").strip() == f"{QUESTION}{PREFIX}".strip()


def test_a_chat_template_takes_the_place_of_special_tokens():
    chatting = tokenizer("sentencepiece")
    backbone = Backbone(None, chatting, "model", "<s><|user|>\n", "<|end|>\n<|assistant|>\n")
    ids = backbone.encode_context(CONTEXT) + backbone.encode_question(QUESTION, PREFIX)
    names = chatting.convert_ids_to_tokens(ids)
    assert (names.count("<s>"), names.count("</s>")) == (1, 0)
    assert backbone.reserve > 0 == Backbone(None, chatting, "model").reserve


@pytest.mark.parametrize(
    ("generation", "of_tokenizer", "wanted"), [([3, 4], 2, [3, 4]), (5, 2, [5]), (None, 2, [2]), (None, None, [])]
)
def test_a_reply_ends_as_generate_ends_it(generation, of_tokenizer, wanted):
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=generation))
    assert eos_ids(model, SimpleNamespace(eos_token_id=of_tokenizer)) == wanted
