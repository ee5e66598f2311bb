"""What transformers asks of a cache layer beyond generate(), the bytes it counts, and the errors it raises."""

import warnings
from dataclasses import asdict

import pytest
import torch
from transformers import DynamicCache

from leank.eval.cache import CompressedLayer, Sizes, bytes_per_row, compressed_cache, max_batch
from leank.eval.cache.attention import backend
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.memory import Memory
from leank.eval.cache.storage.channels import KeptChannels
from leank.mask import ChannelMask
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, oracle_cache, random_keep, run, tiny_model

SIZES = (2, 6, 3)


def prefilled(model, keep, ids, mask=None, sizes=SIZES):
    cache = compressed_cache(model, keep, *sizes, backend="torch")
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


def step(model, cache, token):
    model.set_attn_implementation(ATTENTION)
    with torch.no_grad():
        return model(token, past_key_values=cache).logits


def test_reset_makes_it_new():
    model, keep = tiny_model("llama"), random_keep(1)
    ids, mask = left_padded([20, 11], 1)
    cache = compressed_cache(model, keep, *SIZES, backend="torch")
    first = run(model, cache, ids, mask, 12, ATTENTION)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.memory().total == 0
    assert torch.equal(run(model, cache, ids, mask, 12, ATTENTION)[0], first[0])


def test_crop_takes_back_tokens_since_the_last_move():
    model, keep = tiny_model("llama"), random_keep(2)
    ids, _ = left_padded([24], 2)
    cache = prefilled(model, keep, ids[:, :20])
    step(model, cache, ids[:, 20:21])
    want = step(model, cache, ids[:, 21:22])  # window holds 8 of the 9 at which 3 move
    cache.crop(-1)
    assert cache.get_seq_length() == 21
    torch.testing.assert_close(step(model, cache, ids[:, 21:22]), want)
    step(model, cache, ids[:, 22:23])  # the ninth: three tokens move
    with pytest.raises(ValueError, match="at most 0 came after"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(5)


def test_tokens_wait_in_the_window_while_past_is_recorded():
    """Twelve tokens stay whole until crop() says how many were right; then those move that would have without."""
    model, keep = tiny_model("llama"), random_keep(3)
    ids, _ = left_padded([40], 3)
    cache = prefilled(model, keep, ids[:, :20])
    cache.activate_past_recording()
    step(model, cache, ids[:, 20:32])
    assert cache.compressed[0].store.tail.length.max() == 0
    cache.crop(-4)
    assert cache.get_seq_length() == 28
    assert cache.compressed[0].store.start.tolist() == [20]
    other, plain = prefilled(model, keep, ids[:, :20]), prefilled(model, keep, ids[:, :20])
    other.activate_past_recording()
    step(model, other, ids[:, 20:28])
    other.crop(0)
    torch.testing.assert_close(step(model, cache, ids[:, 28:29]), step(model, other, ids[:, 28:29]))
    for token in ids[:, 20:28].split(1, 1):
        step(model, plain, token)
    assert plain.compressed[0].store.start.tolist() == [20]


def test_assisted_decoding_runs_and_agrees_with_nothing_pruned():
    """Prompt lookup takes candidates back; with every channel kept the tokens are the dense model's."""
    model = tiny_model("llama")
    ids = left_padded([8], 4)[0].repeat(1, 4)
    cache = compressed_cache(model, torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool), *SIZES, backend="torch")
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    got = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(got, model.generate(ids, **options))


@pytest.mark.parametrize("rows", [[1, 0, 2], [0, 0, 1], [2]])
def test_selected_rows_go_on_as_they_would_have(rows):
    model, keep = tiny_model("qwen2"), random_keep(5)
    ids, mask = left_padded([30, 4, 17], 5)
    tokens = torch.randint(2, 80, (3, 12))
    one, other = (prefilled(model, keep, ids, mask) for _ in range(2))
    for t in range(8):
        step(model, one, tokens[:, t : t + 1])
        step(model, other, tokens[:, t : t + 1])
    rows = torch.tensor(rows)
    other.batch_select_indices(rows)
    for t in range(8, 12):
        want = step(model, one, tokens[:, t : t + 1])
        torch.testing.assert_close(step(model, other, tokens[rows, t : t + 1]), want[rows])


def test_repeat_interleave_before_and_after_sealing():
    model, keep = tiny_model("llama"), random_keep(6)
    ids, mask = left_padded([30, 4], 6)
    cache, wide = prefilled(model, keep, ids, mask), prefilled(model, keep, ids, mask)
    wide.batch_repeat_interleave(2)
    token = torch.randint(2, 80, (2, 1))
    want = step(model, cache, token).repeat_interleave(2, 0)
    torch.testing.assert_close(step(model, wide, token.repeat_interleave(2, 0)), want)


def test_offloaded_layers_come_back():
    model, keep = tiny_model("llama"), random_keep(7)
    ids, _ = left_padded([30], 7)
    one, other = prefilled(model, keep, ids), prefilled(model, keep, ids)
    for layer in other.layers:
        layer.offload()
        layer.prefetch()
    token = torch.randint(2, 80, (1, 1))
    torch.testing.assert_close(step(model, other, token), step(model, one, token))


@pytest.mark.parametrize("padded", [False, True])
def test_layers_with_their_own_sliding_window_are_left_alone(padded):
    """Mistral with a window of 16, Qwen2 with one full and one sliding layer: what is not compressed stays exact."""
    ids, mask = left_padded([40, 21 if padded else 40], 8)
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    mistral = tiny_model("mistral", sliding_window=16)
    mistral.set_attn_implementation("sdpa")
    want = mistral.generate(ids, **options)
    with pytest.warns(RuntimeWarning, match="nothing is compressed"):
        cache = compressed_cache(mistral, torch.zeros(LAYERS, HEADS, DIM, dtype=torch.bool), *SIZES)
    assert cache.compressed == []
    assert torch.equal(mistral.generate(ids, past_key_values=cache, **options), want)

    qwen = tiny_model("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    qwen.set_attn_implementation("sdpa")
    want = qwen.generate(ids, **options)
    keep = torch.ones(LAYERS, HEADS, DIM, dtype=torch.bool)
    cache = compressed_cache(qwen, keep, *SIZES, backend="torch")
    assert [isinstance(layer, CompressedLayer) for layer in cache.layers] == [True, False]
    assert torch.equal(qwen.generate(ids, past_key_values=cache, **options), want)


def test_the_attention_it_switches_on_is_right_for_other_caches():
    model = tiny_model("llama")
    ids, mask = left_padded([30, 12], 9)
    model.set_attn_implementation("sdpa")
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    want = model.generate(ids, **options)
    compressed_cache(model, random_keep(9))
    assert torch.equal(model.generate(ids, **options), want)
    assert torch.equal(model.generate(ids, past_key_values=DynamicCache(), prefill_chunk_size=7, **options), want)
    assert torch.equal(model.generate(ids, use_cache=False, **options), want)


def test_memory_is_what_the_tensors_hold_and_what_was_projected():
    model, keep = tiny_model("llama"), random_keep(10, empty=0.5)
    ids, _ = left_padded([300, 300], 10)
    sizes = Sizes(4, 32, 8)
    cache = prefilled(model, keep, ids, sizes=(4, 32, 8))
    memory = cache.memory()
    middle = 300 - 4 - 32
    assert memory.middle_k == 2 * 8 * middle * int(keep.sum())
    assert memory.middle_v == 2 * 8 * middle * DIM * int(keep.any(-1).sum())
    assert memory.window == 2 * 8 * 2 * LAYERS * HEADS * DIM * 32
    held = {}
    for layer in cache.compressed:
        for tensor in layer.store.tensors().values():
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    assert memory.total == sum(held.values())
    row = bytes_per_row(keep, 300, torch.float64, sizes)
    assert memory.total - memory.tables == 2 * row
    assert max_batch(keep, 300, 10 * row + 1, torch.float64, sizes) == 10
    assert bytes_per_row(keep, 3) == bytes_per_row(keep, 128 + 1024) < bytes_per_row(keep, 128 + 1024 + 1)


def test_memory_reads_in_megabytes_and_as_a_share_of_dense():
    memory = Memory(
        sink=500_000, window=3_100_000, middle_k=2_000_000, middle_v=5_900_000, tables=99_000, slack=1, dense=28_600_000
    )
    parts = "sink 0.5, window 3.1, middle K 2.0, middle V 5.9, tables 0.099, slack <0.001"
    assert str(memory) == f"11.6 MB, 41% of dense (28.6 MB): {parts}"
    assert str(memory + memory).startswith("23.2 MB, 41% of dense (57.2 MB): sink 1.0, ")
    assert str(Memory()) == "0.0 MB"
    assert str(Memory(other=2_000_000)) == "2.0 MB: other 2.0"
    assert "dense" not in asdict(memory)  # rows of results keep their parts
    assert memory.total == sum(asdict(memory).values())


def test_the_share_is_of_the_real_tokens_that_were_seen():
    model, lengths = tiny_model("llama"), [300, 200]
    ids, mask = left_padded(lengths, 10)
    cache = prefilled(model, random_keep(10, empty=0.5), ids, mask, sizes=(4, 32, 8))
    step(model, cache, ids[:, :1])
    dense = (sum(lengths) + 2) * 2 * LAYERS * HEADS * DIM * 8
    memory = cache.memory()
    assert f" MB, {memory.total / dense:.0%} of dense ({dense / 1e6:.1f} MB): sink 0" in str(memory)
    assert memory.total < dense


def test_an_empty_head_holds_no_middle():
    keep = torch.zeros(LAYERS, HEADS, DIM, dtype=torch.bool)
    keep[:, 0, :3] = True
    ids, mask = left_padded([50, 31], 11)
    cache = compressed_cache(tiny_model("llama"), keep, *SIZES, backend="torch")
    run(tiny_model("llama"), cache, ids, mask, 20, ATTENTION)
    for layer in cache.compressed:
        for part in (layer.store.prompt, layer.store.tail):
            assert part.capacity[:, 1].sum() == 0
            assert part.v.numel() == part.capacity[:, 0].sum() * DIM


def test_bad_input_is_named():
    model, keep = tiny_model("llama"), random_keep(12)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2, 4\), the model needs \(2, 2, 8\)"):
        compressed_cache(model, keep[..., :4])
    with pytest.raises(ValueError, match="window >= 0"):
        compressed_cache(model, keep, window=-1)
    with pytest.raises(ValueError, match='"auto", "torch" or "triton"'):
        compressed_cache(model, keep, backend="cuda")
    with pytest.raises(ValueError, match="mask is for 2 KV heads"):
        KeptChannels.of(keep[0], torch.zeros(1, 3, 5, DIM))
    cache = prefilled(model, keep, left_padded([9], 12)[0])
    with pytest.raises(RuntimeError, match="must come before the prompt"):
        cache.expect(5)
    cache.reset()
    cache.expect(4)
    with pytest.raises(ValueError, match="announced fewer tokens"):
        step(model, cache, left_padded([9], 12)[0])
    with pytest.raises(ValueError, match="2-D padding mask"):
        cache.compressed[0].attend(torch.zeros(1, 4, 1, DIM), torch.zeros(1, 1, 1, 1))


def test_falling_back_says_why_once(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    model, keep = tiny_model("llama"), random_keep(13)
    backend._warn.cache_clear()
    ids, mask = left_padded([12], 13)
    with pytest.warns(RuntimeWarning, match="runs in plain PyTorch: "):
        run(model, compressed_cache(model, keep, *SIZES), ids, mask, 3, ATTENTION)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, compressed_cache(model, keep, *SIZES), ids, mask, 3, ATTENTION)
    with pytest.raises(RuntimeError, match='backend="triton" cannot run: '):
        run(model, compressed_cache(model, keep, *SIZES, backend="triton"), ids, mask, 3, ATTENTION)


def test_a_mask_file_is_enough(tmp_path):
    ChannelMask(random_keep(15)).save(tmp_path / "mask.safetensors")
    cache = compressed_cache(tiny_model("llama"), tmp_path / "mask.safetensors")
    assert torch.equal(torch.stack([layer.middle.channels for layer in cache.compressed]), random_keep(15))
    assert cache.compressed[0].sizes == Sizes()


def test_sink_and_window_are_those_that_the_mask_was_trained_with(tmp_path):
    path, model = tmp_path / "mask.safetensors", tiny_model("llama")
    mask = ChannelMask(random_keep(15), {"sink": 3, "window": 40})
    mask.save(path)
    for given, sizes in (({}, (3, 40, 32)), ({"window": 7, "flush": 5}, (3, 7, 5)), ({"sink": 0}, (0, 40, 32))):
        assert {compressed_cache(model, one, **given).compressed[0].sizes for one in (mask, path)} == {Sizes(*sizes)}
    with pytest.raises(ValueError, match="window='long' must be a whole number of tokens"):
        compressed_cache(model, ChannelMask(random_keep(15), {"window": "long"}))


def test_a_mask_object_and_a_tensor_are_the_same():
    class Mask:
        keep = random_keep(14)

    model = tiny_model("llama")
    ids, mask = left_padded([30], 14)
    runs = [run(model, compressed_cache(model, m, *SIZES), ids, mask, 9, ATTENTION) for m in (Mask, Mask.keep)]
    assert torch.equal(runs[0][0], runs[1][0])
    want = run(model, oracle_cache(Mask.keep, *SIZES), ids, mask, 9, "oracle")
    assert torch.equal(runs[0][0], want[0])
