"""Which pages a request holds for its sink and window."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from leank.eval.serving.plan import RestBlocks

sizes = st.builds(
    lambda block, times, sink, window, every: RestBlocks(block, block * times, sink, window, every * block * times),
    st.integers(1, 16), st.integers(1, 4), st.integers(0, 40), st.integers(1, 100), st.integers(0, 6),
)  # fmt: skip


def pages_of(first, end, block):
    return set(range(max(0, first) // block, -(-end // block))) if end > max(0, first) else set()


@settings(max_examples=200)
@given(rest=sizes, steps=st.lists(st.integers(1, 300), min_size=1, max_size=6))
@example(rest=RestBlocks(10, 30, 0, 53, 180), steps=[102, 179])  # the second step passes a mark, though it is shorter
def test_what_the_next_step_reads_is_stored_and_the_bound_holds(rest, steps):
    table, end, most = [], 0, rest.most(max(steps), sum(steps), hits=False)
    for new in steps:
        for page in range(rest.sink_pages, min(len(table), rest.first_in_window(end))):
            table[page] = False
        table += rest.new(len(table), end + new)
        end += new
        held = {i for i, real in enumerate(table) if real}
        assert len(held) <= most
        whole = pages_of(0, min(rest.sink, end), rest.block) | pages_of(end - rest.window, end, rest.block)
        assert whole <= held


@settings(max_examples=200)
@given(rest=sizes, start=st.integers(0, 20), new=st.integers(1, 300))
def test_the_bound_holds_behind_a_prefix_hit(rest, start, new):
    hit, end = start * rest.hit, start * rest.hit + new
    held = pages_of(0, min(rest.sink, hit), rest.block) | pages_of(hit - rest.window, hit, rest.block)
    pages = -(-hit // rest.block)
    held |= {pages + i for i, real in enumerate(rest.new(pages, end)) if real}
    assert len(held) <= rest.most(end, end, hits=True)


@settings(max_examples=200)
@given(rest=sizes, end=st.integers(2, 900))
def test_a_prompt_sent_again_finds_its_window(rest, end):
    held = {i for i, real in enumerate(rest.new(0, end)) if real}
    hit = (end - 1) // rest.hit * rest.hit
    assert pages_of(hit - rest.window, hit, rest.block) <= held
    if rest.every and end > rest.every:
        mark = end // rest.every * rest.every
        assert pages_of(mark - rest.window, mark, rest.block) <= held


def test_a_long_step_stores_little():
    rest = RestBlocks(block=16, hit=32, sink=16, window=144)
    assert sum(rest.new(0, 8192)) == 1 + 11
    assert rest.most(8192, 8192, hits=False) == 1 + 12
    assert rest.most(2048, 8192, hits=False) == rest.most(8192, 8192, hits=True) == 1 + 2 * 12
