"""The kernels over pages of codes against the plain step: in Triton's interpreter on a CPU, on a GPU with `-m gpu`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leank.eval.serving import attention
from leank.eval.serving.coded import CodedLayout
from tests.helpers.layouts import layout
from tests.helpers.serving import Server

pytest.importorskip("triton")  # Linux only

from leank.eval.serving.paged import DeviceStep, decoding_first
from leank.eval.serving.paged_codes import CodedAttention
from leank.eval.serving.prefill import batches

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
CLOSE = {"rtol": 0, "atol": 2e-2 if ON_GPU else 2e-5}
HEADS, SINK, WINDOW, SCALE = 3, 64, 128, 0.125


def random_tokens(generator, n, dim, group):
    k, v = torch.randn(2, n, HEADS, dim, generator=generator).to(DEVICE, DTYPE)
    return k, v, torch.randn(n, HEADS * group, dim, generator=generator).to(DEVICE, DTYPE)


def both(lengths, news, seed, dim=64, group=2, block=64, padding=0, generated=(), room=700, programs=5, **bits):
    """Outputs and pages of the plain step, and those of the step for a GPU.

    lengths: positions of each request once the step is done; news: how many of them are new
    generated: numbers of requests that compute a part of their reply again; room: tokens of a batch of chunks
    bits: of the layout
    """
    of = CodedLayout.of(layout((1, HEADS, dim), seed, **bits), block, SINK, WINDOW, DTYPE)
    server = Server(of, seed, DTYPE, DEVICE, pages=600)
    held = [random_tokens(server.generator, n, dim, group) for n in lengths]
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
    spare = [torch.full((padding, *x.shape[1:]), torch.nan, dtype=DTYPE, device=DEVICE) for x in (k, v, q)]
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
    kernels = CodedAttention(of, DEVICE, HEADS * group, 8, programs)
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
@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_step_for_a_gpu_is_the_plain_step(lengths, news, padding, generated, where):
    """Memory that is not a request's own is NaN; pages are equal to the last byte."""
    compare(lengths, news, 3, padding=padding, generated=generated)


@pytest.mark.parametrize("seed", [3] if ON_GPU else [3, 4, 5])  # on a GPU, each has a kernel of its own to compile
@settings(max_examples=2 if not ON_GPU else 8, derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3), block=st.sampled_from([64, 192]),
    programs=st.integers(1, 16),
)  # fmt: skip
@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_a_decoding_step_reads_every_width(seed, lengths, block, programs, where):
    compare(lengths, [1] * len(lengths), seed, block=block, programs=programs)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 16])
@settings(max_examples=8, derandomize=True, deadline=None)
@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=5), programs=st.sampled_from([7, 264]))
def test_a_decoding_step_reads_every_width_on_a_device(group, lengths, programs):
    compare(lengths, [1] * len(lengths), 6, 128, group, programs=programs)


@pytest.mark.gpu
def test_a_captured_step_is_replayed_while_rows_grow_and_fill_pages():
    """Writing, packing and attention are one graph; the third row's page is filled by the second replay."""
    lengths, dim, group = [300, 511, 126], 64, 2
    of = CodedLayout.of(layout((1, HEADS, dim), 3), 64, SINK, WINDOW, DTYPE)
    server = Server(of, 3, DTYPE, DEVICE)
    held = [random_tokens(server.generator, n + 4, dim, group) for n in lengths]
    server.step([(i, n, *(x[:n] for x in held[i]), n) for i, n in enumerate(lengths)], SCALE)
    kernels, graph = CodedAttention(of, DEVICE, HEADS * group, 8, 9), torch.cuda.CUDAGraph()
    pages, plain = server.pages.clone(), server.pages
    for new in range(1, 5):
        step, k, v, q = server.plan(
            [(i, n, *(x[n + new - 1 : n + new] for x in held[i]), n + new) for i, n in enumerate(lengths)]
        )
        arguments = [
            torch.tensor([n + new for n in lengths], dtype=torch.int32, device=DEVICE),
            *(x.int() for x in (step.kept, step.rest)), *step.slots, k, v, q,
        ]  # fmt: skip
        if new == 1:
            fixed = [x.clone() for x in arguments]
            count, *tables = fixed[:3]
            moving = DeviceStep(3, count, tuple(tables), tuple(fixed[3:5]))
            out = torch.zeros_like(q)
            before = pages.clone()
            moving.attend(kernels, 0, pages, q, k, v, SCALE, out)  # compiles
            pages.copy_(before)
            with torch.cuda.graph(graph):
                moving.attend(kernels, 0, pages, fixed[7], fixed[5], fixed[6], SCALE, out)
        for to, x in zip(fixed, arguments, strict=True):
            to[..., : x.shape[-1]].copy_(x) if to.shape != x.shape else to.copy_(x)
        graph.replay()
        want = torch.zeros_like(q)
        attention.write(step, 0, plain, k, v)
        attention.attend(step, 0, plain, q, k, v, SCALE, want)
        torch.testing.assert_close(out.float(), want.float(), **CLOSE)
        assert torch.equal(pages.view(torch.uint8), plain.view(torch.uint8))


@pytest.mark.parametrize("where", ["here", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_whole_tokens_lie_in_pages_of_a_few(where):
    """Codes of 2 bits leave a page of whole tokens less than 16 of them, a quarter of a tile."""
    bits = {"keys": (0, 2), "values": (2,)}
    assert CodedLayout.of(layout((1, HEADS, 64), 3, **bits), 64, SINK, WINDOW, DTYPE).rest.block < 16
    compare([420, 30, 390, 257], [1, 1, 70, 3], 3, **bits)


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
    assert calls == ["store", "plain write", "attend", "prefill", "plain attend"]
