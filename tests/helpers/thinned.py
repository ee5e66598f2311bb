"""Sweeps over more cases than every change needs: some of them run by default, all of the others with `-m slow`."""

from collections.abc import Callable, Collection, Iterable

import pytest
from hypothesis import given, settings


def thinned(cases: Iterable[object], keep: Collection[int] | int = 3) -> list[object]:
    """The cases of a parametrisation, of which all but those numbered in `keep` (or each keep-th) are marked slow."""
    found = []
    for number, case in enumerate(cases):
        stays = number % keep == 0 if isinstance(keep, int) else number in keep
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if stays else pytest.param(*values, marks=pytest.mark.slow))
    return found


def at_length(test: Callable[..., None], examples: int) -> Callable[..., None]:
    """The same property over so many examples, with the marks of `test`, and slow."""
    longer = given(**test.hypothesis._given_kwargs)(test.hypothesis.inner_test)
    longer = settings(max_examples=examples, deadline=None, derandomize=True)(longer)
    longer.pytestmark = [*getattr(test, "pytestmark", []), pytest.mark.slow.mark]
    return longer
