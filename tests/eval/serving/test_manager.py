"""vLLM's own cache manager with this package's: pages that a step reads hold what it needs, and none stays held."""

import math
import random
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from leank.eval.cache.storage.segment import PAGE
from leank.eval.serving.coded import CodedLayout
from leank.eval.serving.layout import PageLayout
from leank.precision import Precision
from tests import ROOT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in an environment of its own: make vllm-test"),
]
SINK, WINDOW, BLOCK = 4, 24, 16


def test_vllm_keeps_every_page_behind_the_window_because_the_sink_is_there():
    from leank.eval.serving.manager import RestSpec

    common = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32, "block_size": BLOCK}
    spec = RestSpec(**common, sliding_window=WINDOW + 1, sink=SINK, hit=BLOCK, every=0, hits=False)
    assert spec.num_retained_tokens == 0  # the V2 runner of vLLM 0.33 nulls pages before as many tokens, unless it is 0


def test_lengths_of_prompts_are_asked_for_only_where_a_reply_is_computed_again():
    from leank.eval.serving.backend import all_new

    def table(prefill, prompt):
        lengths = {"prefill_len": prefill, "prompt_len": prompt}
        return SimpleNamespace(**{name: SimpleNamespace(np=np.array(x)) for name, x in lengths.items()})

    assert all_new([table([7, 0], [7, 0])])
    assert not all_new([table([7, 9], [7, 5])])
    assert not all_new([])  # another runner, of which nothing is known


class Books:
    """A manager, and what was written to each page of each group: the whole prefix up to each position."""

    def __init__(self, blocks, caching, every, step, coded=False):
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        from leank.eval.serving.manager import RestSpec
        from leank.eval.serving.plugin import use_backend

        use_backend()
        init_none_hash(sha256)
        keep = torch.zeros(1, 2, 32, dtype=torch.bool)
        keep[0, 0, :16] = True
        layout = PageLayout.of(keep, BLOCK, SINK, WINDOW, caching)
        if coded:
            precision = Precision(8 * keep.to(torch.uint8), torch.full((1, 2), 8, dtype=torch.uint8))
            layout = CodedLayout.of(precision, PAGE, PAGE, 2 * PAGE, torch.float32, caching)
        self.layout, block = layout, layout.kept.block
        common = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32, "page_size_padded": 10**6}
        kept = FullAttentionSpec(block_size=block, **common)
        sizes = {
            "block_size": layout.rest.block,
            "sliding_window": layout.window + 1,
            "sink": layout.sink,
            "hit": layout.hit,
        }
        groups = [
            KVCacheGroupSpec(["kept"], kept),
            KVCacheGroupSpec(["rest"], RestSpec(**sizes, every=every, hits=caching, grain=layout.grain, **common)),
        ]
        config = KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=every)
        blocks_of = block, layout.rest.block  # vLLM's engine makes these of them
        hashed = math.gcd(*blocks_of) if caching else math.lcm(*blocks_of)
        self.manager = KVCacheManager(
            config, 1000, math.lcm(*blocks_of), hashed, max_in_flight_tokens=step, enable_caching=caching
        )
        self.most = self.manager.coordinator.single_type_managers[1].cap
        self.content, self.hits = {}, 0
        hasher = get_request_block_hasher(hashed, sha256)
        self.request = lambda name, tokens: Request(
            name, tokens, SamplingParams(max_tokens=1000), None, block_hasher=hasher
        )

    def step(self, request, new):
        """Compute up to `new` positions; returns False if there is no room."""
        hits, cached = None, 0
        if request.num_computed_tokens == 0:
            hits, cached, _ = self.manager.get_computed_blocks(request)
        first = request.num_computed_tokens + cached
        self.hits += bool(cached)
        end = min(first + new, request.num_tokens)
        fits = request.num_computed_tokens == 0
        if self.manager.allocate_slots(request, end - first, cached, hits, full_sequence_must_fit=fits) is None:
            return False
        self.read(request, first)
        self.write(request, first, end)
        request.num_computed_tokens = end
        return True

    def pages(self, request):
        return zip((self.layout.kept, self.layout.rest), self.manager.get_block_ids(request.request_id), strict=True)

    def read(self, request, first):
        tokens = tuple(request.all_token_ids)
        for group, table in self.pages(request):
            window = max(0, self.layout.window_start(first))
            whole = {*range(min(self.layout.sink, first)), *range(window, first)}
            for at in whole if group is self.layout.rest else range(first):
                block = table[at // group.block]
                assert block, (request.request_id, at, first)
                assert self.content[block, at % group.block] == (id(group), tokens[: at + 1])

    def write(self, request, first, end):
        tokens = tuple(request.all_token_ids)
        for group, table in self.pages(request):
            assert len(table) == -(-end // group.block)
            if group is self.layout.rest:
                assert sum(map(bool, table)) <= self.most
            for at in range(first, end):
                if table[at // group.block]:
                    self.content[table[at // group.block], at % group.block] = id(group), tokens[: at + 1]


@pytest.mark.parametrize(
    ("coded", "caching", "every"),
    [(False, False, 0), (False, True, 0), (False, True, 32), (False, True, 96), (True, False, 0), (True, True, 0),
     (True, True, 128)],
)  # fmt: skip
@pytest.mark.parametrize("step", [20, 64, 1000])
def test_every_step_finds_its_pages(coded, caching, every, step):
    draw = random.Random(step + every)
    books = Books((220 if caching else 150) if coded else 60, caching, every, step, coded)
    pool, running, made, preempted = books.manager.block_pool, [], 0, 0
    longest = [64, 200, 320] if coded else [16, 70, 160]
    prefixes = [[draw.randrange(50) for _ in range(draw.choice(longest))] for _ in range(3)]
    for _ in range(1500):
        if len(running) < 6 and made < 60:
            prompt = draw.choice(prefixes) + [draw.randrange(50) for _ in range(draw.randint(1, 90))]
            running.append(books.request(str(made), prompt))
            made += 1
        if not running:
            break
        request = draw.choice(running)
        if not books.step(request, step):
            victim = max((r for r in running if r.num_computed_tokens), key=running.index, default=None)
            assert victim is not None, "a single request always fits"
            books.manager.free(victim)  # as the scheduler preempts
            victim.num_computed_tokens = 0
            preempted += 1
            continue
        if request.num_computed_tokens == request.num_tokens:
            if request.num_output_tokens >= 60 or draw.random() < 0.02:
                books.manager.free(request)
                running.remove(request)
            else:
                request.append_output_token_ids(draw.randrange(50))
    for request in running:
        books.manager.free(request)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert preempted
    assert made > 10
    assert bool(books.hits) == caching


@pytest.mark.parametrize("hits", [True, False])
@pytest.mark.parametrize("kept", [True, False])
def test_a_token_of_a_page_has_whole_numbers(kept, hits):
    """vLLM 0.33 views the bytes of a token as numbers; without a prefix cache, pages of `rest` have 20 tokens here."""
    from leank.eval.serving.backend import PageHolder
    from leank.eval.serving.settings import ServerSettings

    mask = ROOT / "models/reference/mask_70pct.safetensors"
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32, enable_prefix_caching=hits, prefix_cache_retention_interval=None),
        model_config=SimpleNamespace(dtype=torch.float32),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    spec = PageHolder(ServerSettings(str(mask), 16, 144), kept).get_kv_cache_spec(config)
    assert spec.state_content_bytes % 4 == 0
    assert spec.block_size * spec.state_content_bytes <= spec.page_size_padded
