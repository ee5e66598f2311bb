"""A cache answers only for the conversation, the weights and the adapters that made it; all else is refused."""

import copy
import pickle
import warnings

import accelerate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from leank.eval.cache import CompressedCache, compressed_cache
from leank.eval.cache.conversation import listen
from leank.eval.cache.fingerprint import model_digest
from leank.versions import CACHE
from tests.helpers.cache_oracle import random_keep, tiny_model


def ids_of(columns, rows=1, seed=0):
    return torch.randint(1, 80, (rows, columns), generator=torch.Generator().manual_seed(seed))


def fresh():
    """A model that a test may change."""
    return copy.deepcopy(tiny_model("llama"))


def talked(model, ids, new=8, **kwargs):
    """A cache after a reply, and the conversation [B, columns] with it."""
    cache = compressed_cache(model, random_keep(10), 2, 6, 4, backend="torch")
    return cache, model.generate(ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, **kwargs)


WAYS = {
    "model.generate": lambda model, cache, ids, **more: model.generate(ids, past_key_values=cache, **more),
    "the cache by its name": lambda model, cache, ids, **more: model.generate(ids, **{CACHE: cache}, **more),
    "input_ids by name": lambda model, cache, ids, **more: model.generate(input_ids=ids, past_key_values=cache, **more),
    "with a mask of ones": lambda model, cache, ids, **more: model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **more
    ),
    "cache.generate": lambda model, cache, ids, **more: cache.generate(model, ids, **more),
    "in chunks": lambda model, cache, ids, **more: model.generate(
        ids, past_key_values=cache, prefill_chunk_size=4, **more
    ),
    "beams": lambda model, cache, ids, **more: model.generate(ids, past_key_values=cache, num_beams=1, **more),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("columns", [1, 20, 30, 36, 37, 38, 40, 60])
def test_other_ids_are_refused_however_many_they_are(way, columns):
    model = tiny_model("llama")
    cache, _ = talked(model, ids_of(30))
    with pytest.raises(ValueError, match=r"call cache.reset\(\) first"):
        WAYS[way](model, cache, ids_of(columns, seed=1), max_new_tokens=2)


@pytest.mark.parametrize("way", WAYS)
def test_the_conversation_itself_goes_on(way):
    model = tiny_model("llama")
    prompt = ids_of(30, rows=2)
    cache, reply = talked(model, prompt)
    whole = torch.cat([reply, ids_of(9, rows=2, seed=3)], 1)
    got = WAYS[way](model, cache, whole, max_new_tokens=6, min_new_tokens=6)
    plain, _ = talked(model, prompt)
    with torch.no_grad():
        model(whole[:, plain.get_seq_length() :], past_key_values=plain)
    assert got.shape == (2, whole.shape[1] + 6)
    assert torch.equal(cache.conversation.ids, got[:, :-1])


@given(row=st.integers(0, 1), column=st.integers(0, 36))
@settings(max_examples=8, deadline=None)
def test_one_other_id_in_one_row_is_refused(row, column):
    model = tiny_model("llama")
    cache, reply = talked(model, ids_of(30, rows=2))
    whole = torch.cat([reply, ids_of(5, rows=2, seed=3)], 1)
    whole[row, column] = whole[row, column] % 80 + 1
    with pytest.raises(ValueError, match=f"row {row} differs from column {column} on"):
        model.generate(whole, past_key_values=cache, max_new_tokens=2)


def test_ids_of_padding_do_not_matter():
    model = tiny_model("llama")
    prompt, mask = ids_of(30, rows=2), torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    cache, reply = talked(model, prompt, attention_mask=mask)
    whole = torch.cat([reply, ids_of(5, rows=2, seed=3)], 1)
    whole[0, :7] = 5
    mask = torch.cat([mask, torch.ones(2, whole.shape[1] - 30, dtype=torch.long)], 1)
    assert model.generate(whole, attention_mask=mask, past_key_values=cache, max_new_tokens=2).shape[1] == 45
    short = torch.cat([mask[:, :-1]], 1)
    with pytest.raises(ValueError, match="attention_mask has"):
        model.generate(whole[:, -3:], attention_mask=short, past_key_values=cache, max_new_tokens=2)


def test_ids_are_known_after_plain_passes_crop_copies_rows_and_reset():
    model, ids = tiny_model("llama"), ids_of(40, rows=2)
    cache = compressed_cache(model, random_keep(10), 2, 6, 4, backend="torch")
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        cache.activate_past_recording()
        model(ids[:, 30:], past_key_values=cache)
        cache.crop(-4)
    assert torch.equal(cache.conversation.ids, ids[:, :36])
    twice = cache.repeat(2)
    assert torch.equal(twice.conversation.ids, ids[:, :36].repeat_interleave(2, 0))
    twice.reorder_cache(torch.tensor([3, 0, 1, 2]))
    assert torch.equal(twice.conversation.ids, ids[[1, 0, 0, 1], :36])
    cache.reset()
    assert model.generate(ids_of(20, 2, seed=5), past_key_values=cache, max_new_tokens=2).shape == (2, 22)


def test_a_loaded_cache_knows_its_conversation(tmp_path):
    model = tiny_model("llama")
    cache, reply = talked(model, ids_of(30))
    cache.save(tmp_path / "c")
    loaded = CompressedCache.load(tmp_path / "c", model, backend="torch")
    assert torch.equal(loaded.conversation.ids, reply[:, :-1])
    with pytest.raises(ValueError, match="do not go on"):
        loaded.generate(model, ids_of(40, seed=1), max_new_tokens=2)


class Adapter(nn.Module):
    """A projection with two low-rank terms that has the attributes of peft's layers."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight = base, base.weight
        self.terms = nn.ParameterDict({name: nn.Parameter(torch.randn_like(base.weight)) for name in "ab"})
        self.active_adapters, self.disable_adapters, self.merged_adapters = ["a"], False, []

    def forward(self, x):
        out = self.base(x)
        return out if self.disable_adapters else out + x @ self.terms[self.active_adapters[0]].T


def adapted():
    model = fresh()
    for layer in model.model.layers:
        layer.self_attn.k_proj = Adapter(layer.self_attn.k_proj)
    return model


def switch(model, **to):
    for layer in model.model.layers:
        vars(layer.self_attn.k_proj).update(to)


class Quantised(nn.Module):
    """A projection whose weight lies in buffers, as GPTQ's and AWQ's do."""

    def __init__(self, base):
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (base.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        return x @ (self.codes * self.scale).T


def quantised(model):
    model.model.layers[0].self_attn.k_proj = Quantised(model.model.layers[0].self_attn.k_proj)
    return model


OTHER = {
    "another adapter": lambda model: switch(model, active_adapters=["b"]),
    "adapters off": lambda model: switch(model, disable_adapters=True),
    "adapter merged": lambda model: switch(model, merged_adapters=["a"]),
    "another dtype": lambda model: model.bfloat16(),
    "another weight": lambda model: nn.init.normal_(model.model.layers[1].self_attn.v_proj.weight),
    "an adapter's factor": lambda model: switch(model, scaling={"a": 4.0}),
    "weights in place of its own": lambda model: model.load_state_dict(
        {name: torch.randn_like(weight) for name, weight in model.state_dict().items()}, assign=True
    ),
    "layers in another order": lambda model: model.model.layers.__setitem__(0, model.model.layers[1]),
    "other frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_changes_the_keys_is_refused(change, tmp_path):
    model = adapted()
    cache, reply = talked(model, ids_of(30))
    cache.save(tmp_path / "c")
    digest = model_digest(model)
    change(model)
    assert model_digest(model) != digest
    with pytest.raises(ValueError, match="was made by another model"):
        CompressedCache.load(tmp_path / "c", model)
    for copied, run in ((copy.deepcopy(cache), model), (cache, model)):
        with pytest.raises(ValueError, match="changed after the first tokens"), torch.no_grad():
            run(ids_of(3, seed=2), past_key_values=copied)
    with pytest.raises(ValueError, match="changed after the first tokens"):
        model.generate(torch.cat([reply, reply[:, :3]], 1), past_key_values=cache, max_new_tokens=2)


@pytest.mark.parametrize("name", ["another adapter", "adapters off"])
def test_a_single_token_of_another_adapter_is_refused(name):
    model = adapted()
    cache, reply = talked(model, ids_of(30))
    OTHER[name](model)
    with pytest.raises(ValueError, match="adapters changed"), torch.no_grad():
        model(reply[:, -1:], past_key_values=cache)


def test_another_model_is_refused_and_an_equal_copy_goes_on():
    one, equal, other = fresh(), fresh(), fresh()
    nn.init.normal_(other.model.layers[0].self_attn.k_proj.weight)
    for model in (equal, other):
        compressed_cache(model, random_keep(10))
    cache, reply = talked(one, ids_of(30))
    with torch.no_grad():
        equal(reply[:, -1:], past_key_values=cache)
        with pytest.raises(ValueError, match="another model made"):
            other(reply[:, :1], past_key_values=cache)


def test_offloaded_weights_count_and_unreachable_ones_are_refused():
    model = fresh()
    digest, layer = model_digest(model), model.model.layers[1].self_attn.k_proj
    weight = layer.weight
    layer.weight = nn.Parameter(weight.detach().to("meta"))
    with pytest.raises(ValueError, match="meta device"):
        model_digest(model)
    layer._hf_hook = type("Hook", (), {"weights_map": {"weight": weight.detach()}})()
    assert model_digest(model) == digest
    layer._hf_hook = type("Hook", (), {"weights_map": {"weight": weight.detach() + 1}})()
    assert model_digest(model) != digest


def test_a_cache_loads_where_an_offloaded_model_computes(tmp_path):
    model = fresh()
    accelerate.cpu_offload(model, torch.device("cpu"))
    cache, reply = talked(model, ids_of(30))
    cache.save(tmp_path / "c")
    loaded = CompressedCache.load(tmp_path / "c", model, backend="torch")
    whole = torch.cat([reply, ids_of(5, seed=3)], 1)
    assert torch.equal(*(model.generate(whole, past_key_values=one, max_new_tokens=4) for one in (cache, loaded)))


def test_a_copied_and_an_unpickled_model_have_their_own_generate():
    model = tiny_model("llama")
    compressed_cache(model, random_keep(10))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.generate.__self__ is other
        cache, _ = talked(other, ids_of(30))
        with pytest.raises(ValueError, match="do not go on"):
            other.generate(ids_of(40, seed=1), past_key_values=cache)


def test_misuse_is_named():
    model = fresh()
    cache, _ = talked(model, ids_of(30))
    with pytest.raises(TypeError, match=r"write it with save\(\)"):
        pickle.dumps(cache)
    with pytest.raises(AttributeError, match="prefix tuning"):
        _ = cache.max_cache_len
    cache.reset()
    model.train().gradient_checkpointing_enable()
    with pytest.warns(RuntimeWarning, match="nothing is compressed"):
        model(ids_of(10), past_key_values=cache)
    assert cache.held == 0


def test_checkpointing_without_gradients_warns_where_the_cache_stays_empty():
    """From transformers 5.24 on the cache is filled."""
    model = fresh()
    cache = compressed_cache(model, random_keep(10), 2, 6, 4)
    model.train().gradient_checkpointing_enable()
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        model(ids_of(10), **{CACHE: cache})
    assert cache.held == (0 if any("nothing is compressed" in str(one.message) for one in said) else 10)


def test_weights_in_buffers_and_packed_ones_tell_models_apart():
    one, other = quantised(fresh()), quantised(fresh())
    digest = model_digest(one)
    assert digest == model_digest(other)
    cache, reply = talked(one, ids_of(30))
    for model in (one, other):
        model.model.layers[0].self_attn.k_proj.codes.neg_()
    assert model_digest(other) != digest
    with pytest.raises(ValueError, match="its weights changed after the first tokens"):
        one.generate(torch.cat([reply, reply[:, :3]], 1), past_key_values=cache, max_new_tokens=2)

    class Packed(nn.Linear):  # as torch.ao.nn.quantized.Linear
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[prefix + "packed"] = (torch.quantize_per_tensor(self.weight, 0.1, 0, torch.qint8), None)

    packed = [nn.Linear(8, 8), nn.Linear(8, 8)]
    for layer in packed:
        layer.__class__, layer.config = Packed, fresh().config
        weight = layer.weight.detach()
        del layer.weight, layer.bias
        layer.weight = weight
    assert model_digest(packed[0]) != model_digest(packed[1])


def test_a_model_that_does_not_tell_what_it_reads_is_refused():
    """It has the attention "leank" from the settings that it shares with one that does."""
    model = fresh()
    cache, reply = talked(model, ids_of(30))
    for other in (cache, compressed_cache(model, random_keep(10))):
        with pytest.raises(ValueError, match="does not tell the cache what it reads"):
            type(model)(model.config).double()(reply[:, -1:], past_key_values=other)


def test_what_another_model_has_filled_is_not_saved_as_the_models_own(tmp_path):
    model, other = fresh(), fresh()
    nn.init.normal_(other.model.layers[0].self_attn.k_proj.weight)
    compressed_cache(other, random_keep(10))
    cache = compressed_cache(model, random_keep(10), 2, 6, 4)
    with torch.no_grad():
        other(ids_of(30), past_key_values=cache)
    with pytest.raises(ValueError, match="another model has filled this cache"):
        cache.save(tmp_path / "c")
    cache.reset()
    with torch.no_grad():
        model(ids_of(30), past_key_values=cache)
    cache.save(tmp_path / "c")


def padded(rows, columns):
    """Ids, and their mask with seven columns of padding in row 0."""
    mask = torch.ones(rows, columns, dtype=torch.long)
    mask[0, :7] = 0
    return ids_of(columns, rows=rows), mask


def test_a_later_turn_counts_the_tokens_that_the_cache_counts():
    model = tiny_model("llama")
    prompt, mask = padded(2, 30)
    cache, reply = talked(model, prompt, attention_mask=mask)
    whole = torch.cat([reply, ids_of(5, 2, seed=3)], 1)
    right = torch.cat([mask, torch.ones(2, 13, dtype=torch.long)], 1)
    ended, ones = right.clone(), torch.ones_like(right)
    ended[1, 33:38] = 0  # what came after the end of a reply
    for wrong, line in [
        (None, "padding that attention_mask does not name"),
        (ones, "padding that attention_mask does not name"),  # transformers drops a mask of ones
        (ended, "row 1 has 33 tokens in the 37 columns that the cache holds, and 37 came"),
    ]:
        for way in ("model.generate", "cache.generate"):
            with pytest.raises(ValueError, match=line):
                WAYS[way](model, copy.deepcopy(cache), whole, attention_mask=wrong, max_new_tokens=2)
    with pytest.raises(ValueError, match="row 0 has 37 tokens"), torch.no_grad():
        model(whole[:, 37:], attention_mask=ones, position_ids=torch.arange(37, 43)[None], past_key_values=cache)
    with pytest.raises(ValueError, match="give those of the new tokens, too"), torch.no_grad():
        model(whole[:, 37:], attention_mask=right, past_key_values=cache)
    got = model.generate(whole, attention_mask=right, past_key_values=cache, max_new_tokens=4, min_new_tokens=4)
    assert got.shape == (2, 47)


def test_a_reply_behind_padding_is_refused():
    model, (ids, mask) = tiny_model("llama"), padded(2, 30)
    with pytest.raises(ValueError, match="row 0 ends in padding"):
        talked(model, ids, attention_mask=mask.flip(1))


@pytest.mark.parametrize("draft", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny_model("llama")}])
def test_a_later_turn_is_not_drafted(draft):
    """transformers (5.17 to 5.24) feeds the whole conversation again, and so answers from doubled tokens."""
    model = tiny_model("llama")
    cache, reply = talked(model, ids_of(30), **draft)
    with pytest.raises(ValueError, match="reads the whole conversation again"):
        model.generate(torch.cat([reply, ids_of(5, seed=3)], 1), past_key_values=cache, max_new_tokens=2, **draft)


def test_dropout_in_training_mode_is_refused():
    model = copy.deepcopy(tiny_model("llama", attention_dropout=0.5)).train()
    with pytest.raises(ValueError, match=r"attention dropout of 0.5 in training mode.*model.eval\(\)"):
        model(ids_of(30), past_key_values=compressed_cache(model, random_keep(10), 2, 6, 4))


def test_a_single_token_of_generate_looks_at_the_weights():
    model = fresh()
    cache, reply = talked(model, ids_of(30))
    nn.init.normal_(model.model.layers[0].self_attn.k_proj.weight)
    with pytest.raises(ValueError, match="its weights changed"):
        model.generate(reply, past_key_values=cache, max_new_tokens=2)


class Before(nn.Module):
    """A model that hands its decoder embeddings alone, as models of images and text do."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def get_decoder(self):
        return self.inner.get_decoder()

    def forward(self, input_ids, past_key_values):
        embeds = self.inner.get_input_embeddings()(input_ids)
        return self.inner.model(inputs_embeds=embeds, past_key_values=past_key_values)


def test_ids_are_known_where_the_decoder_gets_embeddings():
    model = Before(fresh())
    cache = compressed_cache(model.inner, random_keep(10), 2, 6, 4)
    listen(model)
    with torch.no_grad():
        model(ids_of(30), past_key_values=cache)
        model(ids_of(1, seed=1), past_key_values=cache)
    assert torch.equal(cache.conversation.ids, torch.cat([ids_of(30), ids_of(1, seed=1)], 1))


def test_tokens_that_a_model_puts_before_the_ids_are_said(tmp_path):
    model, whole = tiny_model("llama"), ids_of(40)
    cache = compressed_cache(model, random_keep(10), 2, 6, 4)
    with torch.no_grad():
        model(inputs_embeds=torch.randn(1, 35, 32).double(), past_key_values=cache)
    cache.conversation.fill(0, cache.held, {"input_ids": whole[:, :30]}, whole[:, :31])
    with pytest.raises(ValueError, match="5 tokens of its own before the ids"):
        model.generate(whole, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"prompt tuning\) is not saved"):
        cache.save(tmp_path / "c.safetensors")


def test_beams_that_end_early_are_no_tokens_before_the_ids():
    """The steps that ran are more than those of the best beam, which alone generate() returns."""
    model, prompt = tiny_model("llama"), ids_of(30)
    cache, reply = talked(model, prompt, num_beams=2)
    cache.conversation.fill(0, cache.held, {"input_ids": prompt}, reply[:, :33])
    whole = torch.cat([cache.conversation.ids, ids_of(3, rows=2, seed=1)], 1)
    assert model.generate(whole, past_key_values=cache, max_new_tokens=2).shape[1] > whole.shape[1]


def test_a_cache_is_heard_by_its_place_among_the_arguments():
    model, ids = tiny_model("llama"), ids_of(30)
    cache = compressed_cache(model, random_keep(10), 2, 6, 4)
    with torch.no_grad():
        model.model(ids, None, None, cache)
    assert torch.equal(cache.conversation.ids, ids)


def test_adapters_of_single_rows_are_not_saved(tmp_path):
    cache, _ = talked(tiny_model("llama"), ids_of(30))
    cache.conversation._adapters = [(["a"], False, [], {}, [["a", "b"]])]
    with pytest.raises(ValueError, match=r"adapter_names\) is not saved"):
        cache.save(tmp_path / "c.safetensors")
