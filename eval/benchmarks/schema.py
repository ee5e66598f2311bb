"""What a line of each benchmark's files must hold. Every line of every file is checked here, once, and nowhere else.

A line that is let through can be asked and can be answered rightly: what a task needs is there, has its type, and is
not empty. Fields that nothing reads may hold anything.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eval.benchmarks import gsm_infinite, infinitebench, longbench, mmlu
from eval.benchmarks.source import Line
from eval.metrics.gsm_infinite import gold_answer

Test = Callable[[Any], bool]
Whole = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class Rule:
    """What one field must hold.

    must: what a value has to be, in words that follow "must be".
    holds: whether a value is that.
    needed: whether the field may be neither missing nor null.
    """

    must: str
    holds: Test
    needed: bool = True


@dataclass(frozen=True)
class Schema:
    """What one line must hold.

    fields: a rule for each field that is read.
    whole: says what is wrong with fields that are right one by one; None if nothing is.
    same: fields that name a sample; two lines that agree in them, the first not being empty, are one sample twice.
    """

    fields: Mapping[str, Rule]
    whole: Whole = lambda data: None
    same: tuple[str, ...] = ()


def checked(lines: Iterable[Line], schema: Schema | Callable[[Mapping[str, Any]], Schema]) -> Iterator[Line]:
    """The lines as they are.

    schema: of all lines, or a function from a line's object to its own. Raises ValueError, "FILE, line N: what is
    wrong; what to do", at the first wrong line.
    """
    seen: dict[str, int] = {}
    for line in lines:
        data = line.data
        wanted = schema if isinstance(schema, Schema) else schema(data)
        for name, rule in wanted.fields.items():
            if data.get(name) is None:
                if rule.needed:
                    raise line.error(f'"{name}" is {"null" if name in data else "missing"}; it must be {rule.must}')
            elif not rule.holds(data[name]):
                raise line.error(f'"{name}" is {reprlib.repr(data[name])}; it must be {rule.must}')
        if (wrong := wanted.whole(data)) is not None:
            raise line.error(wrong)
        if wanted.same and data.get(wanted.same[0]) not in (None, ""):
            name = repr([data.get(field) for field in wanted.same])
            if name in seen:
                what = f'"{wanted.same[0]}" is {reprlib.repr(data[wanted.same[0]])}, as in line {seen[name]}'
                raise line.error(f"{what}: one sample would count twice", "take one of the two out")
            seen[name] = line.number
        yield line


def longbench_line(task: str) -> Schema:
    """The schema of a task, "_e" or not."""
    name = task.removesuffix("_e")
    classes = name in ("trec", "lsht")

    def whole(data: Mapping[str, Any]) -> str | None:
        if data.get("dataset") is not None and data["dataset"].removesuffix("_e") != name:
            return f'"dataset" is {data["dataset"]!r}, which is not the task {task!r}'
        if classes and not set(data["answers"]) & set(data["all_classes"]):
            return f'"answers" is {reprlib.repr(data["answers"])}; one must be among "all_classes"'
        return None

    fields = {
        "context": TEXT,
        "input": TEXT if "{input}" in longbench.prompts()[name] else ANY_TEXT,
        "answers": TEXTS,
        "all_classes": Rule(TEXTS.must, TEXTS.holds, needed=classes),
        "length": _optional(WHOLE),
        "dataset": _optional(TEXT),
        "_id": _optional(NAME),
    }
    return Schema(fields, whole, ("_id",))


def infinitebench_line(task: str) -> Schema:
    """The schema of a task. Labels of code_run, math_find and math_calc are numbers, of all others texts."""
    choice = task in infinitebench.CHOICES
    asked = any(field in infinitebench.assets()["completion"][task] for field in ("{input}", "{question}", "{func}"))
    fields = {
        "context": TEXT,
        "input": TEXT if asked else ANY_TEXT,
        "answer": _LABELS.get(task, Rule("a text that is not blank, or a list of such texts", _text_or_texts)),
        "id": _optional(NAME),
    }
    if choice:
        fields["options"] = FOUR_TEXTS
    return Schema(fields, _right_option if choice else lambda data: None, ("id",))


def math500_line() -> Schema:
    """The schema of MATH-500."""
    fields = {"problem": TEXT, "answer": TEXT, "subject": _optional(TEXT), "level": _optional(NAME)}
    return Schema({**fields, "unique_id": _optional(NAME)}, same=("unique_id",))


def mmlu_line() -> Schema:
    """The schema of MMLU."""
    fields = {"question": TEXT, "choices": FOUR_TEXTS, "answer": Rule("a letter A-D or a number 0-3", _letter)}
    return Schema(fields)


def gsm_infinite_line(data: Mapping[str, Any]) -> Schema:
    """The schema of a problem; "answer_list" makes it a symbolic one."""
    fields = {"problem": TEXT, "question": TEXT, "op": COUNT, "length": _optional(NAME), "id": _optional(NAME)}
    same = ("id", "problem", "question")
    if "answer_list" in data:
        return Schema({**fields, "answer_list": Rule("a list of names such as V12", _variables)}, same=same)
    fields |= {
        "template": Rule(_one_of(gsm_infinite.TEMPLATES), gsm_infinite.TEMPLATES.__contains__),
        "mode": Rule(_one_of(gsm_infinite.MODES), gsm_infinite.MODES.__contains__),
        "answer": _optional(Rule("a whole number", _integer)),
        "solution": _optional(TEXT),
        "d": _optional(COUNT),
    }
    return Schema(fields, _one_answer, same)


def _right_option(data: Mapping[str, Any]) -> str | None:
    """Multiple choice: the answer is one of the options, and where its letter is given, that one."""
    answer, options = data["answer"], data["options"]
    answers = [answer] if isinstance(answer, str) else answer
    found = [letter for letter, option in zip(mmlu.LETTERS, options, strict=True) if option == answers[0]]
    if not found:
        return f'"answer" is {reprlib.repr(answers[0])}, which is none of the options {reprlib.repr(options)}'
    if len(answers) == 2 and answers[1] in found:
        return None
    if len(answers) > 1:
        return f'"answer" is {reprlib.repr(answer)}; it must be the right option, or that with its letter'
    return None if len(found) == 1 else f'"options" holds the answer {reprlib.repr(answers[0])} more than once'


def _one_answer(data: Mapping[str, Any]) -> str | None:
    """Realistic problems: an answer, a solution that ends in it, or both, which then agree."""
    answer, solution = data.get("answer"), data.get("solution")
    if solution is None:
        return None if answer is not None else '"answer" and "solution" are missing; one of them must state the answer'
    try:
        stated = gold_answer(solution)
    except ValueError as error:
        return None if answer is not None else f'"solution" states no answer ({" ".join(str(error).split())[:120]})'
    if answer is not None and int(answer) != stated:
        return f'"answer" is {reprlib.repr(answer)}, and "solution" states {stated}'
    return None


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_text, value))


def _text_or_texts(value: Any) -> bool:
    return _text(value) or _texts(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


def _integer(value: Any) -> bool:
    return _whole(value) or (isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value) is not None)


def _letter(value: Any) -> bool:
    return (_whole(value) and 0 <= value < 4) or (isinstance(value, str) and value in tuple(mmlu.LETTERS))


def _variables(value: Any) -> bool:
    return _texts(value) and all(re.fullmatch(r"V[0-9]+", name) for name in value)


def _digits(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9]+", value) is not None


def _alone(holds: Test) -> Test:
    """The value, or a list of that value alone."""
    return lambda value: holds(value[0] if isinstance(value, list) and len(value) == 1 else value)


def _values(value: Any) -> bool:
    inner = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    return isinstance(inner, list) and bool(inner) and all(map(_whole, inner))


def _optional(rule: Rule) -> Rule:
    return Rule(rule.must, rule.holds, needed=False)


def _one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


ANY_TEXT = Rule("a text", lambda value: isinstance(value, str))
TEXT = Rule("a text that is not blank", _text)
TEXTS = Rule("a list of texts that are not blank", _texts)
FOUR_TEXTS = Rule("a list of four texts that are not blank", lambda value: _texts(value) and len(value) == 4)
WHOLE = Rule("a whole number of at least 0", lambda value: _whole(value) and value >= 0)
COUNT = Rule("a whole number of at least 1", lambda value: _whole(value) and value >= 1)
NAME = Rule("a text or a whole number", lambda value: isinstance(value, str) or _whole(value))
_LABELS = {
    **dict.fromkeys(("passkey", "number_string"), Rule("the digits as a text", _alone(_digits))),
    "code_run": Rule("a whole number", _alone(_whole)),
    "math_find": Rule("a number", _alone(_number)),
    "math_calc": Rule("a list of whole numbers", _values),
}
