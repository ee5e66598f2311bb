"""The kernels over pages of bands, which read them and pack tokens into them, against plain forms: in Triton's
interpreter on a CPU, on the device with `-m gpu`."""

import ctypes
import re
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.kernels import ON_GPU, check_decoding, check_moves, make_store, poisoned_memory  # noqa: F401

from leank.eval.cache import compressed_cache  # isort: skip  (needs Triton, which the line above asks for)
from leank.eval.cache.attention import codes, schedule, variants
from leank.eval.cache.attention.backend import why_not_bits
from leank.eval.cache.attention.kernels import HEAD_DIMS, banded, columns, packed
from leank.eval.cache.attention.launch import Kernel
from leank.eval.cache.attention.readers import EFFORT, READERS, Config
from leank.eval.cache.attention.schedule import Part, Split
from leank.eval.cache.storage.banded import codecs
from leank.eval.cache.storage.codecs import PLANES
from leank.eval.cache.storage.quantised import Packing, restore_packed
from leank.eval.cache.storage.segment import PAGE
from leank.eval.cache.storage.sizes import Sizes
from leank.eval.inference.models import ModelConfig, load_model
from leank.precision import BANDS, COUNTED, KEY_BITS, VALUE_BITS, WHOLE, Precision, channel_bytes
from leank.shape import kv_shape
from tests.helpers import emulated
from tests.helpers.layouts import layout, layout_mask

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
interpreted = pytest.mark.skipif(ON_GPU, reason="the same on the device below")
EACH = [((bits,), (4,)) for bits in KEY_BITS[1:]] + [((4,), (bits,)) for bits in VALUE_BITS if bits != 4]
ALL = (KEY_BITS, VALUE_BITS)
SOME = ((0, 2, 4), (2, 4))
PACKED = [(((2, 3), (2,)), True), (((4,), (3,)), True), (((8,), (8,)), True)]  # scales
OF_COUNTS = ((16, 16), (8, 8), (4, 4), (2, 3), (3, 3))  # bits of the channels that `Banded.counts` counts


def codec_of(bits, dim, heads=3, seed=0, packed=False):
    """The codec of a layer whose first head is empty."""
    (codec,) = codecs(layout((1, heads, dim), seed, *bits, packed))
    return codec


@interpreted
@pytest.mark.parametrize(("bits", "packed"), [*((bits, False) for bits in EACH), *PACKED], ids=str)
def test_every_width_is_read(bits, packed):
    codec = codec_of(bits, 64, 2, packed=packed)
    check_decoding([0, 0], 64, 2, [301, 170], Sizes(10, 64, 64), DTYPE, 1, 1, Config(), 5, bits=codec)


@interpreted
@pytest.mark.parametrize(("dim", "group", "queries"), [(128, 4, 1), (64, 8, 5)])
def test_heads_of_many_widths_are_read(dim, group, queries):
    """A head of every width, and several chunks of query tokens."""
    codec = codec_of(ALL, dim)
    check_decoding([0] * 3, dim, group, [301], Sizes(10, 64, 64), DTYPE, queries, 1, Config(), 5, bits=codec)


@interpreted
@settings(max_examples=4, derandomize=True)
@given(
    st.sampled_from([ALL, SOME]),
    st.integers(1, 8),
    st.lists(st.integers(1, 150), min_size=1, max_size=2),
    st.tuples(st.integers(0, 70), st.integers(1, 80)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_interpreted_on_random_shapes(bits, group, lengths, ends, queries, programs, seed):
    lengths = [max(n, ends[0]) for n in lengths]
    codec = codec_of(bits, 64, 2, seed)
    check_decoding([0] * 2, 64, group, lengths, Sizes(*ends, 64), DTYPE, queries, 2, Config(), programs, seed, codec)


@interpreted
@pytest.mark.parametrize(
    ("bits", "dim", "packed"),
    [*((bits, 64, False) for bits in EACH), *((ALL, dim, packed) for dim in (64, 128) for packed in (False, True))],
    ids=str,
)
def test_tokens_are_packed_as_in_plain_pytorch(bits, dim, packed):
    """Of one page and of several; lines in part."""
    codec = codec_of(bits, dim, 2, 1, packed)
    assert check_moves([0] * 2, dim, [90, 40], Sizes(3, 20, 64), DTYPE, [64, 3, 130], 0, bits=codec)[0] > 1


@interpreted
@pytest.mark.parametrize("bits", [((0, 2, 3, 16), (4,)), ((4, 8, 16), (16,))], ids=str)
def test_logits_and_results_are_divided_by_the_unit(bits, monkeypatch):
    """Where codes are unpacked as bfloat16, they are as small; a band of 16 bits joins them."""
    for module in (packed, banded):
        monkeypatch.setattr(module, "unit_of", lambda dtype, ptx: 2.0**-64)
    codec = codec_of(bits, 64)
    check_decoding([0] * 3, 64, 2, [170, 90], Sizes(10, 64, 64), torch.float32, 1, 2, Config(), 3, bits=codec)


def test_variants_have_room_for_every_head_and_are_few():
    for seed in range(4):
        for codec in codecs(layout((6, 4, 128), seed)):
            found = variants.variants(codec.model_heads(128), 128)
            assert len(found) <= max(variants.MOST, len(VALUE_BITS))
            for head, number in zip(codec.heads, variants.numbers(found, np.array(codec.heads)), strict=True):
                if any(head[: len(BANDS)]):
                    assert (np.array(head[: len(BANDS)]) <= found[number][:-1]).all()
                    assert head[-1] == found[number][-1]
    few = Precision(torch.full((2, 2, 64), 4, dtype=torch.uint8), torch.full((2, 2), 2, dtype=torch.uint8))
    assert variants.variants(codecs(few)[0].model_heads(64), 64) == ((0, 0, 64, 0, 2),)


def test_the_work_of_a_head_is_its_bytes_or_its_instructions():
    """The schedule says what the kernel reads, and was cut by what a page costs."""
    codec = codec_of(ALL, 64, 2)
    store = make_store([0] * 2, 64, [64 * 40], Sizes(0, 0, 64), DTYPE, bits=codec)
    plan = Kernel(programs=8).prepare(store)
    lines = plan.table[plan.table[:, Split.KIND] >= schedule.PROMPT]
    found = variants.variants(codec.model_heads(64), 64)
    number = variants.numbers(found, np.array(codec.heads))[1]
    own = torch.tensor(codec.key_bits[1])
    counts = [int((own >= least).sum() - (own > most).sum()) for least, most in OF_COUNTS]
    for line in lines.tolist():
        assert [line[Split[column.name]] for column in schedule.BITS] == [*counts, codec.value_bits[1]]
        assert (line[Split.VARIANT], line[Split.CHANNELS], line[Split.WIDTH]) == (number, int((own > 0).sum()), 64)
    instructions = EFFORT * variants.effort(found[number], 64)
    page = max(sum(page[0, 1] for page in store.prompt.page_bytes()), instructions)
    parts = schedule.parts(store, plan.reader.cost, plan.reader.columns)
    assert {int(page)} == set(parts[parts[:, Part.KIND] >= schedule.PROMPT, Part.COST].tolist())


def test_a_layout_of_empty_heads_has_nothing_to_read():
    bits = Precision(torch.zeros(1, 2, 64, dtype=torch.uint8), torch.full((1, 2), 4, dtype=torch.uint8))
    (codec,) = codecs(bits)
    check_decoding([0, 0], 64, 2, [200], Sizes(4, 70, 64), DTYPE, 1, 1, Config(), 3, bits=codec)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "dim", "group", "queries", "dtype", "packed"),
    [
        *((bits, 128, 4, 1, torch.bfloat16, False) for bits in EACH),
        (ALL, 128, 4, 1, torch.bfloat16, False),
        (SOME, 128, 8, 40, torch.bfloat16, False),  # several chunks
        (SOME, 128, 7, 1, torch.float16, False),
        (ALL, 64, 8, 1, torch.float16, False),
        (ALL, 128, 4, 1, torch.bfloat16, True),
        (SOME, 128, 8, 40, torch.bfloat16, True),
        (ALL, 64, 8, 1, torch.float16, True),
    ],
    ids=str,
)  # fmt: skip  (every line is compiled anew)
def test_on_the_device(bits, dim, group, queries, dtype, packed):
    """The kernel in Triton, of which a config of its own asks for."""
    codec, sizes = codec_of(bits, dim, 4, packed=packed), Sizes(128, 256, 64)
    for programs in (0, 7):
        check_decoding([0] * 4, dim, group, [3001, 1700, 700], sizes, dtype, queries, 2, Config(), programs, 0, codec)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [*EACH, ALL, SOME], ids=str)
@pytest.mark.parametrize(
    ("dim", "group", "queries", "dtype"),
    [
        *((128, *more, torch.bfloat16) for more in ((4, 1), (7, 1), (2, 3), (8, 1))),
        *((64, *more, torch.bfloat16) for more in ((1, 1), (3, 2), (2, 1))),
        (128, 4, 1, torch.float16), (64, 7, 1, torch.float16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_products_on_codes_on_the_device(bits, dim, group, queries, dtype, packed, monkeypatch):
    """The kernel in CUDA. Rows with a middle in part, one without; programs for every multiprocessor, and few."""
    codec, launch, launches = codec_of(bits, dim, 4, packed=packed), codes.launch, []
    monkeypatch.setattr(codes, "launch", lambda *given: (launches.append(given), launch(*given)))
    for programs, sizes in ((0, Sizes(128, 256, 64)), (7, Sizes(3, 70, 64))):
        launches.clear()
        lengths, seed = [3001, 1700, 700, sizes.sink + 5], programs
        store = check_decoding([0] * 4, dim, group, lengths, sizes, dtype, queries, 3, None, programs, seed, codec)
        fits = codes.per_sm(codes.warp_bytes(*store.tail.page_bytes()), dim, store.ring_k.device)
        assert bool(launches) == bool(fits)  # else the kernel in Triton has read it


@pytest.mark.gpu
def test_only_what_codes_can_read_is_left_to_it(monkeypatch):
    """float32, heads of 96 channels, pages too large for a multiprocessor, and a PyTorch without NVRTC."""
    device = torch.device("cuda", 0)
    assert codes.can_read(device, torch.bfloat16, 128)
    assert codes.can_read(device, torch.float16, 128)
    assert not codes.can_read(device, torch.float32, 128)
    assert not codes.can_read(device, torch.bfloat16, 96)
    assert codes.per_sm((4096, 4096), 128, device) == 2
    assert codes.per_sm((65536, 65536), 128, device) == 0
    monkeypatch.setattr(codes, "compiler", lambda: None)
    assert not codes.can_read(device, torch.bfloat16, 128)


@pytest.mark.parametrize(("group", "packed"), [(32, False), (64, False), (64, True)])
def test_codes_have_the_constants_of_the_table_and_of_pages(group, packed):
    """The kernel in CUDA declares none of its own, so that a column that moves moves in both."""
    expected = {name: getattr(schedule, name) for name in ("SINK", "WINDOW", "PROMPT", "TAIL", "FIELDS")}
    expected |= {column.name: int(column) for column in Split}
    scales = 2 if packed else 64 // group * 4
    expected |= dict(PAGE=64, CELL=group, ENDS=codes.ENDS, BANDS=len(BANDS))
    expected |= dict(OF_16=128, OF_8=64 + scales, OF_4=32 + scales, OF_2=16 + scales, OF_THIRD=8)
    declared = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", codes.constants(group, packed))}
    assert declared == expected
    source = (Path(codes.__file__).parent / "kernels" / "codes.cu").read_text(encoding="utf-8")
    assert not re.search(rf"\b({'|'.join(expected)})\b\s*=[^=]|\benum\b", source)


def test_every_width_is_stored_counted_and_has_planes():
    assert [*KEY_BITS] == [0, *VALUE_BITS] == [0, *sorted(bits for band in BANDS for bits in band)]
    assert {bits: sum(planes) for bits, planes in PLANES.items()} == {bits: bits for bits in VALUE_BITS if bits < WHOLE}
    assert len(schedule.BITS) == len(COUNTED) + 1
    for table in (Part, Split):
        assert [*table.__members__.values()] == [*range(len(table))]


def test_triton_has_the_constants_of_the_schedule():
    """Each by its own name, so that a column that moves moves in the kernels, too."""
    names = [name for name in vars(columns) if name.isupper()]
    assert {*names} <= {*Split.__members__} | {*vars(schedule)}
    for name in names:
        expected = Split[name] if name in Split.__members__ else getattr(schedule, name)
        assert getattr(columns, name).value == int(expected)


def test_a_codec_has_a_reader_or_a_reason():
    for codec in (codec_of(ALL, 64), Packing(4, 32)):
        assert (why_not_bits(codec) is None) == (type(codec) in READERS)
    assert why_not_bits(Packing(4, 16)) == "the kernel reads groups of 32 or 64 numbers, not 16"


@pytest.mark.parametrize("bits", KEY_BITS[1:])
def test_a_channel_takes_the_bytes_that_its_pages_have(bits):
    for dtype in (torch.bfloat16, torch.float32):
        found = codecs(
            Precision(torch.full((1, 1, 64), bits, dtype=torch.uint8), torch.full((1, 1), 16, dtype=torch.uint8))
        )[0].page_bytes(64, np.full(1, 64), dtype)[0]
        assert found == 64 * channel_bytes(bits, dtype.itemsize)


@pytest.fixture(scope="module")
def nvrtc():
    """The compiler, also where it is beside a PyTorch for CPUs."""
    packages = Path(sysconfig.get_path("purelib"))
    found = codes.compiler() or next(map(ctypes.CDLL, packages.glob("nvidia/*/lib/libnvrtc.so.1?")), None)
    return found or pytest.skip("needs NVRTC")


FORMS = [
    (4, 4, 64),
    (3, 8, 32),
    (3, 8, 64, True),
    (4, 4, 64, False, 64, 12),
    (8, 8, 64, True, 192, 16),
    (4, 4, 64, False, 64, 12, True),
    (3, 8, 64, True, 192, 16, True),
    (4, 4, 64, False, 0, 1, True),
    (3, 8, 64, True, 0, 1, True),
]
MORE = [(3, 8, 64), (4, 4, 32)]  # the others have each of their numbers
GPUS = [(dim, capability) for dim in HEAD_DIMS["codes"] for capability in ((8, 0), (9, 0))]


@pytest.mark.parametrize(
    ("at", "form"),
    [
        pytest.param(at, form, marks=() if at == i % len(GPUS) and form not in MORE else pytest.mark.slow)
        for i, form in enumerate([*FORMS, *MORE])
        for at in range(len(GPUS))
    ],
)
def test_codes_are_compiled(nvrtc, at, form):
    """Every form and, for some form, every size and GPU."""
    dim, capability = GPUS[at]
    assert codes.compiles(nvrtc, capability)
    assert codes.cubin(nvrtc, capability, codes.Form(dim, *form))[:4] == b"\x7fELF"


def test_what_cannot_be_compiled_is_refused(nvrtc):
    assert not codes.compiles(nvrtc, (99, 0))
    with pytest.raises(RuntimeError, match="NVRTC cannot compile codes"):
        codes.cubin(nvrtc, (9, 0), codes.Form(0, 1, 1, 64))


@pytest.fixture(scope="module")
def compiled_folder(tmp_path_factory):
    """Where kernels for the CPU are kept while this file runs."""
    return tmp_path_factory.mktemp("emulated")


@pytest.mark.skipif(ON_GPU or shutil.which("g++") is None, reason="the same on the device below; needs g++")
@pytest.mark.parametrize(
    ("codec", "counts", "group", "dtype"),
    [
        (Packing(4, 32), [40, 64], 2, torch.bfloat16),
        (Packing(2, 32), [40, 17], 2, torch.bfloat16),
        (Packing(8, 32), [9, 64], 2, torch.bfloat16),
        # of 8 rows, scaled queries and their rests are operands of their own
        (codec_of(ALL, 64, 2), [0, 0], 5, torch.bfloat16),
        (codec_of(ALL, 64, 2), [0, 0], 5, torch.float16),
        (codec_of(((0, 2, 16), (16,)), 64, 2), [0, 0], 2, torch.float16),
        (codec_of(ALL, 64, 2, packed=True), [0, 0], 5, torch.bfloat16),
        (codec_of(ALL, 64, 2, packed=True), [0, 0], 2, torch.bfloat16),
        (codec_of(((2, 3, 4), (3,)), 64, 2, packed=True), [0, 0], 2, torch.float16),
    ],
    ids=["4 bits", "2 bits", "8 bits", "layout", "float16", "values of 16 bits", "packed", "paired", "packed float16"],
)
def test_products_on_codes_on_a_cpu(codec, counts, group, dtype, compiled_folder, monkeypatch):
    """The kernel in CUDA, run as C++, with a page that is filled in part."""
    launches = []
    monkeypatch.setattr(codes, "can_read", lambda *_: True)
    monkeypatch.setattr(codes, "per_sm", lambda *_: 1)
    monkeypatch.setattr(codes, "launch", lambda *given: (launches.append(1), emulated.launch(compiled_folder, *given)))
    monkeypatch.setattr(Kernel, "write", lambda kernel, store, k, v: store.write(k, v))
    sizes = Sizes(10, 64, codec.group)
    check_decoding(counts, 64, group, [301, 170], sizes, dtype, 1, 2, None, 5, bits=codec)
    assert len(launches) == 4


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_all_words(dtype, compiled_folder):
    """Both of a pair, as `restore_packed` has them, NaN too; in bfloat16 2^-16 times as large."""
    half = dtype == torch.float16
    scales = emulated.compiled(compiled_folder, codes.Form(64, 2, 2, 64, half, packed=True)).scales
    scales.argtypes, scales.restype = [ctypes.c_uint32], ctypes.c_uint32
    every = torch.arange(2**16)
    words = every[((every & 0x7C00) > 0) & ((every & 0x7C00) < 0x7C00) | (every == 0x7E00)]  # those that are written
    given = words.to(torch.int16)[None, :, None]
    wanted = restore_packed(torch.ones(64, len(words)), given, 64, 3) - restore_packed(
        torch.zeros(64, len(words)), given, 64, 3
    )
    for place in (0, 16):
        found = torch.tensor([scales(word << place) for word in words.tolist()])
        found = (found >> place).to(torch.int16).view(dtype).double()
        torch.testing.assert_close(found * (1 if half else 2**16), wanted[0].double(), rtol=0, atol=0, equal_nan=True)


def test_a_byte_is_a_number_as_it_lies():
    """What `kernels/codes.cu` multiplies: the bits of a byte b are the bfloat16 number b 2^-133, of all bytes."""
    byte = torch.arange(256)
    assert (byte.to(torch.int16).view(torch.bfloat16).double() == byte.double() * 2.0**-133).all()


def test_the_memory_of_a_warp_holds_the_largest_page():
    """Of K and of V, and tiles of sink and window, in whole lines."""
    codec = codec_of(ALL, 128, 4)
    page = make_store([0] * 4, 128, [200], Sizes(0, 0, 64), DTYPE, bits=codec).tail.page_bytes()
    for room, own in zip(codes.warp_bytes(*page), page, strict=True):
        assert room % 128 == 0
        assert max(own.max(), codes.LEAST) <= room < max(own.max(), codes.LEAST) + 128
    assert codes.warp_bytes(np.array([[0]]), np.array([[100]])) == (codes.LEAST, codes.LEAST)


def test_parts_are_cut_where_every_warp_has_a_page():
    """Where programs would have none, at half as many pages."""
    assert codes.tile(np.array([5000, 700]), 12) == codes.WARPS * PAGE
    assert codes.tile(np.array([5000, 700]), 13) == codes.WARPS * PAGE // 2


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "dim"), [*((bits, 128) for bits in EACH), (ALL, 64), (ALL, 128)], ids=str)
def test_moves_on_the_device(bits, dim, dtype, packed):
    codec = codec_of(bits, dim, 4, 1, packed)
    assert check_moves([0] * 4, dim, [900, 400], Sizes(3, 120, 64), dtype, [64, 3, 130, 200], 0, bits=codec)[0] > 2


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_generate_replays_a_captured_step(captures, monkeypatch, packed):
    """The same tokens as step by step and, but for rounding, as in plain PyTorch; after a reset as well."""
    model = load_model(ModelConfig())
    mask = layout_mask(kv_shape(model.config), 5, packed=packed)
    cache = compressed_cache(model, mask, 16, 96)
    for length in (500, 900):
        ids = torch.randint(5, 4000, (2, length), generator=torch.Generator().manual_seed(length)).to(model.device)
        options = {"max_new_tokens": 150, "min_new_tokens": 150, "do_sample": False, "pad_token_id": 0}
        found = cache.generate(model, input_ids=ids, **options)
        with monkeypatch.context() as patch:
            patch.setattr("leank.eval.cache.generate.CAPTURE_FOR", 1000)
            assert torch.equal(found, compressed_cache(model, mask, 16, 96).generate(model, input_ids=ids, **options))
        cache.reset()
    assert captures == [1]
