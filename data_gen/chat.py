"""Prompts of a sample: through a chat model's own template, or as plain text for a base model.

The user's turn is context + question. The answer prefix follows the assistant header, as in RULER.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from leank.errors import in_one_line

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase

DAY = datetime.date(2024, 7, 26)  # of every prompt whose template writes the date; Llama 3.1's template has it, too
_MARK = "\x02user turn\x03"
_NOW = re.compile(r"strftime_now\(\s*([\"'])(.*?)\1")  # how templates ask for the date


def template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the chat template's text before a user's turn, and after it. Raises ValueError without one."""
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"tokenizer={name!r} has no chat template; set chat=False, or set its chat_template")
    turns = [{"role": "user", "content": _MARK}]
    try:
        text = rendered(tokenizer, turns)
    except Exception as error:  # a template is a program
        said = f"{type(error).__name__}: {in_one_line(str(error))[:200]}"
        raise ValueError(f"tokenizer={name!r}: its chat template fails ({said}); set chat=False") from error
    if text.count(_MARK) != 1:
        raise ValueError(f"tokenizer={name!r}: its chat template does not show the user's turn once; set chat=False")
    before, after = text.split(_MARK)
    return before, after


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Return the text of a conversation up to the reply.

    A template that writes today's date (Llama 3.2, SmolLM3) writes `DAY`, so that prompts are the same on any day.
    """
    own = None
    if "strftime_now" in str(tokenizer.chat_template):
        own = tokenizer.get_chat_template()
        dates = {form: DAY.strftime(form) for _, form in _NOW.findall(own)}
        # a macro takes the place of the function of that name
        own = f"{{%- macro strftime_now(form) -%}}{{{{ {json.dumps(dates)}[form] }}}}{{%- endmacro +%}}" + own
    return str(tokenizer.apply_chat_template(messages, chat_template=own, tokenize=False, add_generation_prompt=True))


def set_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> None:
    """Let every text of the chat template be made with these arguments, such as enable_thinking=False.

    They become assignments before the template, so that whatever reads the template reads them, too.
    Raises ValueError for a name that the template does not read, a value that is no plain one, or no template.
    """
    if not arguments:
        return
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"model.chat_arguments={dict(arguments)}: the tokenizer has no chat template; leave them out")
    own = tokenizer.get_chat_template()
    for name, value in arguments.items():
        if not (isinstance(value, bool | int | float | str) or value is None):
            raise ValueError(f"model.chat_arguments.{name}={value!r} must be true, false, null, a number or a text")
        if not re.search(rf"\b{re.escape(str(name))}\b", own) or not str(name).isidentifier():
            raise ValueError(
                f"model.chat_arguments.{name}={value!r}: the chat template reads no such name; leave it out"
            )
    literals = {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        for name, value in arguments.items()
    }
    assigned = (f"{{%- set {name} = {literal} %}}" for name, literal in literals.items())
    tokenizer.chat_template = "".join(assigned) + own


def prompt(sample: Any, tokenizer: PreTrainedTokenizerBase, chat: bool) -> str:
    """Return the whole text of a `Sample`, or of any row with its context, question and answer_prefix.

    chat: whether the chat template wraps it; its special tokens are written: tokenise with add_special_tokens=not chat
    """
    before, after = template(tokenizer) if chat else ("", "")
    return before + sample.context + sample.question + after + sample.answer_prefix


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the tokens that the template adds to those of a plain prompt (`Request.reserve`)."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in template(tokenizer)]
    return max(0, sum(map(len, ids)) - tokenizer.num_special_tokens_to_add(pair=False))
