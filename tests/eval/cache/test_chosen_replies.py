"""Layers and whole replies whose steps choose what they read, in Triton against the plain form."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.kernels import DEVICE, ON_GPU

from leank.eval.cache import compressed_cache  # isort: skip  (needs Triton, which the line above asks for)
from leank.eval.cache.attention.backend import choose_backend
from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.choose import Chosen
from leank.eval.cache.layer import CompressedLayer
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.sizes import Sizes
from tests.helpers.chosen_reads import CLOSE, DTYPE, random_reads

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def layer_pair(reads, keep, lengths, sizes, seed):
    """Two sealed layers of the same prompt: the first runs in plain PyTorch, the second in the kernel."""
    generator = torch.Generator().manual_seed(seed)
    dim, width = keep.shape[-1], max(lengths)
    k, v = torch.randn(2, len(lengths), len(keep), width, dim, generator=generator).to(DEVICE, DTYPE)
    real = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).to(DEVICE)
    layers = []
    for choice in (Plain(), choose_backend("triton") if ON_GPU else Only(Chosen(programs=4))):
        layers.append(CompressedLayer(Middle(keep, reads=reads), sizes, choice))
        layers[-1].seal(k, v, real)
    return layers


class Only:
    """A choice of one backend."""

    def __init__(self, backend):
        self.backend = backend

    def choose(self, *args):
        return self.backend


@pytest.mark.skipif(ON_GPU, reason="numbers of a later turn are the plain form's")
@pytest.mark.parametrize("kind", ["quest", "labels"])
def test_a_later_turn_and_a_copy_go_on(kind):
    keep = torch.ones(2, 64, dtype=torch.bool)
    plain, fast = layer_pair(random_reads(kind, 90, 2, 64, 8), keep, [150, 90], Sizes(8, 40, 8), 3)
    generator = torch.Generator().manual_seed(4)
    for new in (1, 19, 1, 12, 1):
        k, v = torch.randn(2, 2, 2, new, 64, generator=generator)
        q = torch.randn(2, 4, new, 64, generator=generator)
        outs = []
        for layer in (plain, fast):
            layer.update(k, v)
            outs.append(layer.attend(q))
        torch.testing.assert_close(outs[1], outs[0], **CLOSE)
        fast = copy.deepcopy(fast)


def a_model(layers, heads, group, dim):
    """A random model whose attention is peaked enough that what is read changes its tokens."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=211, hidden_size=128, intermediate_size=128, num_hidden_layers=layers, head_dim=dim,
        num_attention_heads=heads * group, num_key_value_heads=heads, initializer_range=0.2, eos_token_id=None,
        max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DEVICE, DTYPE).eval()


def replies(model, kind, kept, backend, new, generate=None):
    """Greedy tokens of a padded batch on a cache whose first layer reads all, and the cache."""
    config = model.config
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    keep = torch.rand(heads, dim, generator=torch.Generator().manual_seed(3)) < kept
    reads = [None] * (layers > 1) + [random_reads(kind, 136, heads, dim, 8)] * (layers - (layers > 1))
    cache = compressed_cache(model, [Middle(keep, reads=one) for one in reads], 8, 48, 16, backend)
    if backend == "triton" and not ON_GPU:
        cache.choice.options = {"programs": 3}
    ids = torch.randint(3, 200, (2, 260), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    mask = (torch.arange(260, device=DEVICE) >= torch.tensor([[0], [90]], device=DEVICE)).long()
    given = {"attention_mask": mask, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    if generate is None:
        return model.generate(ids * mask, past_key_values=cache, **given)[:, 260:], cache
    return cache.generate(model, input_ids=ids * mask, **given)[:, 260:], cache


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="in float32, so that no rounding changes a token")
@pytest.mark.parametrize("kind", ["quest", "labels"])
def test_a_thousand_tokens_are_those_of_the_plain_form(kind):
    model = a_model(1, 1, 2, 64)
    (want, plain), (got, fast) = (replies(model, kind, 0.7, backend, 1000) for backend in ("torch", "triton"))
    assert torch.equal(got, want)
    assert len(want.unique()) > 10
    assert fast.layers[0].store.tail.length.min() == plain.layers[0].store.tail.length.min() > 900
    assert isinstance(fast.layers[0].backend, Chosen)
    everything, _ = replies(model, None, 0.7, "torch", 1000)
    assert not torch.equal(want, everything)  # what is not read changes tokens


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["quest", "labels", "four bits"])
def test_a_thousand_replayed_tokens_are_those_of_single_launches(kind):
    model = a_model(3, 2, 4, 64)
    (want, _), (got, cache) = (replies(model, kind, 0.7, "triton", 1050, generate) for generate in (None, "graph"))
    assert torch.equal(got, want)
    assert cache.steps.loop.captured
    assert cache.layers[1].store.tail.length.min() > 900


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["quest", "labels", "four bits"])
def test_a_thousand_captured_steps_are_those_of_the_plain_form(kind):
    steps, group, heads, dim = 1100, 4, 4, 128
    keep, sizes = torch.ones(heads, dim, dtype=torch.bool), Sizes(8, 48, 16)
    plain, fast = layer_pair(random_reads(kind, 200, heads, dim, 8), keep, [300, 170], sizes, 7)
    generator = torch.Generator().manual_seed(8)

    def step(layer, q, k, v):
        layer.update(k, v)
        return layer.attend(q)

    graph, off = None, 0
    for i in range(steps):
        k, v = torch.randn(2, 2, heads, 1, dim, generator=generator).to(DEVICE, DTYPE)
        q = torch.randn(2, heads * group, 1, dim, generator=generator).to(DEVICE, DTYPE)
        want = step(plain, q, k, v)
        if i == 3:
            static, graph = [x.clone() for x in (q, k, v)], torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = step(fast, *static)
        if graph is None:
            out = step(fast, q, k, v)
        else:
            for held, new in zip(static, (q, k, v), strict=True):
                held.copy_(new)
            graph.replay()
            fast.advance(1)
        off += int((~torch.isclose(out, want, **CLOSE)).any(-1).sum())
    assert fast.store.tail.length.max() == plain.store.tail.length.max() > steps - 100
    assert off <= 2e-3 * steps * 2 * heads * group  # a page or token that ties with another may be chosen
