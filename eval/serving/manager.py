"""How vLLM manages the pages of the group `rest`: it spares the sink, frees the middle and finds prefix hits.

vLLM asks for pages before each step. A page of a long step that leaves the window before the step ends gets the null
block at once (`RestBlocks`), so that the memory which a mask saves becomes admitted tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from leank.eval.serving.rest import RestBlocks


@dataclass(frozen=True, kw_only=True)
class RestSpec(SlidingWindowSpec):
    """The group `rest` as vLLM sees it; `sliding_window` counts the next position too, so it is the window and one."""

    sink: int  # tokens kept whole at the beginning
    hit: int  # tokens; prefix hits end at multiples of them
    every: int  # tokens between the positions where prefix hits can end besides the ends of steps, 0 = none
    hits: bool  # whether there is a prefix cache
    grain: int = 1  # tokens; the window begins at a multiple of them

    @property
    def num_retained_tokens(self) -> int:
        """0: the runner of vLLM 0.33 else takes what lies so far behind the window as freed, the sink too."""
        return 0

    @property
    def pages(self) -> RestBlocks:
        return RestBlocks(self.block_size, self.hit, self.sink, self.sliding_window - 1, self.every, self.grain)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Pages that one request holds at most; both vLLM's planner and its admission reckon with them."""
        return self.pages.most(max_in_flight_tokens, max_model_len, self.hits)

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, Any]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())


class RestManager(SlidingWindowManager):
    """Gives out the pages of `rest`; one block of the null block stands for every page that is not stored."""

    def __init__(self, kv_cache_spec: RestSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.cap: int | None = kwargs.get("max_admission_blocks_per_request")  # vLLM's name differs between versions
        self.pages = kv_cache_spec.pages
        self._freed: dict[str, int] = {}  # request -> the page up to which its middle is freed

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: RestSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Find the longest prefix whose sink and last window are stored; returns (pages of each group, tokens)."""
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
            alignment_tokens, dcp_world_size, pcp_world_size,
        )  # fmt: skip
        hashes = resolve_block_hashes(block_hashes, block_pool.hash_block_size, kv_cache_spec.block_size)
        for page in range(min(kv_cache_spec.pages.sink_pages, len(found[0]))):
            of_groups = block_pool.get_cached_block(hashes[page], kv_cache_group_ids)
            if not of_groups:
                return tuple([] for _ in found), 0
            for pages, block in zip(found, of_groups, strict=True):
                pages[page] = block
        return found, length

    @classmethod
    def reachable_block_mask(cls, *args: Any, **kwargs: Any) -> None:
        """Let every stored page be found by its hash, since all others are null."""
        return None

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Count the blocks that a step up to `num_tokens`, or with `apply_admission_cap` the whole request, takes."""
        held = self.req_to_blocks.get(request_id, [])
        hits = self._still_read(new_computed_blocks, total_computed_tokens)
        taken = self._get_num_evictable_blocks(hits)
        if apply_admission_cap:
            most = min(self.cap or num_tokens, -(-num_tokens // self.block_size))
            real = sum(not block.is_null for block in (*held, *hits))
            return max(0, most - real) + taken
        return sum(self.pages.new(max(len(held), len(new_computed_blocks)), num_tokens)) + taken

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Give a new request the pages of a prefix hit that the next step reads, and null blocks between them."""
        assert not num_external_computed_tokens, "KV connectors are refused at the start"
        blocks = self._still_read(new_computed_blocks, num_local_computed_tokens)
        self.block_pool.touch([block for block in blocks if not block.is_null])
        self.req_to_blocks[request_id].extend(blocks)
        self.num_cached_block[request_id] = len(blocks)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Extend a request to `num_tokens`; returns its new pages, null blocks included."""
        held = self.req_to_blocks[request_id]
        stored = self.pages.new(len(held), num_tokens)
        real = iter(self.block_pool.get_new_blocks(sum(stored)) if any(stored) else [])
        new = [next(real) if is_stored else self._null_block for is_stored in stored]
        held.extend(new)
        return new

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the pages between the sink and the window of the next position."""
        held = self.req_to_blocks.get(request_id)
        if not held:
            return
        first = self._freed.get(request_id, self.pages.sink_pages)
        last = min(self.pages.first_in_window(processed_computed_tokens), len(held))
        gone = [page for page in range(last - 1, first - 1, -1) if not held[page].is_null]
        self.block_pool.free_blocks([held[page] for page in gone])
        for page in gone:
            held[page] = self._null_block
        self._freed[request_id] = max(first, last)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request; returns its blocks."""
        self._freed.pop(request_id, None)
        return [block for block in super().pop_blocks_for_free(request_id) if not block.is_null]

    def _still_read(self, blocks: Sequence[KVCacheBlock], computed: int) -> list[KVCacheBlock]:
        """The pages of a prefix hit, with null blocks for those that no step from position `computed` on reads."""
        middle = range(self.pages.sink_pages, self.pages.first_in_window(computed))
        return [self._null_block if page in middle else block for page, block in enumerate(blocks)]
