"""InfiniteBench scorers.

Source: OpenBMB/InfiniteBench 88b3daa, src/compute_scores.py (MIT). Labels may stand alone or in a list, as in the
published files. Where the official code raises on a reply, the reply is wrong (0), which docs/benchmarks.md records.
"""

import re
from collections.abc import Callable, Sequence

from leank.eval.metrics.rouge import rouge_lsum
from leank.eval.metrics.text import normalize_chinese, qa_f1, token_f1

_SENTENCE_MARKS = "\n:\"'.,?!{}"


def score(task: str, prediction: str, answers: object, drop_first_number: bool = False) -> float:
    """Score one reply, 0-1.

    task: official name (also "kv_retrieval_prefix" and "_both"). answers: the row's label: a string or number or a
    list of them; [text, letter] for longbook_choice_eng, [function name, letter] for code_debug, the list of values
    for math_calc. drop_first_number: math_calc only; the official rule for GPT-4, which repeats the first operand.
    Raises ValueError for an unknown task or a label that does not fit it.
    """
    if task not in _SCORER_OF_TASK:
        raise ValueError(f"task={task!r} is not in InfiniteBench; choose one of {', '.join(sorted(_SCORER_OF_TASK))}")
    labels = list(answers) if isinstance(answers, Sequence) and not isinstance(answers, str) else [answers]
    if not labels:
        raise ValueError(f"task={task!r}: the label is empty; give the row's answer")
    if task == "math_calc":
        return math_calc(prediction, labels, drop_first_number)
    return float(_SCORER_OF_TASK[task](prediction, labels))


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
    name, letter = _pair("code_debug", labels)
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
    """Return whether the first unsigned number equals the label.

    A reply with a decimal number is wrong where the label is an integer; the official code ends in a ValueError there.
    """
    label = labels[0]
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise ValueError(f"math_find: the label must be a number, got {label!r}")
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None or (isinstance(label, int) and "." in found[0]):
        return False
    return (_integer(found[0]) if isinstance(label, int) else float(found[0])) == label


def math_calc(prediction: str, labels: Sequence[object], drop_first_number: bool = False) -> float:
    """Share of the expected values that the reply's unsigned integers match before the first mistake, 0-1."""
    expected = labels[0] if isinstance(labels[0], list) else labels
    numbers = [_integer(run) for run in re.findall("[0-9]+", prediction)][int(drop_first_number) :]
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


def _pair(task: str, labels: Sequence[str]) -> tuple[str, str]:
    if len(labels) != 2:
        raise ValueError(f"{task}: the label must be [name, letter], got {labels!r}")
    return labels[0], labels[1]


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
