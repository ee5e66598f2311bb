"""The prompts of a conversation: what the model has read when it answers each of its turns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from leank.data_gen.chat import rendered
from leank.eval.benchmarks.row import Row
from leank.eval.inference.prompts import Prompt, encode, uses_chat

MARK = "the reply stands here"


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    one_cache: bool,
    chat: bool | None = None,
    specials: str = "text",
) -> list[Prompt]:
    """The prompt of each turn; its `question` is the first token that the cache does not hold yet.

    A later turn is encoded on its own, as in a conversation whose cache holds tokens and no text. Without a chat
    template an answer ends with the end-of-text token, as a reply of `generate()` does.

    rows: the turns, which share a context.
    one_cache: whether a turn follows the turns before it and their true answers, or the context alone.
    chat, specials: see eval.inference.prompts.encode.

    Raises ValueError if turns cannot share the context's cache, or if the chat template drops earlier replies.
    """
    first = encode(tokenizer, rows[0], chat, specials)
    if not one_cache:
        prompts = [first, *(encode(tokenizer, row, chat, specials) for row in rows[1:])]
        if any(prompt.ids[: prompt.question] != first.ids[: first.question] for prompt in prompts):
            raise ValueError(f"{rows[0].task}: the tokenizer joins a question to its context, so they share no cache")
        return prompts
    prompts, chatting = [first], uses_chat(tokenizer, rows[0], chat)
    for before, row in pairwise(rows):
        held = prompts[-1].ids
        text = _between(tokenizer, row) if chatting else row.question
        new = _ids(tokenizer, before.target)
        if not chatting and tokenizer.eos_token_id is not None:
            new.append(tokenizer.eos_token_id)
        new += _ids(tokenizer, text + row.answer_prefix)
        prompts.append(Prompt([*held, *new], len(held), first.specials))
    return prompts


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _between(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    """What the chat template writes between a reply and the reply to the question that follows it."""
    asked = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": row.question.strip()},
    ]
    text = rendered(tokenizer, asked)
    _, mark, after = text.rpartition(MARK)
    if not mark:
        raise ValueError("the model's chat template drops earlier replies; use model.chat=false with this benchmark")
    return after
