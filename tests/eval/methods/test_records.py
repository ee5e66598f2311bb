"""PCA, pair energy and SparK against obvious loops: what is stored of a key, and what is read back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.channel_scores import pruned
from leank.eval.inference.decode import decode
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import prefill
from leank.eval.methods import build_method
from leank.eval.methods.bits.kq_svd import KQSVD
from leank.eval.methods.bits.pca import PCA
from leank.eval.methods.bits.spark import INTEGER, Records, SparK, query_norms
from leank.eval.methods.channels.pair_energy import PairEnergy
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, tiny_model

SIZES = {"sink": 2, "window": 6, "flush": 4}
ROWS = np.arange(2)


def spark_by_hand(key, norms, ratio, recovery):
    """A key [D] as a query reads it back, number by number."""
    dim = len(key)
    saliency = [float(norms[j]) * float(key[j]) ** 2 for j in range(dim)]
    gone = sorted(range(dim), key=lambda j: (saliency[j], -j))[: pruned(dim, ratio)]
    mean = sum(saliency[j] for j in gone) / max(1, len(gone))
    back = [float(x) for x in key]
    for j in gone:
        sign = 1 if key[j] > 0 else -1
        back[j] = sign * (mean / float(norms[j])) ** 0.5 if recovery == "mean" else 0.0
    return torch.tensor(back, dtype=torch.float64)


@settings(deadline=None, max_examples=30)
@given(
    dim=st.sampled_from([16, 64, 80]), ratio=st.floats(0.3, 0.9), recovery=st.sampled_from(["mean", "none"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]), seed=st.integers(0, 999),
)  # fmt: skip
def test_spark_reads_back_what_a_loop_over_channels_does(dim, ratio, recovery, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 3, 5, dim, generator=generator, dtype=torch.float64).to(dtype)
    norms = torch.rand(2, 3, dim, generator=generator, dtype=torch.float64) + 0.1
    size = SparK(ratio, recovery=recovery).width(dim, dtype.itemsize)
    code = Records(norms, dim - pruned(dim, ratio), size, INTEGER[dtype.itemsize], recovery == "mean")
    records = code.encode(keys, ROWS)
    assert records.dtype == dtype
    if size < dim:
        assert records.shape[-1] == size
    found, rough = code.decode(records, ROWS), {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)
    for row, head, token in np.ndindex(2, 3, 5):
        want = spark_by_hand(keys[row, head, token].double(), norms[row, head], ratio, recovery)
        torch.testing.assert_close(found[row, head, token], want, rtol=rough, atol=rough)  # m_t is rounded once


def test_a_spark_record_counts_bits_and_signs():
    assert SparK(0.5).width(128, 2) == 64 + 8 + 4 + 1
    assert SparK(0.5, recovery="none").width(128, 2) == 64 + 8
    assert SparK(0.05).width(64, 2) == 64  # no smaller than the key, which is stored as it is


def test_query_norms_average_the_group_and_leave_padding_out():
    model, lengths = tiny_model("llama"), (20, 3)
    ids, mask = left_padded(lengths, 0)
    found = prefill(model, ids, mask.bool(), 0, obs_queries=8)
    for layer in found.layers:
        norms = query_norms(layer, layer.real(found.real), 8)
        for row, length in enumerate(lengths):
            for head in range(HEADS):
                queries = layer.queries[row, 2 * head : 2 * head + 2, -min(length, 8) :].mean(0)
                torch.testing.assert_close(norms[row, head], queries.square().sum(0).sqrt())


def calibrated(choice):
    """(the choice, calibrated on one prompt of a tiny model; the model; the pass over that prompt)."""
    model, (_, tokenizer) = tiny_model("llama"), load_config(ModelConfig())
    ids, _ = left_padded([40], 1)
    found = prefill(model, ids, None, 0)
    choice.calibrate(lambda sample, queries: found, tokenizer, model.config)
    return choice, model, found


def test_pca_keeps_the_directions_of_most_energy():
    choice, _, found = calibrated(PCA(0.5, samples=1, length=512))
    for layer, basis in zip(found.layers, choice.basis(), strict=True):
        for keys, of_head in zip(layer.keys[0].double(), basis, strict=True):
            torch.testing.assert_close(of_head.T @ of_head, torch.eye(4, dtype=torch.float64))
            singular = torch.linalg.svdvals(keys)
            lost = (keys - keys @ of_head @ of_head.T).square().sum()
            torch.testing.assert_close(lost, singular[4:].square().sum())


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([0.25, 0.5, 0.75]), st.sampled_from([9, 40]), st.integers(0, 99))
def test_kq_svd_has_the_best_logits_of_its_rank(ratio, length, seed):
    """The error in K Q^T of two samples is that of their truncated SVD (Eckart and Young), also for few keys."""
    model, (_, tokenizer) = tiny_model("llama"), load_config(ModelConfig())
    ids, _ = left_padded([length] * 2, seed)
    passes = [prefill(model, ids[i : i + 1], None, 0, obs_queries=length) for i in range(2)]
    choice, left = KQSVD(ratio, samples=2, length=512), iter(passes)
    choice.calibrate(lambda sample, queries: next(left), tokenizer, model.config)
    kept = DIM - pruned(DIM, ratio)
    for index, head in np.ndindex(LAYERS, HEADS):
        layers = [one.layers[index] for one in passes]
        keys = torch.cat([layer.keys[0, head] for layer in layers])
        queries = torch.cat([layer.queries[0, 2 * head + i] for layer in layers for i in range(2)])
        code = choice.of_layer(index, passes[0])
        read = code.decode(code.encode(keys.expand(1, HEADS, -1, -1), ROWS), ROWS)[0, head]
        lost = ((keys - read) @ queries.T).square().sum()
        best = torch.linalg.svdvals(keys @ queries.T)[kept:].square().sum()
        torch.testing.assert_close(lost, best, rtol=1e-6, atol=1e-8 * float((keys @ queries.T).square().sum()))


def test_pair_energy_keeps_whole_pairs_and_no_mask_of_axes_keeps_more_than_pca():
    pairs, model, found = calibrated(PairEnergy(0.5, samples=1, length=512))
    basis = calibrated(PCA(0.5, samples=1, length=512))[0].basis()
    keep = pairs.keep_mask(found, model.config)
    assert torch.equal(keep[..., : DIM // 2], keep[..., DIM // 2 :])
    for index, head in np.ndindex(LAYERS, HEADS):
        keys = found.layers[index].keys[0, head]
        energy = [float(keys[:, [p, p + DIM // 2]].square().sum()) for p in range(DIM // 2)]
        best = sorted(range(DIM // 2), key=lambda p: -energy[p])[:2]
        assert keep[index, head, : DIM // 2].nonzero()[:, 0].tolist() == sorted(best)
        of_pairs = keys[:, keep[index, head]].square().sum()
        assert (keys @ basis[index, head]).square().sum() >= of_pairs * (1 - 1e-9)


@pytest.mark.parametrize("name", ["pca", "spark"])
@torch.no_grad()
def test_the_cache_attends_to_the_keys_that_are_read_back(name):
    """A padded batch, past moves out of the window, against each prompt alone, and what its middle holds."""
    chosen = build_method(
        name, {"bits": {"name": name, "ratio": 0.5, **({"samples": 1} if name == "pca" else {"queries": 3})}}, SIZES
    )
    if name == "pca":
        calibrated(chosen.bits)
    model, lengths, new = tiny_model("llama"), (34, 19), 14
    ids, mask = left_padded(lengths, 5)

    def answer(ids, real):
        found = prefill(model, ids, real, new, chosen.obs_queries)
        cache, many = chosen.cache(model, found), [new] * len(ids)
        return decode(model, cache, found.logits, real, found.lengths, [], many, many)[0], cache, found

    together, cache, found = answer(ids, mask.bool())
    for row, length in enumerate(lengths):
        assert [together[row]] == answer(ids[row : row + 1, -length:], None)[0]
    for index, layer in enumerate(cache.compressed):
        code = layer.store.prompt.codec
        for row, length in enumerate(lengths):
            keys = found.layers[index].keys[row, :, ids.shape[1] - length + 2 : ids.shape[1] - 6]
            for head in range(HEADS):
                read = layer.store.prompt.read(row, head)[0]
                if name == "pca":
                    want = keys[head] @ code.basis[head] @ code.basis[head].T
                else:
                    want = torch.stack([spark_by_hand(k, code.norms[row, head], 0.5, "mean") for k in keys[head]])
                torch.testing.assert_close(read, want, rtol=1e-9, atol=1e-9)
    norms = LAYERS * len(lengths) * HEADS * DIM * 8 * (name == "spark")  # in float64
    assert cache.memory().extra == norms


def test_records_take_no_choice_of_channels():
    model = tiny_model("llama")
    chosen = build_method("x", {"bits": {"name": "spark"}, "channels": {"name": "think", "queries": 3}}, SIZES)
    ids, _ = left_padded([40], 1)
    with pytest.raises(ValueError, match="keep all channels; leave out the choice of channels"):
        chosen.cache(model, prefill(model, ids, None, 0, obs_queries=32))
