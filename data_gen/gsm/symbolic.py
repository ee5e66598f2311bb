"""Problems in the form of GSM-Infinite's symbolic subset: assignments of variables, some of which equal a value.

`op` variables follow from the one number that is given. The filler depends on a variable without a value, so nothing
in it can be derived. A problem has op + int(length * 828 / 9668) variables in all.
"""

import random
from collections import Counter
from dataclasses import dataclass

QUESTION = (
    "The context lists assignments that all hold at once, in no particular order.\n"
    "Which of the variables whose value can be derived from them are equal to {value}?\n"
    "Work it out step by step, then name these variables in a last sentence."
)


@dataclass(frozen=True)
class SymbolicProblem:
    """A problem as `eval` reads it."""

    problem: str  # problem, question: the text
    question: str
    answer_list: tuple[str, ...]  # names of the variables that equal the value in the question
    op: int  # variables that can be derived
    n: int  # variables in all
    length: int  # the nominal length in tokens
    id: str  # unique among all problems


def symbolic(op: int, seed: int, index: int, length: int = 0) -> SymbolicProblem:
    """Make one problem (see `SymbolicProblem`); the same arguments give the same one. length: 0 is without filler."""
    rng = random.Random(f"gsm_symbolic/{op}/{length}/{seed}/{index}")
    n = op + int(length * 828 / 9668)
    names = [f"V{number:06d}" for number in rng.sample(range(1_000_000), n)]
    core, filler = names[:op], names[op:]
    values = {core[0]: rng.randint(op, op + 9)}  # high enough for op - 1 steps down to stay positive
    lines = [f"assign {core[0]} = {values[core[0]]}."]
    for i, name in enumerate(core[1:], 1):
        parent = rng.choice(core[:i])
        step = rng.choice((-1, 0, 1))
        values[name] = values[parent] + step
        lines.append(_assign(name, parent, step))
    lines += [_assign(name, rng.choice(filler[:i]), rng.choice((-1, 0, 1))) for i, name in enumerate(filler) if i]
    rng.shuffle(lines)
    asked = rng.choice(sorted(Counter(values.values())))
    return SymbolicProblem(
        problem=" ".join(lines),
        question=QUESTION.format(value=asked),
        answer_list=tuple(name for name in core if values[name] == asked),
        op=op, n=n, length=length, id=f"symbolic/{length}/{op}/{seed}/{index}",
    )  # fmt: skip


def _assign(name: str, parent: str, step: int) -> str:
    return f"assign {name} = {parent}{('', ' + 1', ' - 1')[step]}."
