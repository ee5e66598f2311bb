"""Several turns: a question about a document on which others have been asked, and answered, before."""

import random
from dataclasses import dataclass, field, replace

from leank.data_gen.task import LaidOut, Layout, Request
from leank.data_gen.tasks.niah import Niah


@dataclass(frozen=True)
class Turns(LaidOut):
    """The questions of another task one after the other: each follows the earlier ones with their answers.

    The turns are plain text, so that any model can be trained on them.

    of: the task that makes document and questions.
    """

    of: LaidOut = field(default_factory=lambda: Niah("needle"))
    max_new_tokens: int = 128

    def layout(self, request: Request, rng: random.Random) -> Layout:
        made = self.of.layout(request, rng)
        before, asked = "", []
        for one in made.questions:
            asked.append(replace(one, question=before + one.question))
            before += one.question + one.answer_prefix + one.target
        return replace(made, questions=tuple(asked))
