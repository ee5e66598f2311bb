"""What transformers asks of a cache layer beyond generate(), the bytes it counts, and the errors it raises."""

import warnings
from dataclasses import asdict

import pytest
import torch
from transformers import DynamicCache

from leank.eval.cache import CompressedLayer, Sizes, bytes_per_row, compressed_cache, max_batch
from leank.eval.cache.attention import backend
from leank.eval.cache.memory import Memory
from leank.eval.cache.storage.channels import KeptChannels
from leank.mask import ChannelMask
from tests.helpers.cache_oracle import DIM, HEADS, LAYERS, left_padded, random_keep, tiny_model
from tests.helpers.cache_uses import SIZES, feed, new_cache


def test_crop_takes_back_tokens_since_the_last_move():
    model, keep = tiny_model("llama"), random_keep(2)
    ids, _ = left_padded([24], 2)
    cache = new_cache(model, keep)
    feed(model, cache, ids[:, :20])
    feed(model, cache, ids[:, 20:21])
    want = feed(model, cache, ids[:, 21:22])  # window holds 8 of the 9 at which 3 move
    cache.crop(-1)
    assert cache.get_seq_length() == 21
    torch.testing.assert_close(feed(model, cache, ids[:, 21:22]), want)
    feed(model, cache, ids[:, 22:23])  # the ninth: three tokens move
    with pytest.raises(ValueError, match="at most 0 came after"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(5)


def test_tokens_wait_in_the_window_while_past_is_recorded():
    """Twelve tokens stay whole until crop() says how many were right; then those move that would have without."""
    model, keep = tiny_model("llama"), random_keep(3)
    ids, _ = left_padded([40], 3)
    cache, other, plain = (new_cache(model, keep) for _ in range(3))
    feed(model, cache, ids[:, :20])
    cache.activate_past_recording()
    feed(model, cache, ids[:, 20:32])
    assert cache.compressed[0].store.tail.length.max() == 0
    cache.crop(-4)
    assert cache.get_seq_length() == 28
    assert cache.compressed[0].store.start.tolist() == [20]
    for one in (other, plain):
        feed(model, one, ids[:, :20])
    other.activate_past_recording()
    feed(model, other, ids[:, 20:28])
    other.crop(0)
    torch.testing.assert_close(feed(model, cache, ids[:, 28:29]), feed(model, other, ids[:, 28:29]))
    feed(model, plain, *ids[:, 20:28].split(1, 1))
    assert plain.compressed[0].store.start.tolist() == [20]


def test_assisted_decoding_runs_and_agrees_with_nothing_pruned():
    """Prompt lookup takes candidates back; with every channel kept the tokens are the dense model's."""
    model = tiny_model("llama")
    ids = left_padded([8], 4)[0].repeat(1, 4)
    cache = new_cache(model)
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    got = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **options)
    assert torch.equal(got, model.generate(ids, **options))


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
    cache = new_cache(qwen)
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
    cache = compressed_cache(model, keep, 4, 32, 8)
    feed(model, cache, ids)
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
    cache = compressed_cache(model, random_keep(10, empty=0.5), 4, 32, 8)
    feed(model, cache, ids, mask=mask)
    feed(model, cache, ids[:, :1])
    dense = (sum(lengths) + 2) * 2 * LAYERS * HEADS * DIM * 8
    memory = cache.memory()
    assert f" MB, {memory.total / dense:.0%} of dense ({dense / 1e6:.1f} MB): sink 0" in str(memory)
    assert memory.total < dense
    cache.reset()
    assert cache.get_seq_length() == cache.memory().total == 0


def test_bad_input_is_named():
    model, keep = tiny_model("llama"), random_keep(12)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2, 4\), the model needs \(2, 2, 8\)"):
        compressed_cache(model, keep[..., :4])
    with pytest.raises(ValueError, match="window=-1 must be greater than or equal to 0"):
        compressed_cache(model, keep, window=-1)
    with pytest.raises(ValueError, match='"auto", "torch" or "triton"'):
        compressed_cache(model, keep, backend="cuda")
    with pytest.raises(ValueError, match="does not fit 3 KV heads of 8 channels"):
        KeptChannels.of(keep[0], torch.zeros(1, 3, 5, DIM))
    cache = new_cache(model, keep)
    feed(model, cache, left_padded([9], 12)[0])
    with pytest.raises(RuntimeError, match="must come before the prompt"):
        cache.expect(5)
    cache.reset()
    cache.expect(4)
    with pytest.raises(ValueError, match="announced fewer tokens"):
        feed(model, cache, left_padded([9], 12)[0])
    with pytest.raises(ValueError, match="2-D padding mask"):
        cache.compressed[0].attend(torch.zeros(1, 4, 1, DIM), torch.zeros(1, 1, 1, 1))


def test_sink_and_window_are_those_that_the_mask_was_trained_with(tmp_path):
    path, model = tmp_path / "mask.safetensors", tiny_model("llama")
    mask = ChannelMask(random_keep(15), {"sink": 3, "window": 40})
    mask.save(path)
    assert torch.equal(
        torch.stack([layer.middle.channels for layer in compressed_cache(model, path).layers]), mask.keep
    )
    for given, sizes in (({}, (3, 40, 32)), ({"window": 7, "flush": 5}, (3, 7, 5)), ({"sink": 0}, (0, 40, 32))):
        assert {compressed_cache(model, one, **given).compressed[0].sizes for one in (mask, path)} == {Sizes(*sizes)}
    with pytest.raises(ValueError, match="window='long' must be a valid integer"):
        compressed_cache(model, ChannelMask(random_keep(15), {"window": "long"}))


@pytest.mark.parametrize("gpu", [False, True])
def test_plain_pytorch_says_why_once_where_there_is_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    model, ids = tiny_model("llama"), left_padded([12], 13)[0]

    def decode(backend="auto"):
        feed(model, compressed_cache(model, random_keep(13), *SIZES, backend=backend), ids, ids[:, :1])

    backend._warn.cache_clear()
    if gpu:
        with pytest.warns(RuntimeWarning, match="runs in plain PyTorch: "):
            decode()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode()
    with pytest.raises(RuntimeError, match='backend="triton" cannot run: '):
        decode("triton")
