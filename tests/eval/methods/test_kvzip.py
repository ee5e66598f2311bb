"""KVzip against plain formulas: what repeating the prompt scores, and which tokens all heads keep of one budget."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.cache import Sizes
from leank.eval.inference.models import ModelConfig, load_config
from leank.eval.inference.prefill import Prefill, PromptLayer, prefill
from leank.eval.methods.base import Method
from leank.eval.methods.prefill.repeat import Repeat, Words
from leank.eval.methods.tokens.kvzip import KVzip
from tests.helpers.cache_oracle import left_padded, tiny_model

SIZES = Sizes(2, 6, 4)
WORDS = Words([5, 6, 7], [8, 9], [10, 11])
model_of = functools.cache(tiny_model)


def asking(**given):
    """The pass with short requests, whose tokens every small vocabulary has."""
    found = Repeat(**given)
    found._words["words"] = WORDS
    return found


def by_hand(model, prompt, piece, first):
    """Scores [L][H, T] of one prompt [T]: every piece in a dense pass of its own over prompt, request and piece."""
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    found = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, len(prompt), dtype=torch.float64)
    for start in range(0, len(prompt), piece):
        end = min(start + piece, len(prompt))
        asked = WORDS.part + prompt[max(0, start - 8) : start] if start else WORDS.whole
        said = asked + WORDS.reply + prompt[start:end]
        whole = prefill(model, torch.tensor([prompt + said]), None, 0, len(said))
        columns = [*range(min(first, start)), *range(start, end), *range(len(prompt), len(prompt) + len(said))]
        for index, layer in enumerate(whole.layers):
            for head in range(config.num_attention_heads):
                for t, query in enumerate(layer.queries[0, head]):
                    sees = [j for j in columns if j <= len(prompt) + t]
                    logits = layer.keys[0, head // group, sees] @ query * layer.scaling
                    for j, weight in zip(sees, logits.softmax(-1).tolist(), strict=True):
                        if start <= j < end:
                            found[index, head // group, j] = max(found[index, head // group, j].item(), weight)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(3, 24), min_size=1, max_size=2), piece=st.integers(4, 30), first=st.integers(0, 5))
@torch.no_grad()
def test_scores_are_the_largest_attention_while_the_prompt_is_repeated(family, lengths, piece, first):
    """In pieces, behind the whole prompt, and in a padded batch; the pass itself is the dense one."""
    model, (ids, mask) = model_of(family), left_padded(lengths, seed=1)
    found = asking(piece=piece, first=first).run(model, ids, mask.bool(), 3, 2, None)
    dense = prefill(model, ids, mask.bool(), 3, 2)
    torch.testing.assert_close(found.logits, dense.logits)
    for row, length in enumerate(lengths):
        expected = by_hand(model, ids[row, -length:].tolist(), piece, first)
        for layer, scores, one in zip(found.layers, expected, dense.layers, strict=True):
            torch.testing.assert_close(layer.repeated[row, :, -length:], scores)
            torch.testing.assert_close(layer.keys[row, :, -length:], one.keys[row, :, -length:])


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(3, 40), min_size=1, max_size=3), budget=st.integers(8, 40), seed=st.integers(0, 99))
def test_all_heads_of_all_layers_share_one_budget(lengths, budget, seed):
    _, mask = left_padded(lengths, seed)
    generator, width, layers = torch.Generator().manual_seed(seed), max(lengths), []
    for _ in range(3):
        layers.append(PromptLayer(width))
        layers[-1].update(*[torch.zeros(len(lengths), 2, width, 4)] * 2)
        layers[-1].repeated = torch.randint(0, 9, (len(lengths), 2, width), generator=generator) / 8
    found = KVzip(budget=budget).keep_mask(
        Prefill(layers, mask.bool(), torch.zeros(len(lengths), 1), width), None, SIZES
    )
    for row, length in enumerate(lengths):
        pad = width - length
        middle = range(pad + SIZES.sink, max(pad + SIZES.sink, width - SIZES.window))
        places = [(layer, h, j) for layer in range(3) for h in range(2) for j in middle]
        places.sort(key=lambda at: (-layers[at[0]].repeated[row, at[1], at[2]].item(), at))
        best = set(places[: (budget - SIZES.sink - SIZES.window) * 6])
        for layer, kept in enumerate(found):
            for h in range(2):
                expected = {j for j in range(pad, width) if j not in middle or (layer, h, j) in best}
                if kept is None:
                    assert expected == set(range(pad, width))
                else:
                    assert set(kept[row, h].nonzero().flatten().tolist()) == expected


def test_without_words_or_the_pass_it_is_refused():
    model, (ids, _) = model_of("llama"), left_padded([30], seed=1)
    with pytest.raises(RuntimeError, match="calibrate it with a tokenizer"):
        Repeat().run(model, ids, None, 3, 0, None)
    alone = Method("alone", tokens=KVzip(budget=12), sink=2, window=6)
    with pytest.raises(ValueError, match="add prefill="):
        alone.compressed(model, alone.run_prefill(model, ids, None, 3))


def test_requests_are_asked_in_the_tokenizer_s_own_words():
    config, tokenizer = load_config(ModelConfig())
    choice = Repeat(piece=20)
    choice.calibrate(None, tokenizer, config)
    prompt = torch.arange(50, 80)[None]
    (start, end, said), (_, last, later) = choice.pieces(prompt)
    assert (start, end, last) == (0, 20, 30)
    assert tokenizer.decode(said[0, :-20]).startswith("\n\nRepeat the previous context exactly.")
    assert said[0, -20:].tolist() == [*range(50, 70)]
    assert later[0, -10:].tolist() == [*range(70, 80)]
    assert str([*range(62, 70)])[1:-1] in str(later[0].tolist())
