"""The dense pass over prompts: what it keeps of them."""

import torch

from leank.eval.inference.prefill import pad_left, prefill
from tests.helpers.cache_oracle import tiny_model


def test_observed_queries_are_those_of_a_pass_in_chunks_and_keep_no_others_in_memory():
    model = tiny_model("llama")
    ids, real = pad_left([torch.arange(5, 45).tolist(), torch.arange(7, 37).tolist()], 0, "cpu")
    whole, chunked = (prefill(model, ids, real, 4, obs_queries=6, chunk=chunk) for chunk in (None, 4))
    for one, other in zip(whole.layers, chunked.layers, strict=True):
        assert one.queries.shape[2] == 6
        torch.testing.assert_close(one.queries, other.queries)
        assert one.queries.untyped_storage().nbytes() == one.queries.nbytes
