"""InfiniteBench: prompts, truncation, rows and scores of its twelve tasks; ASL reports ten.

Source: OpenBMB/InfiniteBench 88b3daa, src/prompt.py, src/eval_utils.py and src/compute_scores.py (MIT; prompts
unchanged in assets/). ASL uses the copy in MInference, which gives every open model the prompts made for YaRN-Mistral,
without a chat template, and reads the published files: that is the style "completion"; "chat" are the prompts made for
GPT-4. Data: <task>.jsonl files in a folder, else from the Hugging Face hub.

Where the official scorer raises on a reply, the reply is wrong (0), which docs/compare/benchmarks.md records.
"""

import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from leank.data_gen.reading import NotBlank
from leank.eval.benchmarks.base import Row, benchmark, known_tasks, metric
from leank.eval.benchmarks.from_files import FromFiles, Hub, Line, Tasks, asset, read
from leank.eval.benchmarks.mmlu import LETTERS
from leank.eval.metrics.text import normalize_chinese, qa_f1, rouge_lsum, token_f1
from leank.typed import OneOf, Positive

REPO = "xinrongzhang2022/InfiniteBench"
TASKS = (
    *("longbook_sum_eng", "longbook_qa_eng", "longbook_choice_eng", "longdialogue_qa_eng", "longbook_qa_chn"),
    *("code_debug", "math_find", "passkey", "number_string", "kv_retrieval"),
)
# by task the prompts of "completion" and of "chat", and the reply lengths in "max_new_tokens"
OFFICIAL: dict[str, dict[str, Any]] = asset("infinitebench")
STYLES = ("completion", "chat")
CHOICES = ("longbook_choice_eng", "code_debug")
_SENTENCE_MARKS = "\n:\"'.,?!{}"


class InfiniteBenchLine(TypedDict):
    """A published line."""

    context: NotBlank
    input: str
    answer: object  # a number for code_run and math_find, numbers for math_calc, else a text; one, or a list
    options: NotRequired[list[object]]  # four texts, of multiple choice alone
    id: NotRequired[str | int | None]


@benchmark("infinitebench")
@dataclass
class InfiniteBench(FromFiles):
    """InfiniteBench; path: a folder of <task>.jsonl files."""

    tasks: Tasks | None = None  # official names; None takes ASL's ten
    style: Annotated[str, OneOf(*STYLES)] = "completion"  # "completion" or "chat", see above
    # tokens above which a prompt is cut; None takes what the model's positions leave
    max_length: Positive | None = None
    name: str = "infinitebench"

    schema = TypeAdapter(InfiniteBenchLine)
    same = ("id",)
    cut = True
    counted = ("max_length", "style")

    def wanted(self) -> Sequence[str]:
        return known_tasks(self.tasks or TASKS, OFFICIAL["max_new_tokens"], "is not in InfiniteBench")

    def lines(self, task: str) -> Iterator[Line]:
        return read(f"InfiniteBench {task}", task, self.path, Hub(REPO, f"{task}.jsonl"))

    def build(self, task: str, data: InfiniteBenchLine) -> Row:
        start, end = OFFICIAL[self.style][task].split("{context}")
        answers, fields = label(task, data), _fields(task, data)
        return Row(
            task=task,
            id=str(data.get("id", "")),
            context=start.format(**fields) + data["context"],
            question=end.format(**fields),
            answers=answers,
            max_new_tokens=OFFICIAL["max_new_tokens"][task],
            metric="infinitebench",
            chat=self.style == "chat",
        )

    def right(self, row: Row) -> Sequence[str]:
        """Return the answers, of multiple choice the letter; none where the official scorer may not find a true one."""
        if row.task in ("longdialogue_qa_eng", "math_calc"):
            return ()
        return [f"{row.answers[1]}."] if row.task in CHOICES else super().right(row)


def label(task: str, data: InfiniteBenchLine) -> list[Any]:
    """Return the answers, of multiple choice the right option and its letter. Raises ValueError for a wrong label."""
    answers = data["answer"] if isinstance(data["answer"], list) else [data["answer"]]
    if task.startswith("long") and not (answers and all(isinstance(a, str) and a.strip() for a in answers)):
        raise ValueError(f"answer={reprlib.repr(answers)} must be a text or a list of texts, none blank")
    if task == "math_calc" and not _values(answers):
        raise ValueError(f"answer={reprlib.repr(answers)} must be a list of whole numbers")
    if task not in CHOICES:
        return list(answers)
    options = data.get("options", [])
    letters = [letter for letter, option in zip(LETTERS, options, strict=False) if [option] == answers[:1]]
    if len(options) != len(LETTERS) or len(letters) != 1 or answers[1:] not in ([], letters):
        raise ValueError(f"answer={reprlib.repr(answers)} is not one of the four options={reprlib.repr(options)}")
    return [answers[0], letters[0]]


def _values(answers: Sequence[object]) -> Sequence[int]:
    """Return the values that math_calc expects, which may stand in a list of their own; none if they are no numbers."""
    inner = answers[0] if len(answers) == 1 and isinstance(answers[0], list) else answers
    return inner if all(type(value) is int for value in inner) else ()  # type: ignore[return-value]


def _fields(task: str, data: InfiniteBenchLine) -> dict[str, object]:
    """What a prompt's braces stand for, beside the context. Raises ValueError for an input that does not say it."""
    asked = data["input"]
    needed = any(name in OFFICIAL["completion"][task] for name in ("{input}", "{question}", "{func}"))
    if needed and not asked.strip():
        raise ValueError('"input" is blank, and it is the question')
    fields: dict[str, object] = {"input": asked, "question": asked}
    if task in CHOICES:
        fields |= {f"OPTION_{letter}": data["options"][i] for i, letter in enumerate(LETTERS)}
    if task == "math_find":
        fields["prefix"] = f"What is {_found('(The .+) of', asked).lower()} in the following list?"
    if task == "code_run":
        call = _found(r"(func_[0-9]+\(-?[0-9]+\))", asked)
        fields |= {"func_call": call, "func": call.split("(")[0]}
    return fields


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the input {text[:200]!r} does not say what is asked ({pattern})")
    return match[1]


@metric("infinitebench")
def score(row: Row, reply: str) -> float:
    """The official score of the row's task, 0-1. Raises ValueError for a label that does not fit it."""
    return float(_SCORER_OF_TASK[row.task](reply, row.answers))


def first_integer(prediction: str, labels: Sequence[object]) -> bool:
    """passkey, number_string: the first run of 0-9 is the label, as text."""
    found = re.search("[0-9]+", prediction)
    return labels[0] == (found[0] if found else "")


def word_member(prediction: str, labels: Sequence[object]) -> bool:
    """kv_retrieval: the label is one of the words of the reply."""
    return labels[0] in _blank(prediction, _SENTENCE_MARKS).split()


def speaker(prediction: str, labels: Sequence[object]) -> bool:
    """longdialogue_qa_eng: the *first* label is a word of the upper-cased reply; a name of two words never is."""
    return labels[0] in [word.upper() for word in _blank(prediction, _SENTENCE_MARKS).split()]


def code_run(prediction: str, labels: Sequence[object]) -> bool:
    """The last word is an integer equal to the label; "2.5" ends in the word "5"."""
    words = _blank(prediction, "\n.`'\":").split()
    try:
        return bool(words) and labels[0] == int(words[-1])
    except ValueError:
        return False


def code_debug(prediction: str, labels: Sequence[str]) -> bool:
    """The reply opens with the letter and "." or ":", or letter or name follow "answer is:", "is:" or "answer:"."""
    name, letter = labels
    reply = prediction.strip()
    if reply[:2] in (f"{letter}.", f"{letter}:"):
        return True
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        reply = reply.replace(mark, " ")
    verdict = _after_prefix(reply, ("answer is:", "is:", "answer:", "correct option is:"), (letter, name))
    return bool(verdict)


def choice(prediction: str, labels: Sequence[str]) -> bool:
    """longbook_choice_eng, in this order: opening A-D, whole reply, text after an answer phrase, first word in ABCD.

    Any reply that opens with one of A-D is judged by it ("Because" is B); a word "AB" ends the search as wrong.
    """
    reply = prediction.strip()
    if not reply:
        return False
    if reply[0] in "ABCD":
        return reply[0] in labels
    if reply in labels:
        return True
    reply = _blank(reply, _SENTENCE_MARKS.replace(":", ""))
    verdict = _after_prefix(reply, ("answer is:", "answer:", "answer is", "option is"), labels)
    if verdict is not None:
        return verdict
    first = next((word for word in reply.split() if word in "ABCD"), None)
    return first in labels


def math_find(prediction: str, labels: Sequence[object]) -> bool:
    """Whether the first unsigned number is the label; never a decimal one of an integer, an error officially."""
    label = labels[0]
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise ValueError(f"math_find: the label must be a number, got {label!r}")
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None or (isinstance(label, int) and "." in found[0]):
        return False
    return (_integer(found[0]) if isinstance(label, int) else float(found[0])) == label


def math_calc(prediction: str, labels: Sequence[object]) -> float:
    """Share of the expected values that the reply's unsigned integers match before the first mistake, 0-1."""
    expected = _values(labels)
    numbers = [_integer(run) for run in re.findall("[0-9]+", prediction)]
    right = 0
    for want, got in zip(expected, numbers, strict=False):
        if want != got:
            break
        right += 1
    return right / len(expected)


def _integer(digits: str) -> int | None:
    """int(), or None for a number of more digits than Python converts (4,300; officially an uncaught ValueError)."""
    try:
        return int(digits)
    except ValueError:
        return None


def _best(metric: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    return lambda prediction, labels: max(metric(prediction, label) for label in labels)


def _character_f1(prediction: str, label: str) -> float:
    return token_f1(list(normalize_chinese(prediction)), list(normalize_chinese(label)))


def _blank(text: str, marks: str) -> str:
    return text.translate(str.maketrans(marks, " " * len(marks)))


def _after_prefix(reply: str, prefixes: Sequence[str], accepted: Sequence[str]) -> bool | None:
    """Whether an accepted text follows the first prefix that occurs (by order of prefixes); None if none occurs."""
    reply = re.sub(" {2,}", " ", reply)
    for prefix in prefixes:
        at = reply.find(prefix)
        if at != -1:
            rest = reply[at + len(prefix) + 1 :]  # officially one character after the prefix is skipped unread
            return any(rest.startswith(text) for text in accepted)
    return None


_SCORER_OF_TASK: dict[str, Callable[..., float]] = {
    "passkey": first_integer,
    "number_string": first_integer,
    "kv_retrieval": word_member,
    "kv_retrieval_prefix": word_member,
    "kv_retrieval_both": word_member,
    "longdialogue_qa_eng": speaker,
    "longbook_qa_eng": _best(qa_f1),
    "longbook_qa_chn": _best(_character_f1),
    "longbook_sum_eng": _best(rouge_lsum),
    "longbook_choice_eng": choice,
    "code_run": code_run,
    "code_debug": code_debug,
    "math_find": math_find,
    "math_calc": math_calc,
}
