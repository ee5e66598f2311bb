"""Generation with a compressed cache gives the tokens and logits of a dense cache that zeroes the pruned channels."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leank.eval.cache import compressed_cache
from leank.eval.cache.hook import ATTENTION
from tests.helpers.cache_oracle import FAMILIES, SEEDS, left_padded, oracle_cache, random_keep, run, tiny_model

SIZES = st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(1, 6))
LENGTHS = st.lists(st.integers(1, 45), min_size=1, max_size=3)


def compare(got, want):
    assert torch.equal(got[0], want[0])
    if want[1] is not None:
        torch.testing.assert_close(got[1], want[1], rtol=1e-8, atol=1e-8)


@settings(max_examples=16, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), LENGTHS, SIZES, st.integers(1, 25), SEEDS)
@example("llama", [40], (4, 8, 4), 25, 0)
@example("llama", [12, 13, 40], (4, 8, 4), 5, 1)  # one row just short of a middle, one just past, one long
@example("qwen2", [1], (3, 2, 2), 12, 2)  # starts in the sink
def test_generate_is_the_dense_oracles(family, lengths, sizes, new_tokens, seed):
    model, keep = tiny_model(family), random_keep(seed)
    ids, mask = left_padded(lengths, seed)
    want = run(model, oracle_cache(keep, *sizes), ids, mask, new_tokens, "oracle")
    cache = compressed_cache(model, keep, *sizes, backend="torch")
    compare(run(model, cache, ids, mask, new_tokens, ATTENTION), want)
    assert cache.get_seq_length() == ids.shape[1] + new_tokens - 1


def test_the_oracle_can_tell_pruned_from_dense():
    model, keep = tiny_model("llama"), random_keep(3)
    ids, mask = left_padded([40], 3)
    pruned = run(model, oracle_cache(keep, 2, 4, 2), ids, mask, 20, "oracle")
    dense = run(model, oracle_cache(torch.ones_like(keep), 2, 4, 2), ids, mask, 20, "oracle")
    assert not torch.equal(pruned[0], dense[0])


@settings(max_examples=10, derandomize=True)
@given(st.sampled_from(sorted(FAMILIES)), LENGTHS, st.lists(st.integers(1, 20), min_size=3, max_size=3), SIZES, SEEDS)
def test_second_turn(family, first, second, sizes, seed):
    """A second prompt, itself left-padded, over the compressed first one: several queries at once, then more tokens."""
    model, keep, second = tiny_model(family), random_keep(seed), second[: len(first)]
    ids, mask = left_padded(first, seed)
    more_ids, more_mask = left_padded(second, seed + 1)
    results = []
    for attention in ("oracle", ATTENTION):
        cache = (
            oracle_cache(keep, *sizes)
            if attention == "oracle"
            else compressed_cache(model, keep, *sizes, backend="torch")
        )
        turn = run(model, cache, ids, mask, 6, attention)[0]
        answer = torch.ones(len(first), 6, dtype=mask.dtype)
        full, full_mask = torch.cat([turn, more_ids], 1), torch.cat([mask, answer, more_mask], 1)
        results.append(run(model, cache, full, full_mask, 9, attention))
    compare(results[1], results[0])


@settings(max_examples=8, derandomize=True)
@given(LENGTHS, SIZES, st.integers(1, 20), SEEDS)
def test_chunked_prefill(lengths, sizes, chunk, seed):
    """A prompt announced with expect() and fed in chunks is sealed as a whole."""
    model, keep = tiny_model("llama"), random_keep(seed)
    ids, mask = left_padded(lengths, seed)
    want = run(model, oracle_cache(keep, *sizes), ids, mask, 8, "oracle")
    cache = compressed_cache(model, keep, *sizes, backend="torch")
    cache.expect(ids.shape[1])
    compare(run(model, cache, ids, mask, 8, ATTENTION, prefill_chunk_size=chunk), want)


@pytest.mark.parametrize("lengths", [[30], [30, 7]])
def test_beam_search(lengths):
    model, keep, sizes = tiny_model("llama"), random_keep(5), (2, 5, 3)
    ids, mask = left_padded(lengths, 5)
    options = {"num_beams": 3, "num_return_sequences": 2}
    want = run(model, oracle_cache(keep, *sizes), ids, mask, 14, "oracle", **options)
    cache = compressed_cache(model, keep, *sizes, backend="torch")
    assert torch.equal(run(model, cache, ids, mask, 14, ATTENTION, **options)[0], want[0])


def test_a_long_generation_grows_the_middle_several_times():
    model, keep, sizes = tiny_model("llama"), random_keep(9, empty=0), (4, 16, 16)
    ids, mask = left_padded([50, 20], 9)
    cache = compressed_cache(model, keep, *sizes, backend="torch")
    run(model, cache, ids, mask, 300, ATTENTION)
    oracle = run(model, oracle_cache(keep, *sizes), ids, mask, 60, "oracle")[0]
    again = compressed_cache(model, keep, *sizes, backend="torch")
    assert torch.equal(run(model, again, ids, mask, 60, ATTENTION)[0], oracle)
    tail = cache.compressed[0].store.tail
    assert tail.length.max() > 250
    assert (tail.capacity[tail.capacity > 0] - tail.length[tail.capacity > 0]).max() <= 128 + 64
