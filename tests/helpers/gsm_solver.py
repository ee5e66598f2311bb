"""Solves a GSM-Infinite problem from nothing but its text. Knows nothing of the generator's graphs."""

import re
from dataclasses import dataclass, field

_GRAND = re.compile(r"newborn|teachers from|nominations from")


@dataclass
class Text:
    """defined: quantity -> (constant or None, "plus" | "times" | None, difference?, quantities)."""

    defined: dict[str, tuple] = field(default_factory=dict)
    given: list[tuple[str, int]] = field(default_factory=list)
    unknown: str | None = None
    kinds: dict[str, list[str]] = field(default_factory=dict)  # place -> kinds whose number is mentioned there


def normal(name: str) -> str:
    """A quantity's name without its article."""
    return re.sub(r"^[Tt]he ", "", name.strip())


def read(problem: str, question: str) -> tuple[Text, str]:
    """The statements of a problem, and the quantity asked for."""
    text = Text()
    for sentence in re.split(r"\.\s+", problem.strip().rstrip(".") + ". ")[:-1]:
        loose = re.fullmatch(r"(.+?) (?:is not given, but it|exists, and its number|)\s*is greater than 0", sentence)
        if loose:
            assert text.unknown is None, "two unknowns"
            text.unknown = normal(loose[1])
            mention(text, text.unknown)
            continue
        name, value = (part.strip() for part in sentence.split(" equals ", 1))
        name = normal(name)
        mention(text, name)
        if is_total(name):
            text.given.append((name, int(value)))
            continue
        found = expression(value)
        assert text.defined.setdefault(name, found) == found, f"{name} is defined twice"
        for ref in found[3]:
            mention(text, ref)
    asked = re.fullmatch(r"What is (.+)\?", question)
    if asked:
        return text, normal(asked[1])
    many = re.fullmatch(r"How many (.+) does (.+) have\?", question)
    assert many, question
    return text, f"number of {many[1]} in {many[2]}"


def is_total(name: str) -> bool:
    return name.startswith("total ")


def mention(text: Text, name: str) -> None:
    match = re.fullmatch(r"number of (.+) in (.+?)", name)
    if match:
        kinds = text.kinds.setdefault(match[2], [])
        if match[1] not in kinds:
            kinds.append(match[1])


def expression(value: str) -> tuple:
    if value.isdigit():
        return int(value), None, False, ()
    match = re.fullmatch(r"(?:(\d+) (plus|times) )?(?:the (sum of|difference between) )?(the .+)", value)
    assert match, value
    refs = tuple(normal(r) for r in re.split(r", and (?=the )|, (?=the )| and (?=the )", match[4]))
    assert len(refs) == 1 or match[3], value
    return int(match[1]) if match[1] else None, match[2], match[3] == "difference between", refs


def parts(text: Text, name: str) -> list[tuple[str, ...]]:
    """What a total adds up: quantities, or pairs of them whose product counts."""
    place = name.split(" in ", 1)[1]
    kinds = text.kinds.get(place, [])
    if not _GRAND.search(name):
        return [(f"number of {kind} in {place}",) for kind in kinds]
    averages = {q for q in text.defined if q.startswith("average")}
    pairs = []
    for kind in kinds:
        average = [q for q in averages if q.endswith(f" per {kind} in {place}")]
        assert len(average) == 1, f"no average of {kind} in {place}"
        pairs.append((f"number of {kind} in {place}", average[0]))
    return pairs


def value_of(text: Text, name: str, values: dict[str, int], path: tuple[str, ...] = ()) -> int:
    """A quantity's value, from what is known; KeyError where its definition is missing."""
    if name not in values:
        assert name not in path, f"{name} depends on itself"
        deeper = (*path, name)
        if is_total(name):
            total = 0
            for part in parts(text, name):
                product = 1
                for q in part:
                    product *= value_of(text, q, values, deeper)
                total += product
            values[name] = total
        else:
            constant, how, difference, refs = text.defined[name]
            found = [value_of(text, r, values, deeper) for r in refs]
            value = found[0] - found[1] if difference else sum(found)
            values[name] = constant if not refs else (
                value if how is None else constant * value if how == "times" else constant + value
            )  # fmt: skip
    return values[name]


def edges(text: Text, name: str, seen: set[str]) -> int:
    """Quantities and numbers named on the way to a quantity."""
    if name in seen:
        return 0
    seen.add(name)
    if name == text.unknown:
        return 1
    if is_total(name):
        refs = [q for part in parts(text, name) for q in part]
        own = len(refs)
    else:
        constant, _, _, refs = text.defined[name]
        own = len(refs) + (constant is not None)
    return own + sum(edges(text, r, seen) for r in refs)


def solve(problem: str, question: str, most: int = 400) -> tuple[list[int], int]:
    """All answers that the text allows (unknowns up to `most`), and the edges on the way."""
    text, asked = read(problem, question)
    if text.unknown is None:
        return [value_of(text, asked, {})], edges(text, asked, set())
    assert asked == text.unknown
    answers = []
    for guess in range(1, most):
        values = {text.unknown: guess}
        if all(value_of(text, name, values) == value for name, value in text.given):
            answers.append(guess)
    (given,) = [name for name, _ in text.given]
    return answers, edges(text, given, set())
