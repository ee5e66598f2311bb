"""From a benchmark row to the token ids that the model reads, and where its question begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.benchmarks.row import Row


@dataclass(frozen=True)
class Prompt:
    """ids: every token up to the reply; question: index of the first one that belongs to the question."""

    ids: list[int]
    question: int


def uses_chat(tokenizer: Any, row: Row, chat: bool | None) -> bool:
    """Whether a row goes through the chat template. Raises ValueError if it must and the tokenizer has none."""
    there = getattr(tokenizer, "chat_template", None) is not None
    if chat is True and not there:
        raise ValueError("model.chat=true, but the tokenizer has no chat template; use model.chat=null or false")
    return row.chat and there and chat is not False


def encode(tokenizer: Any, row: Row, chat: bool | None = None) -> Prompt:
    """Token ids of a row: chat template around `messages()`, or their bare text, then `answer_prefix`.

    The text is encoded as a whole; the question begins with the first token that starts at or after the context's end.
    """
    chatting = uses_chat(tokenizer, row, chat)
    if chatting:
        text = tokenizer.apply_chat_template(row.messages(), tokenize=False, add_generation_prompt=True)
        inside = text.rfind(row.prompt)
        if inside < 0:  # templates may strip the turn
            inside = max(0, text.rfind(row.prompt.strip())) - (len(row.prompt) - len(row.prompt.lstrip()))
    else:
        before = "".join(message["content"] + "\n\n" for message in row.preamble)
        text, inside = before + row.prompt, len(before)
    encoded = tokenizer(text + row.answer_prefix, add_special_tokens=not chatting, return_offsets_mapping=True)
    end = inside + len(row.context)
    ids = list(encoded["input_ids"])
    starts = [i for i, (first, last) in enumerate(encoded["offset_mapping"]) if last > first and first >= end]
    return Prompt(ids, starts[0] if starts else len(ids) - 1)


def overhead(tokenizer: Any, chat: bool | None = None) -> int:
    """Tokens that the chat template adds to a prompt."""
    empty = Row("", "", "", "x", (), 1, "")
    if not uses_chat(tokenizer, empty, chat):
        return 0
    return len(encode(tokenizer, empty, chat).ids) - len(tokenizer("x", add_special_tokens=False)["input_ids"])
