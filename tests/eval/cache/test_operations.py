"""Any order of operations on a cache leaves each row as if it had been alone and its tokens had come one by one."""

import copy
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from leank.eval.cache import Sizes, compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.store import Store
from leank.eval.inference.prefill import extend, joined
from leank.versions import CACHE
from tests.helpers.cache_oracle import SEEDS, VOCAB, left_padded, random_keep, tiny_model
from tests.helpers.thinned import thinned
from tests.helpers.turns import METHODS, begin, conversation, go_on

LENGTH = st.one_of(st.integers(1, 3), st.integers(1, 45))
CHECKS = settings(max_examples=4, stateful_step_count=6, derandomize=True, suppress_health_check=list(HealthCheck))


class Rows(RuleBasedStateMachine):
    """A padded batch of one method beside caches of one row each, whose tokens come one by one."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    @initialize(lengths=st.lists(LENGTH, min_size=1, max_size=3), seed=SEEDS)
    def begin(self, lengths, seed):
        assume(min(lengths) >= self.method.obs_queries)
        self.prefill(lengths, seed)

    def prefill(self, lengths, seed):
        self.model, method = tiny_model("llama"), self.method
        self.model.set_attn_implementation(ATTENTION)
        ids, mask = left_padded(lengths, seed)
        mask = mask.bool()
        self.real = None if mask.all() else mask
        self.cache = method.cache(self.model, method.run_prefill(self.model, ids, self.real, 0))
        prompts = [ids[row : row + 1, mask[row]] for row in range(len(ids))]
        self.alone = [method.cache(self.model, method.run_prefill(self.model, one, None, 0)) for one in prompts]

    @rule(lengths=st.lists(st.one_of(st.just(1), st.integers(1, 9)), min_size=3, max_size=3), seed=SEEDS)
    def turn(self, lengths, seed):
        ids, there = left_padded(lengths[: len(self.alone)], seed)
        there = there.bool()
        self.real = joined(self.real, None if there.all() else there, self.cache.get_seq_length(), ids)
        got = extend(self.model, self.cache, ids, self.real)
        for row, one in enumerate(self.alone):
            for token in ids[row, there[row]]:
                want = extend(self.model, one, token.view(1, 1), None)
            torch.testing.assert_close(got[row : row + 1], want, rtol=1e-7, atol=1e-7)
            for a, b in zip(self.cache.layers, one.layers, strict=True):
                assert (a.store.seen[row], a.store.start[row]) == (b.store.seen[0], b.store.start[0])
                assert (a.store.tail.length[row] == b.store.tail.length[0]).all()

    @rule(order=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def choose(self, order):
        """Beams, dropped rows and repeated ones."""
        rows = [row % len(self.alone) for row in order]
        self.cache.reorder_cache(torch.tensor(rows))
        self.alone = [copy.deepcopy(self.alone[row]) for row in rows]
        self.real = None if self.real is None else self.real[rows]

    @rule(repeats=st.integers(1, 2), new=st.integers(1, 9), seed=SEEDS)
    def copied(self, repeats, new, seed):
        """A copy, and the rows of repeat(), go on as the cache does, and leave it as it is."""
        rows, real = torch.arange(len(self.alone)).repeat_interleave(repeats), self.real
        one, many, other = self.cache, self.cache.repeat(repeats), copy.deepcopy(self.cache)
        self.cache = copy.deepcopy(self.cache)
        ids = torch.randint(2, VOCAB, (len(self.alone), new), generator=torch.Generator().manual_seed(seed))
        for _ in range(2):
            real = joined(real, None, one.get_seq_length(), ids)
            want = extend(self.model, one, ids, real)
            got = extend(self.model, many, ids[rows], None if real is None else real[rows])
            torch.testing.assert_close(got, want[rows], rtol=1e-7, atol=1e-7)
            extend(self.model, other, (ids + 1) % VOCAB, real)  # which goes another way


class Dense(RuleBasedStateMachine):
    """A cache that keeps every channel beside the model without a cache; tokens are taken back, and reset() comes."""

    @initialize(sizes=st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 5)))
    def begin(self, sizes):
        self.model, self.prompt = tiny_model("qwen2"), 0
        self.cache = compressed_cache(self.model, None, *sizes, backend="torch")
        self.tokens = torch.empty(1, 0, dtype=torch.long)

    def feed(self, new):
        self.tokens = torch.cat([self.tokens, new], 1)
        with torch.no_grad():
            got = self.model(new, **{CACHE: self.cache}).logits[:, -1]
            torch.testing.assert_close(got, self.model(self.tokens).logits[:, -1], rtol=1e-7, atol=1e-7)

    def drawn(self, count, seed):
        return torch.randint(2, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))

    @rule(count=LENGTH, seed=SEEDS)
    def some(self, count, seed):
        self.feed(self.drawn(count, seed))

    @precondition(lambda self: not self.tokens.shape[1])
    @rule(counts=st.lists(st.integers(1, 9), min_size=2, max_size=3), seed=SEEDS)
    def announced(self, counts, seed):
        self.cache.expect(sum(counts))
        self.prompt = sum(counts)
        for number, count in enumerate(counts):
            self.feed(self.drawn(count, seed + number))

    @precondition(lambda self: self.tokens.shape[1])
    @rule(count=st.integers(1, 6))
    def take_back(self, count):
        assume(0 < self.tokens.shape[1] - count >= self.prompt)  # what was announced must come
        with suppress(ValueError):  # of tokens that have been compressed; the cache stays as it is
            self.cache.crop(-count)
            self.tokens = self.tokens[:, :-count]

    @rule()
    def record(self):
        self.cache.activate_past_recording()

    @rule()
    def reset(self):
        self.cache.reset()
        self.tokens, self.prompt = self.tokens[:, :0], 0


@pytest.mark.filterwarnings("ignore:a pass of")
@pytest.mark.parametrize("name", thinned(METHODS, keep=(0, 3, 6, 8, 9, 10)))  # every axis
def test_rows_of_a_batch_are_as_if_alone(name):
    run_state_machine_as_test(lambda: Rows(METHODS[name]), settings=CHECKS)


@pytest.mark.filterwarnings("ignore:a pass of")
class TestDense(Dense.TestCase):
    settings = settings(CHECKS, max_examples=12, stateful_step_count=10)


def held(thing, seen):
    """Every tensor that can be reached from an object of this project."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for inner in thing.values() if isinstance(thing, dict) else thing:
            yield from held(inner, seen)
    elif type(thing).__module__.startswith("leank.eval."):
        for inner in getattr(thing, "__dict__", {}).values():
            yield from held(inner, seen)


@pytest.mark.parametrize("name", METHODS)
def test_memory_counts_every_tensor_that_is_held(name):
    """Found through the objects, not through what they say of themselves; the mask, too."""
    machine = Rows(METHODS[name])
    machine.prefill([40, 22], 3)
    machine.turn([5, 9, 1], 4)
    middles = [layer.middle for layer in machine.cache.layers]
    chosen = {id(part) for one in middles for part in (one.bits, one.reads, one.eviction)}  # serve every prompt
    sizes = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held(machine.cache.layers, chosen)
    }
    ids = machine.cache.conversation.ids
    if ids is not None:
        sizes[ids.untyped_storage().data_ptr()] = ids.untyped_storage().nbytes()
    assert machine.cache.memory().total == sum(sizes.values())


def test_a_long_turn_slides_through_a_small_window():
    """A turn of many windows keeps no more tokens whole than the window may hold."""
    model = tiny_model("llama")
    ids, mask, columns = conversation((20,), [(300,)])
    cache = begin(METHODS["leank"], model, ids[:, :20], mask[:, :20])
    slots = cache.layers[0].store.ring_k.shape[2]
    go_on(model, cache, ids, mask, 20, columns[1:])
    store = cache.layers[0].store
    assert store.ring_k.shape[2] == slots
    assert 6 <= int((store.seen - store.start).max()) < 10


def test_a_copied_prompt_is_complete(recwarn):
    """Nothing warns of a chunk where a question follows the copy of a context."""
    model = tiny_model("llama")
    ids = left_padded([40], 1)[0]
    cache = compressed_cache(model, random_keep(9), 2, 6, 4)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        model(ids[:, :9], **{CACHE: copy.deepcopy(cache)})
        model(ids[:, :9].repeat(3, 1), **{CACHE: cache.repeat(3)})
    assert not recwarn
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="give the number of copies of each row"):
            cache.repeat(wrong)


def test_a_copied_store_makes_its_own_schedule():
    """The kernel's table holds addresses: with the old one a copy would read the original's tokens."""
    pytest.importorskip("triton")
    from leank.eval.cache.attention.launch import Kernel

    k, v = torch.randn(2, 1, 2, 300, 64)
    kernel, store = Kernel(programs=4), Store(k, v, None, Middle(), Sizes(4, 64, 32))
    plan = kernel.prepare(store)
    other = copy.deepcopy(store)
    assert kernel.plan(other) is None
    assert copy.deepcopy(kernel).plan(store) is None
    assert not torch.equal(kernel.prepare(other).table, plan.table)
