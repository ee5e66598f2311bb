"""Prompts of the user's own with the model's replies: what people have is logs of what they asked, not tasks.

The user's file has a prompt in every line (`read`). `leank_train.replies` lets the dense model answer each one once,
and writes prompts with replies, which the task reads as `Request.data`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NotRequired

from annotated_types import MinLen
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from leank.data_gen.amount import amount
from leank.data_gen.reading import NotBlank, read_text
from leank.data_gen.task import HELD_OUT, Draft, Question, Request, Task

REPLY = 128  # tokens of a reply, at most
LEAST = 10  # prompts: every tenth is held out
FORM = '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
_WORD = re.compile(r"\s*\S+")


class Message(TypedDict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: NotBlank


class _Line(TypedDict):
    """A line of the user's file; other keys, such as an id or a date, are passed over."""

    prompt: NotRequired[NotBlank]
    messages: NotRequired[Annotated[list[Message], MinLen(1)]]


class Answered(TypedDict):
    """A prompt, cut into its document and the rest, with the reply."""

    context: NotBlank
    question: str
    reply: NotBlank
    framed: bool  # whether the texts hold the chat template already


_LINE, _ANSWERED = TypeAdapter(_Line), TypeAdapter(Answered)


def read(path: str) -> list[str | list[Message]]:
    """Return the prompts of a JSONL file (.gz, too), each a text or the messages of a conversation.

    Raises FileNotFoundError if there is no file, ValueError that names the line for anything that is no prompt.
    """
    found: list[str | list[Message]] = []
    for number, line in _lines(path, f"give a file of lines {FORM}"):
        where = f"data.prompts={path!r}, line {number}"
        try:
            one = _LINE.validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{where} is no prompt ({_first(error)}); give {FORM}") from None
        prompt, messages = one.get("prompt"), one.get("messages")
        if (prompt is None) == (messages is None):
            raise ValueError(f"{where} needs either a prompt or messages; give {FORM}")
        if messages and messages[-1]["role"] != "user":
            raise ValueError(
                f"{where} ends with a message of the {messages[-1]['role']}; end with the user's, as the dense model "
                "writes the reply"
            )
        found.append(messages or prompt or "")
    if len(found) < LEAST:
        raise ValueError(f"data.prompts={path!r} has {amount(len(found), 'prompt')}; give {LEAST} or more")
    return found


@lru_cache(maxsize=4)
def answered(path: str | None) -> Sequence[Answered]:
    """Return the prompts with replies of a file that `leank_train.replies` wrote.

    Raises FileNotFoundError if there is no file, ValueError if it holds something else, or too few.
    """
    if path is None:
        raise FileNotFoundError("data=None: the task prompts reads prompts with replies; train with data.prompts=PATH")
    cure = "remove it, and training writes it again"
    found = []
    for number, line in _lines(path, cure):
        try:
            found.append(_ANSWERED.validate_json(line))
        except ValidationError as error:
            raise ValueError(f"{path}, line {number} is no prompt with a reply ({_first(error)}); {cure}") from None
    if len(found) < LEAST:
        raise ValueError(f"{path} has {amount(len(found), 'prompt')} with replies, fewer than {LEAST}; {cure}")
    return tuple(found)


def words(reply: str) -> list[str]:
    """Return the words of a reply, each with the white space before it."""
    return _WORD.findall(reply)


@dataclass(frozen=True)
class Prompts(Task):
    """A prompt of the user's, whose reply is cut into as many parts as there are questions.

    Each part is the answer of a branch that has read the parts before it. A document has the prompt's length, whatever
    length is asked for. Every tenth prompt is for documents from number `HELD_OUT` on.
    """

    max_new_tokens: int = REPLY

    def fill(self, request: Request) -> Draft:
        """See `Task.fill`; raises ValueError for a reply of fewer words than there are questions."""
        found = answered(request.data)
        held_out = request.index >= HELD_OUT
        part = [one for i, one in enumerate(found, 1) if (i % LEAST == 0) == held_out]
        one = part[request.rng().randrange(len(part))]
        reply, count = words(one["reply"]), request.questions
        if len(reply) < count:
            raise ValueError(f"data={request.data!r}: a reply of {amount(len(reply), 'word')} has no {count} parts")
        cuts = [len(reply) * i // count for i in range(count + 1)]
        asked = []
        for start, stop in pairwise(cuts):
            target = "".join(reply[start:stop])
            asked.append(Question(one["question"], "".join(reply[:start]), (target.strip(),), target))
        tokens = request.counter.count(one["context"], remember=False) + request.tail(asked)
        return Draft(one["context"], tuple(asked), tokens, one["framed"])


def _lines(path: str, cure: str) -> list[tuple[int, str]]:
    """Return the lines of a file that are not blank, and their numbers from 1."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"data.prompts={path!r} does not exist; {cure}")
    return [(n, line) for n, line in enumerate(read_text(Path(path)).split("\n"), 1) if line.strip()]


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return ".".join(map(str, first["loc"])) + ": " * bool(first["loc"]) + first["msg"]
