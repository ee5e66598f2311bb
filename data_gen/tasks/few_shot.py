"""Many-shot labelling: what the labels mean has to be learned from hundreds of examples in the document."""

import random
from dataclasses import dataclass

from leank.data_gen import haystack
from leank.data_gen.task import Filler, LaidOut, Layout, Question, Request

HEADER = "Every word has a label. Learn from these examples how words are labelled.\n"
LINE = "{word}: {label}"
QUESTION = "\nLabel these words in the same way: {words}."
PREFIX = " The labels are:\n"
KINDS = ("nouns", "adjectives", "verbs")
ASKED = 6  # new words in a question


@dataclass(frozen=True)
class FewShot(LaidOut):
    """Words of three kinds (nouns, adjectives, verbs), whose labels are drawn for every document."""

    max_new_tokens: int = 96

    def layout(self, request: Request, rng: random.Random) -> Layout:
        """See `LaidOut.layout`; a unit of filler is an example, of words that no question asks for."""
        labels = dict(zip(KINDS, rng.sample(haystack.words("nouns"), len(KINDS)), strict=True))
        known = {kind: frozenset(haystack.words(kind)) for kind in KINDS}
        taken = {*labels.values()}

        def word() -> tuple[str, str]:
            """Draw a word of one kind only, and its label."""
            while True:
                kind = rng.choice(KINDS)
                found = rng.choice(haystack.words(kind))
                if found not in taken and not any(found in known[other] for other in KINDS if other != kind):
                    return found, labels[kind]

        questions = []
        for _ in range(request.questions):
            drawn = dict(word() for _ in range(ASKED))
            while len(drawn) < ASKED:
                drawn |= [word()]
            taken |= {*drawn}
            lines = tuple(LINE.format(word=a, label=b) for a, b in drawn.items())
            questions.append(Question(QUESTION.format(words=", ".join(drawn)), PREFIX, lines, "\n".join(lines)))

        def example() -> str:
            found, label = word()
            return LINE.format(word=found, label=label)

        return Layout(HEADER, (), tuple(questions), Filler.lines(request, example), list)
