"""The schema of each benchmark: what a line of its files must hold. `eval.benchmarks.rules.checked` applies it."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from eval.benchmarks import gsm_infinite, infinitebench, longbench, mmlu
from eval.benchmarks.rules import (
    ANY_TEXT,
    COUNT,
    FOUR_TEXTS,
    NAME,
    TEXT,
    TEXTS,
    WHOLE,
    Rule,
    Schema,
    alone,
    is_digits,
    is_integer,
    is_number,
    is_text_or_texts,
    is_texts,
    is_whole,
    one_of,
    optional,
)
from eval.metrics.gsm_infinite import gold_answer


def longbench_line(task: str) -> Schema:
    """Return the schema of a task, "_e" or not."""
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
        "length": optional(WHOLE),
        "dataset": optional(TEXT),
        "_id": optional(NAME),
    }
    return Schema(fields, whole, ("_id",))


def infinitebench_line(task: str) -> Schema:
    """Return the schema of a task. Labels of code_run, math_find and math_calc are numbers, of all others texts."""
    choice = task in infinitebench.CHOICES
    asked = any(field in infinitebench.assets()["completion"][task] for field in ("{input}", "{question}", "{func}"))
    fields = {
        "context": TEXT,
        "input": TEXT if asked else ANY_TEXT,
        "answer": _LABELS.get(task, Rule("a text that is not blank, or a list of such texts", is_text_or_texts)),
        "id": optional(NAME),
    }
    if choice:
        fields["options"] = FOUR_TEXTS
    return Schema(fields, _right_option if choice else lambda data: None, ("id",))


def math500_line() -> Schema:
    """Return the schema of MATH-500."""
    fields = {"problem": TEXT, "answer": TEXT, "subject": optional(TEXT), "level": optional(NAME)}
    return Schema({**fields, "unique_id": optional(NAME)}, same=("unique_id",))


def mmlu_line() -> Schema:
    """Return the schema of MMLU."""
    fields = {"question": TEXT, "choices": FOUR_TEXTS, "answer": Rule("a letter A-D or a number 0-3", _letter)}
    return Schema(fields)


def gsm_infinite_line(data: Mapping[str, object]) -> Schema:
    """Return the schema of a problem; "answer_list" makes it a symbolic one."""
    fields = {"problem": TEXT, "question": TEXT, "op": COUNT, "length": optional(NAME), "id": optional(NAME)}
    same = ("id", "problem", "question")
    if "answer_list" in data:
        return Schema({**fields, "answer_list": Rule("a list of names such as V12", _variables)}, same=same)
    fields |= {
        "template": Rule(one_of(gsm_infinite.TEMPLATES), gsm_infinite.TEMPLATES.__contains__),
        "mode": Rule(one_of(gsm_infinite.MODES), gsm_infinite.MODES.__contains__),
        "answer": optional(Rule("a whole number", is_integer)),
        "solution": optional(TEXT),
        "d": optional(COUNT),
    }
    return Schema(fields, _one_answer, same)


def _right_option(data: Mapping[str, Any]) -> str | None:
    """Say what is wrong with multiple choice: the answer, and its letter if given, must be of the options."""
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
    """Say what is wrong with a realistic problem: it has an answer, a solution that states it, or both alike."""
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


def _letter(value: object) -> bool:
    return (is_whole(value) and 0 <= value < 4) or (isinstance(value, str) and value in tuple(mmlu.LETTERS))


def _variables(value: object) -> bool:
    return is_texts(value) and all(re.fullmatch(r"V[0-9]+", name) for name in value)


def _values(value: object) -> bool:
    inner = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    return isinstance(inner, list) and bool(inner) and all(map(is_whole, inner))


_LABELS = {
    **dict.fromkeys(("passkey", "number_string"), Rule("the digits as a text", alone(is_digits))),
    "code_run": Rule("a whole number", alone(is_whole)),
    "math_find": Rule("a number", alone(is_number)),
    "math_calc": Rule("a list of whole numbers", _values),
}
