"""GSM-Infinite prompts (the problems come from a generator or a file).

Wording as in Infini-AI-Lab/gsm_infinite caa5388: scores depend on it. The three headers say the same of other nouns,
so one template fills them; spelling and grammar are the benchmark's.
"""

from collections.abc import Mapping
from typing import Any

from leank.eval.benchmarks.row import Message, Row, kept
from leank.eval.metrics.gsm_infinite import gold_answer

MODES = ("normalforward", "forwardreverse")
MAX_NEW_TOKENS = 4096
SYSTEM = "You are a helpful assistant"
REVERSE_HINT = " The following questions might be easier to solve by equations."

_HEADER = (
    "Answer the questions below. {preface}Note: the total number of {thing}s in one {place} refers to sum of all types"
    " of {thing}s ever mentioned for the specific {place} throughout the problem{excluding}. IMPORTANT: if the a type"
    " of {kind} is never mentioned for a location for that specific problem, assume its INEXISTENCE in that location"
    " (number in the location = 0). Previous problems {kind} quantities are not applicable for the present one. The"
    " average number of {part} of the same type of {owner} might vary across different locations. The {total} refers"
    " to the sum of the TOTAL {parts} (not average {not_average}) from all {source} mentioned for that specific"
    " location. Hint: the {hint}. Each question is self-contained INDEPENDENT of the others. Quantities of previous"
    " problems is NOT correct for the new problem, so quantities of {redo} MUST be recalculated for each question!"
    " Final answer needs to be presented in the format 'Answer: xxx', where xxx is the number you calculated."
)
_NOUNS = {
    "crazy_zootopia": {
        "preface": "",
        "thing": "adult animal",
        "place": "location",
        "excluding": " EXCLUDING their number of newborn children",
        "kind": "animal",
        "part": "newborn children",
        "owner": "animal",
        "total": "total newborn animal children of a location",
        "parts": "newborn children",
        "not_average": "newborn children",
        "source": "adult animals",
        "hint": "total newborn children of one type of animal in a location equals the average children per that animal"
        " in location times the number of that animal in location",
        "redo": "animals",
    },
    "teachers_in_school": {
        "preface": "",
        "thing": "school",
        "place": "location",
        "excluding": "",
        "kind": "school",
        "part": "teachers",
        "owner": "school",
        "total": "number of teachers from all schools of a location",
        "parts": "teachers",
        "not_average": "number of teachers",
        "source": "type of schools",
        "hint": "number of teachers of one type of school in a location equals the average teacher per that type of"
        " schools in location times the number of that type of schools in location",
        "redo": "schools or teachers",
    },
    "movie_festival_awards": {
        "preface": "Commedy, drama, and thriller are all movies types. ",
        "thing": "movie",
        "place": "movie festival",
        "excluding": "",
        "kind": "movies",
        "part": "nominations",
        "owner": "festival",
        "total": "number of total movie nominations from all movies of a festival",
        "parts": "movie nominations",
        "not_average": "number of nominations",
        "source": "types of movies",
        "hint": "number of total movie nomination of one type of movie in a festival equals the average nomination per"
        " that type of movie in festival times the number of that type of movies in festival",
        "redo": "movies or nominations",
    },
}
TEMPLATES = tuple(_NOUNS)


def header(template: str, mode: str) -> str:
    """The instructions before a realistic problem. Raises ValueError for an unknown template or mode."""
    if template not in _NOUNS:
        raise ValueError(f"template={template!r}: choose one of {', '.join(TEMPLATES)}")
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose one of {', '.join(MODES)}")
    return _HEADER.format(**_NOUNS[template]) + (REVERSE_HINT if mode == "forwardreverse" else "")


def build_messages(problem: str, question: str, template: str, mode: str) -> list[Message]:
    """The official conversation: system, header, problem. Header and problem are two user turns in a row."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": header(template, mode)},
        {"role": "user", "content": f"Problem: {problem} Question: {question} Solution: "},
    ]


def realistic_row(data: Mapping[str, Any], merge_turns: bool = False) -> Row:
    """One Medium or Hard problem as a `Row`.

    data: "problem", "question", "template", "mode", "solution" or "answer"; "id", "op", "length", "d" are kept.
    merge_turns: put header and problem into one user turn, for chat templates that want turns to alternate.
    """
    system, instructions, ask = build_messages(data["problem"], data["question"], data["template"], data["mode"])
    context = f"Problem: {data['problem']} "
    answer = data["answer"] if data.get("answer") is not None else gold_answer(data["solution"])
    return Row(
        task="gsm_infinite",
        id=str(data.get("id", "")),
        context=f"{instructions['content']} {context}" if merge_turns else context,
        question=ask["content"].removeprefix(context),
        answers=[int(answer)],
        max_new_tokens=MAX_NEW_TOKENS,
        metric="gsm_infinite",
        preamble=(system,) if merge_turns else (system, instructions),
        meta=kept(data, "op", "template", "mode", "length", "d"),
    )


def symbolic_row(data: Mapping[str, Any]) -> Row:
    """One symbolic problem as a `Row`. data: "problem", "question", "answer_list"; "id", "op", "length" are kept."""
    return Row(
        task="gsm_infinite_symbolic",
        id=str(data.get("id", "")),
        context=f"<context>\n{data['problem']}\n</context>",
        question=f"\n\n{data['question']}",
        answers=list(data["answer_list"]),
        max_new_tokens=MAX_NEW_TOKENS,
        metric="gsm_symbolic",
        meta=kept(data, "op", "n", "length"),
    )
