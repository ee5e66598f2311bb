"""Random decoders, masks and uses of a cache, held to a plain forward over each sequence alone."""

import pytest

from tests.helpers.random_families import FAMILIES, TOLERANCE, check, check_trained

TRAINED = ("gemma3_text", "gemma4_text", "gpt_oss")


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_cache_is_a_plain_forward_with_channels_zeroed(kind):
    assert max(check(kind, seed).pruned for seed in range(5)) > 10 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_three_hundred_cases(kind):
    """`python -m tests.helpers.random_families 300` says more of them."""
    assert sum(check(kind, seed).pruned > 10 * TOLERANCE for seed in range(300)) > 90


@pytest.mark.parametrize("kind", TRAINED)
def test_a_cache_reads_what_the_student_read(kind):
    for seed in range(4):
        check_trained(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_a_cache_reads_what_a_hundred_students_read(kind):
    for seed in range(100):
        check_trained(kind, seed)
