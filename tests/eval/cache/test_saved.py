"""A cache that was saved and loaded goes on with exactly the same numbers; what cannot be right is refused by name."""

import copy
import gc
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from leank.eval.cache import CompressedCache, compressed_cache
from leank.eval.cache.fingerprint import model_digest
from leank.eval.cache.saved import FORMAT
from leank.eval.methods import Method
from leank.eval.methods.bits.kivi import KIVI
from leank.eval.methods.bits.spark import SparK
from leank.eval.methods.tokens.snapkv import SnapKV
from leank.mask import ChannelMask
from leank.tensor_files import write_tensors
from tests.helpers.cache_oracle import left_padded, random_keep, tiny_model
from tests.helpers.replay_tools import SIZES
from tests.helpers.turns import LEANK, METHODS, begin, conversation, go_on

KEPT = {name: method for name, method in METHODS.items() if name not in ("h2o", "tova", "rkv", "lethe", "quest")}
KEPT["snapkv in 2 bits"] = Method("snapkv in 2 bits", tokens=SnapKV(14, 4), bits=KIVI(2, 4), **SIZES)
KEPT["kivi in 8 bits"] = Method("kivi in 8 bits", bits=KIVI(8, 4), **SIZES)
TURNS = [(13, 5), (9, 12)]


def talked(method, model):
    """A cache after a padded prompt and a turn, which has moved tokens into the tail and round the ring."""
    ids, mask, columns = conversation((40, 22), TURNS)
    cache = begin(method, model, ids[:, : columns[0]], mask[:, : columns[0]])
    go_on(model, cache, ids, mask, columns[0], columns[1:2])
    return cache, ids, mask, columns


def last_turn(model, cache, ids, mask, columns):
    start = sum(columns[:2])
    return torch.stack(go_on(model, cache, ids, mask, start, [4, *[1] * (columns[2] - 4)]))


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_loaded_cache_goes_on_as_the_saved_one(name, dtype, tmp_path):
    model = tiny_model("llama", dtype)
    cache, *rest = talked(KEPT[name], model)
    cache.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(tmp_path / "cache.safetensors", model, backend="torch")
    loaded.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "cache.safetensors").read_bytes()
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert str(loaded.memory()) == str(copy.deepcopy(loaded).memory())
    assert torch.equal(last_turn(model, loaded, *rest), last_turn(model, cache, *rest))


def test_layers_with_a_sliding_window_are_saved_too(tmp_path):
    model = tiny_model("qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=1)
    ids = left_padded([60], 4)[0]
    cache = compressed_cache(model, random_keep(10), 2, 6, 4)
    with torch.no_grad():
        cache.expect(40)
        model(ids[:, :40], past_key_values=cache)
        cache.save(tmp_path / "c")
        loaded = CompressedCache.load(tmp_path / "c", model, random_keep(10))
        want, got = (model(ids[:, 40:], past_key_values=one).logits for one in (cache, loaded))
    assert torch.equal(got, want)


def test_mean_keys_are_saved_with_what_they_stand_for(tmp_path):
    model, path = tiny_model("llama"), tmp_path / "c"
    ids, mask = left_padded([60], 4)[0], ChannelMask(random_keep(10))
    means = torch.randn(mask.keep.shape, generator=torch.Generator().manual_seed(2))
    centered = mask.with_means(means)
    cache = compressed_cache(model, centered, 2, 6, 4)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        want, got = (model(ids[:, 40:], past_key_values=one).logits for one in (cache, loaded))
        assert torch.equal(got, want)
        loaded.reset()  # the mask stays
        new = compressed_cache(model, centered, 2, 6, 4)
        want, got = (model(ids, past_key_values=one).logits[:, -1] for one in (new, loaded))
        assert torch.equal(got, want)
    CompressedCache.load(path, model, centered)
    refused(path, "was made with other mean keys", model, mask)
    refused(path, "was made with other mean keys", model, mask.with_means(means + 1))
    tensors = load_file(path)
    for center in (tensors["0.center"][:, :2], tensors["0.center"].double()):
        write_tensors(path, {**tensors, "0.center": center.contiguous()}, changed_header(path))
        refused(path, "do not fit together", model)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "c.safetensors"
    talked(KEPT["leank"], tiny_model("llama"))[0].save(path)
    return path


def refused(path, match, *args, error=ValueError):
    with pytest.raises(error, match=match) as found:
        CompressedCache.load(path, *args)
    assert "\n" not in str(found.value)


def test_another_model_mask_or_file_is_refused(file, tmp_path):
    model = tiny_model("llama")
    CompressedCache.load(file, model, LEANK.loaded)
    refused(file, "was made with another mask; load that one", model, random_keep(4))
    refused(file, "was made with another mask", model, torch.ones(2, 2, 8, dtype=torch.bool))
    refused(file, "was made by another model than this qwen2", tiny_model("qwen2"))
    refused(file, "was made by another model than this llama", tiny_model("llama", torch.float32))
    tuned = copy.deepcopy(model)
    tuned.model.layers[1].mlp.up_proj.weight.data += 1e-3
    refused(file, "was made by another model than this llama", tuned)
    refused(tmp_path / "none", "does not exist; give a file", model, error=FileNotFoundError)
    ChannelMask(random_keep(1)).save(tmp_path / "mask")
    refused(
        tmp_path / "mask",
        f"is damaged or cut off: its header lacks '{FORMAT}', and so save.. did not write it",
        model,
    )


def test_tables_that_point_elsewhere_are_refused(file, tmp_path):
    """Whoever writes a file can write its digest, too."""
    wrong = [
        ("1.tail.length", lambda t: t + 500), ("1.prompt.capacity", lambda t: t + 64), ("1.seen", lambda t: t + 500),
        ("1.ring_v", lambda t: t[:, :1].contiguous()), ("1.prompt.k", lambda t: t[:-1].clone()),
        ("0.sink_k", lambda t: t.float()), ("0.channels", lambda t: t[:, :-1].contiguous()),
        ("0.prompt.length", lambda t: t + 1), ("0.prompt.length", lambda t: -t - 1), ("0.seen", lambda t: t.double()),
        *(("0.start", lambda t, n=n: t + n) for n in (-400, -1, 1, 500)), ("5.seen", torch.clone),
        ("seen", torch.clone), ("1.floor", lambda t: t + 100), ("0.floor", lambda t: -t - 1),
    ]  # fmt: skip
    outcomes = {}
    for number, (name, change) in enumerate(wrong):
        tensors = load_file(file)
        tensors[name] = change(tensors.get(name, tensors["0.seen"]))
        write_tensors(tmp_path / "c", tensors, changed_header(file))
        try:
            CompressedCache.load(tmp_path / "c", tiny_model("llama"))
            outcomes[number, name] = "accepted"
        except ValueError as error:
            outcomes[number, name] = str(error)
    assert not [name for name, said in outcomes.items() if said == "accepted" or "\n" in said]


@pytest.mark.parametrize(
    "change",
    [{"columns": value} for value in (-5, 0, 3, True, 1e3, None, 10**30)]
    + [{"sizes": {"sink": 2, "window": 6, "flush": 4} | size} for size in ({"sink": -2}, {"window": 7}, {"flush": 0})]
    + [{"packing": value} for value in ([], [None], 3, [[3, 32]] * 2, [[4, 32]] * 2)]
    + [{"packing": [None] * 5}, "[" * 50_000, "{}", "3"],
    ids=lambda change: str(change)[:40],
)
def test_headers_that_no_cache_has_are_refused(change, file, tmp_path):
    """Also where the file's digest is made anew, which is what a tool that rewrites headers does."""
    header = {FORMAT: change} if isinstance(change, str) else changed_header(file, **change)
    write_tensors(tmp_path / "c", load_file(file), header)
    refused(tmp_path / "c", str(tmp_path / "c"), tiny_model("llama"))


def changed_header(file, **change):
    """The header of a file with other fields."""
    with safe_open(file, framework="pt") as one:
        return {FORMAT: json.dumps({**json.loads(one.metadata()[FORMAT]), **change})}


def test_what_a_file_cannot_hold_is_refused_before_it_is_written(tmp_path):
    model, path = tiny_model("llama"), tmp_path / "c"
    empty, recording = (compressed_cache(model, random_keep(1), 2, 6, 4) for _ in range(2))
    with torch.no_grad():
        model(left_padded([20], 1)[0], past_key_values=recording)
    recording.activate_past_recording()
    for cache, match in [
        (empty, "needs a cache whose prompt is complete"),
        (recording, "no assisted decoding under way"),
        (talked(METHODS["h2o"], model)[0], "evicts tokens while decoding, or chooses what it reads, cannot be saved"),
        (talked(METHODS["quest"], model)[0], "cannot be saved"),
        (talked(Method("spark", bits=SparK(0.8, 4), **SIZES), model)[0], "leave out `bits`, or choose kivi"),
    ]:
        with pytest.raises(ValueError, match=match):
            cache.save(path)
    gone = copy.deepcopy(model)
    cache = talked(KEPT["leank"], gone)[0]
    del gone
    gc.collect()
    with pytest.raises(RuntimeError, match="that model is gone"):
        cache.save(path)
    assert not path.exists()


def test_what_tells_models_apart():
    """The type, and of every weight the name, shape and dtype, and numbers from its first to its last."""
    config, weight = tiny_model("llama").config, torch.arange(200.0)
    last = weight.clone()
    last[-1] += 1
    made = [
        (config, {"a": weight}), (tiny_model("qwen2").config, {"a": weight}), (config, {"b": weight}),
        (config, {"a": weight.view(10, 20)}), (config, {"a": weight.double()}), (config, {"a": last}),
    ]  # fmt: skip
    models = [
        SimpleNamespace(config=one, named_parameters=weights.items, named_modules=dict, state_dict=lambda **_: {})
        for one, weights in made
    ]
    assert len({model_digest(model) for model in models}) == len(made)


def test_a_mask_that_keeps_every_channel_is_no_mask(tmp_path):
    model, everything = tiny_model("llama"), torch.ones(2, 2, 8, dtype=torch.bool)
    cache = compressed_cache(model, None, 2, 6, 4)
    with torch.no_grad():
        model(left_padded([20], 1)[0], past_key_values=cache)
    cache.save(tmp_path / "c")
    CompressedCache.load(tmp_path / "c", model, everything)
    everything[1, 0, 3] = False
    with pytest.raises(ValueError, match="was made with another mask"):
        CompressedCache.load(tmp_path / "c", model, everything)
