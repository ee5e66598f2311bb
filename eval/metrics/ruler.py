"""RULER: recall of reference strings in the reply.

Source: NVIDIA/RULER c3f5e3b, scripts/eval (Apache-2.0). NIAH, vt, cwe and fwe use `string_match_all`, QA uses
`string_match_part`. Matching is by substring, so the reference "no" is found in "know".
"""

import re
from collections.abc import Sequence

from leank.data_gen.amount import amount

_CONTROL = re.compile(r"[\x00-\x1f]")


def postprocess(text: str) -> str:
    """Strip the reply and turn every control character (tabs too) into a newline. Do this before matching."""
    return _CONTROL.sub("\n", text.strip()).strip()


def string_match_all(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean over samples of the share of references that occur in the reply, 0-100, two decimals.

    predictions: n postprocessed replies; references: n non-empty lists of strings. Case is ignored with lower(), which
    is not casefold(): "STRASSE" does not hold "straße".
    Raises ValueError for no samples, lists of different length or a sample without references.
    """
    _check(predictions, references)
    shares = [sum(_found(p, r) for r in refs) / len(refs) for p, refs in zip(predictions, references, strict=True)]
    return round(sum(shares) / len(predictions) * 100, 2)


def string_match_part(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Share of samples whose reply holds at least one reference, 0-100, two decimals; else as `string_match_all`."""
    _check(predictions, references)
    hits = [max(_found(p, r) for r in refs) for p, refs in zip(predictions, references, strict=True)]
    return round(sum(hits) / len(predictions) * 100, 2)


def _found(prediction: str, reference: str) -> float:
    return 1.0 if reference.lower() in prediction.lower() else 0.0


def _check(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if isinstance(predictions, str) or any(isinstance(refs, str) for refs in references):
        raise ValueError("RULER scores lists: predictions as [str, ...], references as [[str, ...], ...]")
    if len(predictions) != len(references):
        given = amount(len(predictions), "prediction")
        raise ValueError(f"{given} for {amount(len(references), 'list')} of references; need one each")
    if not predictions:
        raise ValueError("no predictions to score: RULER averages over at least one sample")
    for i, refs in enumerate(references):
        if not refs:
            raise ValueError(f"sample {i} has no references; every RULER sample needs at least one")
