"""The kernels over pages of codes against the plain step: in Triton's interpreter on a CPU, on a GPU with `-m gpu`.

A GPU decodes with the kernel in CUDA, which a CPU runs as C++ in some tests, and else with the one in Triton.
"""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.serving import attention
from leank.eval.serving.coded import CodedLayout
from tests.helpers import emulated
from tests.helpers.layouts import layout
from tests.helpers.serving import Server

pytest.importorskip("triton")  # Linux only

from leank.eval.cache.attention import codes, schedule
from leank.eval.cache.attention.schedule import Split
from leank.eval.serving.paged import DeviceStep, decoding_first
from leank.eval.serving.paged_codes import CodedAttention
from leank.eval.serving.prefill import batches

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
CLOSE = {"rtol": 0, "atol": 2e-2 if ON_GPU else 2e-5}
HEADS, SINK, WINDOW, SCALE = 3, 64, 128, 0.125


ON_DEVICE = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "triton")]


@pytest.fixture
def where(request, monkeypatch):
    """Here in Triton's interpreter, or on a GPU, with `codes.cu` or with the kernel in Triton."""
    if request.param == "triton":
        monkeypatch.setattr(codes, "why_not", lambda *_: "a test asks for Triton")
    return request.param


def random_tokens(generator, n, dim, group, dtype=DTYPE, heads=HEADS):
    k, v = torch.randn(2, n, heads, dim, generator=generator).to(DEVICE, dtype)
    return k, v, torch.randn(n, heads * group, dim, generator=generator).to(DEVICE, dtype)


def both(
    lengths,
    news,
    seed,
    dim=64,
    group=2,
    block=64,
    padding=0,
    generated=(),
    room=700,
    programs=5,
    dtype=DTYPE,
    hits=True,
    rank=None,
    **bits,
):
    """Outputs and pages of the plain step, and those of the step for a GPU.

    lengths: positions of each request once the step is done; news: how many of them are new
    generated: numbers of requests that compute a part of their reply again; room: tokens of a batch of chunks
    rank: of as many as there are heads, None = all heads are here
    bits: of the layout
    """
    ranks = (0, 1) if rank is None else (rank, HEADS)
    of = CodedLayout.of(layout((1, HEADS, dim), seed, **bits), block, SINK, WINDOW, dtype, hits, *ranks)
    heads = len(of.kept.layers[0])
    server = Server(of, seed, dtype, DEVICE, pages=600)
    held = [random_tokens(server.generator, n, dim, group, dtype, heads) for n in lengths]
    before = [
        (i, n, *(x[: n - new] for x in held[i]), n - new) for i, (n, new) in enumerate(zip(lengths, news, strict=True))
    ]
    if before := [one for one in before if one[-1]]:
        server.step(before, SCALE)
    prompts = [n - new // 2 if i in generated else n for i, (n, new) in enumerate(zip(lengths, news, strict=True))]
    step, k, v, q = server.plan(
        [
            (i, prompts[i], *(x[n - new :] for x in held[i]), n)
            for i, (n, new) in enumerate(zip(lengths, news, strict=True))
        ]
    )
    plain, other = server.pages.clone(), server.pages.clone()
    spare = [torch.full((padding, *x.shape[1:]), torch.nan, dtype=dtype, device=DEVICE) for x in (k, v, q)]
    want = torch.zeros_like(q)
    attention.write(step, 0, plain, k, v)
    attention.attend(step, 0, plain, q, k, v, SCALE, want)

    k, v, q = (torch.cat(pair) for pair in zip((k, v, q), spare, strict=True))
    got, starts = torch.zeros_like(q), step.starts + [step.starts[-1]] * padding
    tables = tuple(torch.cat([t, t.new_zeros(padding, t.shape[1])]).int() for t in (step.kept, step.rest))
    slots = tuple(torch.cat([at, at.new_full((padding,), -1)]) for at in step.slots)
    decodes = decoding_first(starts, len(q))
    behind = range(decodes, len(lengths))
    again = [i for i in behind if lengths[i] > prompts[i]]
    others = [
        attention.Step(of, starts[i : i + 2], [lengths[i]], [prompts[i]], *(t[i : i + 1] for t in tables))
        for i in again
    ]
    chunks = batches(of, starts, lengths, [i for i in behind if i not in again], room, DEVICE)
    count = torch.tensor([*lengths, *[0] * padding], dtype=torch.int32, device=DEVICE)
    kernels = CodedAttention(of, DEVICE, heads * group, 8, programs)
    DeviceStep(decodes, count, tables, slots, chunks, others).attend(kernels, 0, other, q, k, v, SCALE, got)
    return (want, plain), (got[: len(want)], other)


def compare(*args, **more):
    (want, plain), (got, other) = both(*args, **more)
    assert torch.equal(other.view(torch.uint8), plain.view(torch.uint8))
    torch.testing.assert_close(got.float(), want.float(), **CLOSE)


@pytest.mark.parametrize(
    ("lengths", "news", "padding", "generated"),
    [
        ([400, 192, 30, 256], [1, 1, 1, 1], 0, []),
        ([330, 3], [1, 1], 2, []),
        ([400, 130, 300, 257], [1, 1, 90, 1], 0, [2]),
        ([450], [200], 0, []),
        ([420, 30, 390, 130, 350], [1, 30, 70, 128, 3], 0, [3]),
        ([320, 70, 130, 64], [5, 2, 70, 64], 3, []),
    ],
    ids=["decoding", "padded", "mixed", "a chunk alone", "chunks of all kinds", "chunks behind short pasts"],
)
@pytest.mark.parametrize("where", ["here", *ON_DEVICE], indirect=True)
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_for_a_gpu_is_the_plain_step(lengths, news, padding, generated, where, packed):
    """Memory that is not a request's own is NaN; pages are equal to the last byte."""
    compare(lengths, news, 3, padding=padding, generated=generated, packed=packed)


@pytest.mark.parametrize("seed", [3] if ON_GPU else [3, 4, 5])  # on a GPU, each has a kernel of its own to compile
@settings(max_examples=2 if not ON_GPU else 8, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3), block=st.sampled_from([64, 192]),
    programs=st.integers(1, 16),
)  # fmt: skip
@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_decoding_step_reads_every_width(seed, lengths, block, programs, where, packed):
    compare(lengths, [1] * len(lengths), seed, block=block, programs=programs, packed=packed)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "dtype"), [(4, DTYPE), (8, DTYPE), (16, DTYPE), (4, torch.float16)])
@settings(max_examples=8, derandomize=True, deadline=None)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5), programs=st.sampled_from([7, 264, 0]))
@pytest.mark.parametrize("packed", [False, True])
def test_a_decoding_step_reads_every_width_on_a_device(group, dtype, lengths, programs, packed):
    compare(lengths, [1] * len(lengths), 6, 128, group, programs=programs, dtype=dtype, packed=packed)


@pytest.fixture(scope="module")
def compiled_folder(tmp_path_factory):
    """Where kernels for the CPU are kept while this file runs."""
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.skipif(ON_GPU or shutil.which("g++") is None, reason="the same on the device; needs g++")
@pytest.mark.parametrize(
    ("lengths", "dtype", "group", "more"),
    [
        ([400, 130, 30], torch.bfloat16, 2, {"padding": 2}),
        ([777, 64], torch.bfloat16, 5, {"block": 192, "programs": 16, "hits": False}),
        ([400, 257], torch.float16, 2, {"keys": (0, 2), "values": (2, 16), "programs": 3}),
        ([400, 130, 30], torch.bfloat16, 2, {"padding": 2, "packed": True}),
        ([777, 64], torch.bfloat16, 5, {"block": 192, "programs": 16, "hits": False, "packed": True}),
        ([400, 257], torch.float16, 2, {"keys": (3, 4, 8), "values": (3, 8), "programs": 3, "packed": True}),
    ],
    ids=["padded", "blocks of three pages", "float16", "packed", "packed blocks of three pages", "packed float16"],
)
def test_the_kernel_in_cuda_reads_pages_on_a_cpu(lengths, dtype, group, more, compiled_folder, monkeypatch):
    """`codes.cu` as C++, over the schedule that Triton's interpreter makes; pages are written in plain PyTorch."""
    launches, step_of = [], {}

    def launch(*given):
        launches.append(given)
        emulated.launch(compiled_folder, *given)

    write = attention.write
    monkeypatch.setattr(attention, "write", lambda step, *given: (step_of.update(step=step), write(step, *given)))
    monkeypatch.setattr(
        CodedAttention, "store", lambda kernels, pages, layer, k, v, step: write(step_of["step"], layer, pages, k, v)
    )
    monkeypatch.setattr(codes, "why_not", lambda *_: None)
    monkeypatch.setattr(codes, "per_sm", lambda *_: 1)
    monkeypatch.setattr(codes, "launch", launch)
    (want, plain), (got, other) = both(lengths, [1] * len(lengths), 5, group=group, dtype=dtype, **more)
    assert torch.equal(other.view(torch.uint8), plain.view(torch.uint8))
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=1e-2 if dtype == torch.bfloat16 else 2e-3)
    assert len(launches) == 1


def plain_schedule(lengths, costs, programs):
    """The splits [row, head, kind, first, last] of each program of a layer, and the readers of each (row, head)."""
    parts = []  # (row, head, kind, tokens, cost of a page, or of a tile of sink and window)
    for row, length in enumerate(lengths):
        sink = min(SINK, length)
        start = max(sink, max(length - 1 - WINDOW, 0) // 64 * 64)
        for head, (of_page, of_tile) in enumerate(costs):
            parts.append((row, head, schedule.SINK, sink + length - start, of_tile))
            if of_page and start > sink:
                parts.append((row, head, schedule.PROMPT, start - sink, of_page))
    pages = [tokens // 64 for _, _, kind, tokens, _ in parts if kind == schedule.PROMPT]
    each = codes.WARPS if sum(-(-n // codes.WARPS) for n in pages) >= programs else codes.WARPS // 2
    start = 128 if sum(pages) < 32 * programs else 32
    at, tiles = 0, []
    for row, head, kind, tokens, cost in parts:
        at += start
        size, cost = (16 * codes.WARPS, cost) if kind == schedule.SINK else (64 * each, cost * each)
        for first in range(0, max(tokens, 1), size):
            tiles.append((at, row, head, kind, first, min(first + size, tokens)))
            at += cost
    span = -(-at // programs)
    readers, splits = {}, [[] for _ in range(programs)]
    for begin, row, head, kind, first, last in tiles:
        program, place = begin // span, (row, head)
        of_place = readers.setdefault(place, [])
        if program not in of_place:
            of_place.append(program)
        mine = splits[program]
        if mine and mine[-1][:3] == [row, head, kind]:
            mine[-1][4] = last
        else:
            mine.append([row, head, kind, first, last])
    return splits, readers


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 400), st.integers(0, 9000)), min_size=1, max_size=5),
    programs=st.integers(1, 40), seed=st.integers(0, 5),
)  # fmt: skip
def test_the_schedule_is_that_of_a_loop_over_tiles(lengths, programs, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codes, "why_not", lambda *_: None)
        patch.setattr(codes, "per_sm", lambda *_: 1)
        of = CodedLayout.of(layout((2, HEADS, 64), seed), 64, SINK, WINDOW, torch.bfloat16)
        kernels = CodedAttention(of, DEVICE, HEADS * 2, 8, programs)
    kernels._schedule.fill_(-7)
    kernels.schedule(torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    for layer, table in enumerate(kernels._schedule.tolist()):
        splits, readers = plain_schedule(lengths, kernels._costs[layer].tolist(), programs)
        numbers = {}
        for program, expected in enumerate(splits):
            found, line = [], program
            while line >= 0:
                found.append(table[line])
                line = table[line][Split.NEXT]
            if not expected:
                assert [found[0][c] for c in (Split.FIRST, Split.LAST, Split.PARTIALS)] == [0, 0, 0]
                assert len(found) == 1
                continue
            named = [[x[c] for c in (Split.ROW, Split.HEAD, Split.KIND, Split.FIRST, Split.LAST)] for x in found]
            assert named == expected
            for i, split in enumerate(found):
                place = tuple(split[Split.ROW : Split.HEAD + 1])
                others = [tuple(x[Split.ROW : Split.HEAD + 1]) for x in found]
                assert split[Split.FRESH] == (i == 0 or others[i - 1] != place)
                ends = i == len(found) - 1 or others[i + 1] != place
                assert split[Split.PARTIALS] == (len(readers[place]) if ends else 0)
                rank = readers[place].index(program)
                assert split[Split.NUMBER] == split[Split.FIRST_NUMBER] + rank
                assert numbers.setdefault(split[Split.NUMBER], (place, program)) == (place, program)
                template = kernels._templates[layer, place[1], int(split[Split.KIND] == schedule.PROMPT)].tolist()
                for column in (Split.K_START, Split.V_START, Split.WHOLE, Split.THIRD, Split.VALUES):
                    assert split[column] == template[column]
        assert max(numbers) < kernels._part.shape[0] // kernels._padded


@pytest.mark.parametrize("where", ON_DEVICE, indirect=True)
@pytest.mark.parametrize("packed", [False, True])
def test_a_captured_step_is_replayed_while_rows_grow_and_fill_pages(where, packed):
    """Writing, packing and attention are one graph; the third row's page is filled by the second replay."""
    lengths, dim, group = [300, 511, 126], 64, 2
    of = CodedLayout.of(layout((1, HEADS, dim), 3, packed=packed), 64, SINK, WINDOW, DTYPE)
    server = Server(of, 3, DTYPE, DEVICE)
    held = [random_tokens(server.generator, n + 4, dim, group) for n in lengths]
    server.step([(i, n, *(x[:n] for x in held[i]), n) for i, n in enumerate(lengths)], SCALE)
    kernels, graph = CodedAttention(of, DEVICE, HEADS * group, 8, 9), torch.cuda.CUDAGraph()
    pages, plain, wide = server.pages.clone(), server.pages, 100  # blocks of a row of the tables
    for new in range(1, 5):
        step, k, v, q = server.plan(
            [(i, n, *(x[n + new - 1 : n + new] for x in held[i]), n + new) for i, n in enumerate(lengths)]
        )
        arguments = [
            torch.tensor([n + new for n in lengths], dtype=torch.int32, device=DEVICE),
            *(torch.nn.functional.pad(x.int(), (0, wide - x.shape[1])) for x in (step.kept, step.rest)),
            *step.slots, k, v, q,
        ]  # fmt: skip
        pages[plain.isnan().all(-1)] = torch.nan  # what left the window
        if new == 1:
            fixed = [x.clone() for x in arguments]
            count, *tables = fixed[:3]
            out = torch.zeros_like(q)
            before = pages.clone()
            given = kernels, 0, pages, fixed[7], fixed[5], fixed[6], SCALE, out
            DeviceStep(3, count, tuple(tables), tuple(fixed[3:5])).attend(*given)  # compiles
            pages.copy_(before)
            with torch.cuda.graph(graph):
                DeviceStep(3, count, tuple(tables), tuple(fixed[3:5])).attend(*given)
        for to, x in zip(fixed, arguments, strict=True):
            to.copy_(x)
        graph.replay()
        want = torch.zeros_like(q)
        attention.write(step, 0, plain, k, v)
        attention.attend(step, 0, plain, q, k, v, SCALE, want)
        torch.testing.assert_close(out.float(), want.float(), **CLOSE)
        assert torch.equal(pages.view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.parametrize("where", ["here", *ON_DEVICE], indirect=True)
@pytest.mark.parametrize("hits", [True, False])
def test_whole_tokens_lie_in_pages_of_a_few(where, hits):
    """Codes of 2 bits leave a page of whole tokens less than 16, a quarter of a tile; without hits, no divisor."""
    bits = {"keys": (0, 2, 8), "values": (2,)}
    block = CodedLayout.of(layout((1, HEADS, 64), 3, **bits), 64, SINK, WINDOW, DTYPE, hits).rest.block
    assert block < 16
    assert (64 % block == 0) == hits
    compare([420, 30, 390, 257], [1, 1, 70, 3], 3, hits=hits, **bits)


@pytest.mark.parametrize(("rank", "packed"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("where", ["here", *ON_DEVICE], indirect=True)
def test_a_rank_reads_its_heads(rank, packed, where):
    """The first one's keep nothing."""
    compare([400, 130, 300], [1, 1, 90], 3, rank=rank, packed=packed)


def test_what_the_kernels_cannot_read_is_refused():
    of = CodedLayout.of(layout((1, HEADS, 32), 1), 64, SINK, WINDOW, DTYPE)
    with pytest.raises(ValueError, match="channels, not 32"):
        CodedAttention(of, DEVICE, 6, 1, 4)


def test_all_is_stored_before_anything_is_read(monkeypatch):
    """Requests of one step may share pages that one of them fills in it."""
    calls = []

    class Kernels:
        def __getattr__(self, name):
            return lambda *given: calls.append(name)

    for name in ("write", "attend"):
        monkeypatch.setattr(attention, name, lambda *given, name=name: calls.append(f"plain {name}"))
    table, slots, rows = torch.zeros(3, 1, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, 1)
    step = DeviceStep(1, table[:, 0], (table, table), (slots, slots), batches=[None], others=[None])
    step.attend(Kernels(), 0, rows, rows, rows, rows, SCALE, rows)
    assert calls == ["store", "plain write", "schedule", "attend", "prefill", "plain attend"]
