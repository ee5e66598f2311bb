"""Settings of a server that cannot be kept are refused by name; what it plans to hold."""

import asyncio
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from leank.eval.serving import guard, plan, plugin, serve
from leank.eval.serving import settings as settings_module
from leank.eval.serving.coded import page_layout
from leank.eval.serving.plan import Server
from leank.eval.serving.rest import RestBlocks
from leank.eval.serving.settings import NAMES, ServerSettings, _wrong, check_config, wrong_layers
from leank.mask import ChannelMask
from leank.precision import Precision
from tests import ROOT

MASK = ROOT / "models/reference/mask_70pct.safetensors"


def test_nothing_is_served_without_a_mask():
    assert ServerSettings.find(None, {}) is None
    assert ServerSettings.find({"other": 1}, {"LEANK_WINDOW": "3"}) is None


def test_sink_and_window_are_those_of_the_training_unless_given():
    assert ServerSettings.find(None, {"LEANK_MASK": str(MASK)}) == ServerSettings(str(MASK), 16, 144)
    given = ServerSettings.find(
        {"leank": {"mask": str(MASK), "window": 64}}, {"LEANK_MASK": "other", "LEANK_SINK": "4"}
    )
    assert given == ServerSettings(str(MASK), 4, 64)
    assert ServerSettings.find(None, given.export()) == given


LAYOUT = ROOT / "models/masks/smollm2/bits/20pct_seed41.safetensors"


def test_layouts_of_bits_have_whole_pages_at_both_ends():
    assert ServerSettings.find(None, {"LEANK_MASK": str(LAYOUT)}) == ServerSettings(str(LAYOUT), 64, 256)
    assert ServerSettings.find({"leank": {"mask": str(LAYOUT), "sink": 0}}, {}) == ServerSettings(str(LAYOUT), 0, 256)


@pytest.mark.parametrize(
    ("additional", "environment", "words"),
    [
        ({"leank": {"mask": str(MASK), "windows": 3}}, {}, "windows"),
        ({"leank": str(MASK)}, {}, "must be a mapping"),
        ({"leank": {"sink": 4}}, {}, "names no mask"),
        (None, {"LEANK_MASK": str(MASK), "LEANK_WINDOW": "many"}, "LEANK_WINDOW=many: invalid"),
        (None, {"LEANK_MASK": str(MASK), "LEANK_SINK": "-1"}, "LEANK_SINK=-1.*sink=-1 must be"),
        (None, {"LEANK_MASK": str(MASK), "LEANK_WINDOW": "0"}, "LEANK_WINDOW=0: window=0 must be"),
        (None, {"LEANK_MASK": str(ROOT / "pyproject.toml")}, "pyproject.toml"),
        (None, {"LEANK_MASK": "none.safetensors"}, "none.safetensors"),
        (None, {"LEANK_MASK": "none.pth"}, "none.pth"),
    ],
)
def test_wrong_settings_are_named(additional, environment, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        ServerSettings.find(additional, environment)


class Engine:
    """Arguments of an engine, whose configuration is the environment that its processes get."""

    worker_extension_cls = ""
    additional_config = None

    def create_engine_config(self):
        told = ServerSettings.find(None)
        arch = SimpleNamespace()
        return SimpleNamespace(told=told, model_config=SimpleNamespace(model_arch_config=arch))


def engine(settings):
    made = Engine()
    made.additional_config = None if settings is None else {"leank": settings}
    return plugin._checked(Engine.create_engine_config)(made)


@pytest.fixture
def clean(monkeypatch):
    for name in NAMES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "_exported", {})
    monkeypatch.setattr(plugin, "use_backend", lambda: None)
    monkeypatch.setattr(plugin, "check_config", lambda config, settings: None)
    monkeypatch.setattr(plugin, "check_version", lambda: None)
    yield monkeypatch
    plugin._take_back()


def test_an_engine_is_not_told_the_settings_of_the_one_before(clean, tmp_path):
    """A process may make several engines; processes of each are told its own settings through the environment."""
    other = tmp_path / "mask.safetensors"
    trained = ChannelMask.load(MASK)
    ChannelMask(trained.keep, {**trained.metadata, "sink": 4, "window": 32}).save(other)
    assert engine({"mask": str(MASK), "window": 64}).told == ServerSettings(str(MASK), 16, 64)
    assert engine({"mask": str(other)}).told == ServerSettings(str(other), 4, 32)
    with pytest.raises(ValueError, match="start one without in a process of its own"):
        engine(None)
    clean.setenv("LEANK_MASK", str(MASK))
    assert engine(None).told == engine(None).told == ServerSettings(str(MASK), 16, 144)
    clean.setenv("LEANK_WINDOW", "48")
    assert engine(None).told == engine({"sink": 16}).told == ServerSettings(str(MASK), 16, 48)


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0.0", "0.330.0"])
def test_an_unknown_version_is_refused_before_anything_inside_vllm_is_imported(monkeypatch, version):
    for name in NAMES.values():
        monkeypatch.setenv(name, "")  # which the command sets
    stub = SimpleNamespace(__version__=version, __spec__=SimpleNamespace())  # importing from inside it would fail
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setattr(serve, "find_spec", lambda name: stub.__spec__)
    monkeypatch.setattr(sys, "argv", ["leank-serve", "model", "--mask", str(MASK)])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert f"this plug-in is for vLLM 0.30, 0.31, 0.32, 0.33, not {version}" in str(ended.value.code)
    assert len(str(ended.value.code).splitlines()) == 1
    monkeypatch.setattr(plugin, "_exported", {})
    with pytest.raises(ValueError, match=f"not {version}"):
        engine({"mask": str(MASK)})


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}",
         "the engine did not start, and the first error in the log above says why .*-9.*a smaller --max-model-len"),
        ("rank 1 of 2\nhas not answered", "rank 1 of 2 has not answered"),
    ],
)  # fmt: skip
def test_an_engine_that_does_not_start_ends_the_server_in_one_line(clean, error, said):
    def failed(options, settings):
        raise RuntimeError(error)

    for name in NAMES.values():
        clean.setenv(name, "")  # which the command sets
    clean.setattr(serve, "find_spec", lambda name: object())
    clean.setattr(settings_module, "check_version", lambda: None)
    clean.setattr(serve, "serve", failed)
    clean.setattr(sys, "argv", ["leank-serve", "model", "--mask", str(MASK)])
    with pytest.raises(SystemExit, match=f"^leank-serve: {said}") as ended:
        serve.main()
    assert len(str(ended.value.code).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (["--port", "8000"], False),
        (["--block-size", "128"], True),
        (["--block_size=128"], True),
        (["--config", "server.yaml"], True),
    ],
)
def test_pages_of_a_layout_have_64_tokens_unless_a_user_says_otherwise(options, given):
    assert serve.sets(options, "--block-size") == given


class Client:
    """An asynchronous client of vLLM with two engines, whose `collective_rpc` has the first one's answer alone."""

    def __init__(self, engines, every=True):
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=len(engines)))
        self.engine_core = SimpleNamespace()
        self.engines = engines
        if every:
            self.engine_core.call_utility_all_async = self.every

    async def every(self, method, name, *_):
        assert (method, name) == ("collective_rpc", "leank_report")
        return self.engines

    async def collective_rpc(self, name):
        return self.engines[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", None), ("qwen2", None), ("qwen3", None),
        ("qwen3_5_text", "layers of linear_attention"), ("qwen3_next", "layers of linear_attention"),
        ("gemma2", "soft-capped logits"), ("gemma3_text", None),
        ("olmo3", "layers of sliding_attention"), ("gemma4_text", "layers of sliding_attention"),
        ("gpt_oss", "attention sinks"),
    ],
)  # fmt: skip
def test_models_with_other_layers_are_refused_by_their_configuration(kind, said):
    try:
        config = AutoConfig.for_model(kind)
    except ValueError:
        pytest.skip("this transformers does not know it")
    wrong = [words for found, words in wrong_layers(config) if found]
    assert bool(wrong) == (said is not None)
    assert not wrong or (said in wrong[0] and wrong[0].startswith(kind) and "take a model" in wrong[0])


def configuration(**changes):
    """What `check_config` reads of vLLM's configuration; changes: section__name=value, or a section."""
    found = {
        "model_config": SimpleNamespace(
            runner_type="generate", use_mla=False, is_multimodal_model=False, is_hybrid=False, max_model_len=8192,
            model="some/model", dtype=torch.bfloat16, enable_sleep_mode=False, get_sliding_window=lambda: None,
            hf_text_config=SimpleNamespace(model_type="llama"),
        ),
        "cache_config": SimpleNamespace(
            kv_offloading_size=None, cache_dtype="auto", kv_sharing_fast_prefill=False,
            prefix_cache_retention_interval=None, block_size=64,
        ),
        "parallel_config": SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1, enable_dbo=False, ubatch_size=0, enable_elastic_ep=False,
        ),
        "scheduler_config": SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        "speculative_config": None, "kv_transfer_config": None,
    }  # fmt: skip
    for name, value in changes.items():
        section, _, field = name.partition("__")
        if field:
            setattr(found[section], field, value)
        else:
            found[section] = value
    return SimpleNamespace(**found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_config": object()}, "speculative_config"),
        ({"kv_transfer_config": object()}, "drop --kv-transfer-config"),
        ({"cache_config__kv_offloading_size": 4.0, "kv_transfer_config": object()}, "drop --kv-offloading-size"),
        ({"cache_config__cache_dtype": "fp8"}, "kv-cache-dtype=fp8"),
        ({"cache_config__cache_dtype": "int4_per_token_head"}, "kv-cache-dtype=int4_per_token_head"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "drop --kv-sharing-fast-prefill"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline-parallel-size=2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode-context-parallel-size=2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill-context-parallel-size=2"),
        ({"parallel_config__enable_dbo": True}, "drop --enable-dbo"),
        ({"parallel_config__ubatch_size": 2}, "--ubatch-size"),
        ({"parallel_config__enable_elastic_ep": True}, "drop --enable-elastic-ep"),
        ({"model_config__enable_sleep_mode": True}, "drop --enable-sleep-mode"),
        ({"model_config__runner_type": "pooling"}, "take --runner generate"),
        ({"model_config__use_mla": True}, "latent attention"),
        ({"model_config__is_hybrid": True}, "layers without attention"),
        ({"model_config__is_multimodal_model": True}, "more than text"),
        ({"model_config__get_sliding_window": lambda: 4096}, "sliding window"),
        ({"model_config__max_model_len": 256}, "window=256 is no less than max-model-len=256"),
        ({"scheduler_config__disable_hybrid_kv_cache_manager": True}, "drop --disable-hybrid-kv-cache-manager"),
    ],
)
@pytest.mark.parametrize("mask", [MASK, LAYOUT])
def test_what_would_be_wrong_beside_a_mask_is_refused_by_name(monkeypatch, mask, changes, said):
    platform = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=SimpleNamespace()))
    served = ServerSettings(str(mask), 64, 256)
    assert not [words for wrong, words in _wrong(configuration(), served) if wrong]
    with pytest.raises(ValueError, match=f"LEANK_MASK=.*{said}") as refused:
        check_config(configuration(**changes), served)
    assert len(str(refused.value).splitlines()) == 1


HYBRID = {
    "model_config__hf_text_config": SimpleNamespace(
        model_type="gemma3_text", num_hidden_layers=7, layer_types=["sliding_attention"] * 6 + ["full_attention"],
        sliding_window=64,
    ),
    "model_config__get_sliding_window": lambda: 64,
    "model_config__enforce_eager": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "on_cpu", "changes", "said"),
    [
        ("0.33.0", True, {}, None),
        ("0.32.0", True, {}, "tried in vLLM 0.32.0; install 0.33"),
        ("0.33.0", False, {}, "tried on a GPU; serve it on a CPU"),
        ("0.33.0", True, {"parallel_config__tensor_parallel_size": 2}, "with tensor-parallel-size=2; take 1"),
        ("0.33.0", True, {"model_config__enforce_eager": False}, "in compiled graphs; add --enforce-eager"),
        ("0.33.0", True, {"cache_config__block_size": 48}, "with block-size=48; take a multiple of 32"),
        ("0.33.0", True, {"cache_config__prefix_cache_retention_interval": 64}, "retention-interval=64; drop it"),
    ],
)
def test_what_was_not_tried_with_a_sliding_window_is_refused_by_name(monkeypatch, version, on_cpu, changes, said):
    platform = SimpleNamespace(is_cpu=lambda: on_cpu, is_cuda=lambda: not on_cpu)
    stub = SimpleNamespace(current_platform=platform)
    monkeypatch.setitem(sys.modules, "vllm.platforms", stub)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=stub, __version__=version))
    monkeypatch.setattr(settings_module, "_wrong_on_gpu", lambda config: ())
    config = configuration(**{**HYBRID, **changes})
    wrong = [words for found, words in _wrong(config, ServerSettings(str(MASK), 16, 144)) if found]
    assert [said in words for words in wrong] == ([] if said is None else [True])
    assert all(words.startswith("gemma3_text has layers with a sliding window") for words in wrong)


CUSTOM, FLASH = SimpleNamespace(name="CUSTOM"), SimpleNamespace(name="FLASH_ATTN")


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ({"backend": CUSTOM}, None),  # before 0.32
        ({"backend": CUSTOM, "backend_per_kind": {}}, None),
        ({"backend": None}, "add --attention-backend CUSTOM"),
        (
            {"backend": CUSTOM, "backend_per_kind": {"full_attention": FLASH}},
            "drop backend_per_kind (of full_attention) from",
        ),
    ],
)
def test_on_a_gpu_every_layer_needs_the_backend_of_the_plugin(attention, said):
    config = configuration(model_config__get_head_size=lambda: 64, attention_config=SimpleNamespace(**attention))
    wrong = [words for found, words in settings_module._wrong_on_gpu(config) if found]
    assert [said in words for words in wrong] == ([] if said is None else [True])


def test_every_engine_is_asked():
    assert asyncio.run(serve._reports(Client([["a", "b"], ["c"]]))) == ["a", "b", "c"]
    assert asyncio.run(serve._reports(Client([["a", "b"]], every=False))) == ["a", "b"]
    with pytest.raises(ValueError, match="--data-parallel-size"):
        asyncio.run(serve._reports(Client([["a"], ["b"]], every=False)))


ONE = {"rank": 0, "ranks": 1}
PAGE = {"attention": {guard.PRUNED: 7}, "block": 32, "block_bytes": 180_224, "channels": 544, **ONE}
CODES = page_layout(ChannelMask.load(LAYOUT), 64, 64, 256, torch.float32)
OF_CODES = {
    "attention": {guard.PRUNED: 30}, "block": 64, "block_bytes": CODES.page_bytes, "channels": CODES.channels, **ONE
}  # fmt: skip
HALVES = [
    {**PAGE, "block_bytes": 102_400, "rank": rank, "ranks": 2, "channels": n} for rank, n in enumerate((304, 240))
]
DENSE = {**PAGE, "attention": {"vllm.CPUAttention": 7}}


@pytest.mark.parametrize(
    ("mask", "extension", "reports", "said"),
    [
        (LAYOUT, guard.WORKER, [OF_CODES], None),
        (LAYOUT, guard.WORKER, [{**OF_CODES, "block_bytes": 64}], "holds blocks of 64 bytes, and those of"),
        (MASK, guard.WORKER, HALVES, None),
        (MASK, guard.WORKER, 2 * HALVES, None),  # of two engines
        (MASK, guard.WORKER, HALVES[:1], "rank 1 of 2 has not answered"),
        (
            MASK,
            guard.WORKER,
            [HALVES[0], {**HALVES[0], "rank": 1}],
            "worker 1 of rank 1 keeps 304 channels, and .* 240",
        ),
        (MASK, guard.WORKER, [PAGE, PAGE], None),
        (None, guard.WORKER, [PAGE], "no mask was given"),
        (MASK, guard.WORKER, [], "no worker has answered"),
        (MASK, "", [PAGE], "the plug-in is not loaded"),
        (MASK, "other.Worker", [PAGE], r"worker_extension_cls is other\.Worker: leave it out"),
        (MASK, guard.WORKER, [PAGE, DENSE], r"serves the dense model: worker 1 attends with vllm\.CPUAttention"),
        (MASK, guard.WORKER, [{**PAGE, "attention": {}}], "worker 0 attends with nothing"),
        (MASK, guard.WORKER, [{**PAGE, "attention": {guard.PRUNED: 6}}], "in 6 layers, and the model has 7"),
        (MASK, guard.WORKER, [{**PAGE, "block_bytes": 458_752}], "holds blocks of 458,752 bytes, .* 180,224"),
    ],
)
def test_a_server_that_is_dense_is_noticed(clean, mask, extension, reports, said):
    text = SimpleNamespace(num_hidden_layers=30 if mask == LAYOUT else 7)
    config = SimpleNamespace(
        additional_config={} if mask is None else {"leank": {"mask": str(mask)}},
        parallel_config=SimpleNamespace(worker_extension_cls=extension),
        model_config=SimpleNamespace(dtype=torch.float32, hf_text_config=text),
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config), collective_rpc=lambda name: reports)
    with nullcontext() if said is None else pytest.raises(RuntimeError, match=said):
        guard.check(llm)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_bytes_that_the_reference_mask_saves_become_tokens(block):
    mask = ChannelMask.load(MASK)
    server = Server(2**30, longest=8192, step=8192, block=block, itemsize=4, hits=False)
    gain = server.pruned(mask, 16, 144) / server.stock(mask.keep)
    assert 2.25 < gain < server.by_bytes(mask, 16, 144) < 2.54
    in_steps = replace(server, step=512)
    assert in_steps.pruned(mask, 16, 144) < server.pruned(mask, 16, 144)


@pytest.mark.parametrize("packed", [False, True])
def test_the_bytes_that_a_layout_saves_become_tokens(packed):
    """Nearly all of them, beyond sink and window, which are held whole twice where there are prefix hits."""
    bits = ChannelMask.load(LAYOUT).precision
    mask = ChannelMask(bits.keep, precision=Precision(bits.key_bits, bits.value_bits, packed=packed))
    server = Server(2**34, longest=32768, step=8192, block=64)
    gain, bound = server.pruned(mask, 64, 256) / server.stock(mask.keep), server.by_bytes(mask, 64, 256)
    assert 0.8 * bound < gain < bound < 1 / mask.middle_bytes


def test_packed_scales_are_planned_and_leave_room_for_more_tokens(clean, tmp_path, capsys):
    bits, tokens, shares = ChannelMask.load(LAYOUT).precision, [], []
    for packed in (False, True):
        path, precision = tmp_path / f"{packed}.safetensors", Precision(bits.key_bits, bits.value_bits, packed=packed)
        ChannelMask(bits.keep, precision=precision).save(path)
        shares.append(precision.middle_bytes)
        assert ServerSettings.find(None, {"LEANK_MASK": str(path)}) == ServerSettings(str(path), 64, 256)
        plan.main([str(path), "--longest", "32768", "--memory", "16"])
        tokens.append(int(re.search(r"([\d,]+) with it", capsys.readouterr().out)[1].replace(",", "")))
    assert 1 < tokens[1] / tokens[0] < shares[0] / shares[1]


def test_the_plan_is_printed(capsys):
    plan.main([str(MASK), "--itemsize", "4", "--no-hits"])
    assert "74,880 without the mask, 183,457 with it, 2.45 times" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--longest", "0"], "longest=0 must be greater"), (["--memory", "nan"], "memory=nan must be a finite"),
        (["--memory", "1e-9"], "less than a request of --longest 8192"),
        (["--block", "7"], "block_size=7 must be a multiple of 16"),
        (["--block", "1000000000000"], "block=1000000000000 must be less"),
        (["--ranks", "3"], "tensor-parallel-size=3 does not divide the model's 4 KV heads"),
    ],
)  # fmt: skip
def test_a_plan_of_no_server_is_refused_in_one_line(arguments, said):
    with pytest.raises(SystemExit) as ended:
        plan.main([str(MASK), *arguments])
    assert said in str(ended.value.code)
    assert len(str(ended.value.code).splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {}, None),
        ("llama", {"num_hidden_layers": 6}, "has the shape [7, 4, 64]"),
        ("mistral", {"sliding_window": 64}, "mistral has a sliding window of 64"),
        ("qwen3_next", {}, "qwen3_next has layers of linear_attention"),
        ("gemma3_text", {}, None),
        ("olmo3", {}, "olmo3 has layers of sliding_attention"),
        ("gpt_oss", {}, "gpt_oss has attention sinks"),
        ("gemma4_text", {}, "gemma4_text has layers of sliding_attention"),
        ("deepseek_v3", {"qk_rope_head_dim": 32}, "latent attention (MLA, kv_lora_rank)"),
    ],
)
def test_a_plan_for_a_model_that_no_server_takes_is_refused_by_name(tmp_path, capsys, kind, changes, said):
    own = {"num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = tmp_path / "reference"  # the name in the mask
    AutoConfig.for_model(kind, **{**own, **changes}).save_pretrained(model)
    with nullcontext() if said is None else pytest.raises(SystemExit) as ended:
        plan.main([str(MASK), "--model", str(model), "--ranks", "2"])
    if said is None:
        assert "tokens admitted" in capsys.readouterr().out
    else:
        assert said in str(ended.value.code)
        assert len(str(ended.value.code).splitlines()) == 1


sizes = st.builds(
    lambda block, times, sink, window, every, grain: RestBlocks(
        block, block * times, sink, window, every * block * times, grain
    ),
    st.integers(1, 16), st.integers(1, 4), st.integers(0, 40), st.integers(1, 100), st.integers(0, 6),
    st.sampled_from([1, 1, 8, 50]),
)  # fmt: skip


def window_of(rest, end):
    """The pages that a step behind `end` positions reads besides the sink."""
    return pages_of((end - rest.window) // rest.grain * rest.grain, end, rest.block)


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
        whole = pages_of(0, min(rest.sink, end), rest.block) | window_of(rest, end)
        assert whole <= held


@settings(max_examples=200)
@given(rest=sizes, start=st.integers(0, 20), new=st.integers(1, 300))
def test_the_bound_holds_behind_a_prefix_hit(rest, start, new):
    hit, end = start * rest.hit, start * rest.hit + new
    held = pages_of(0, min(rest.sink, hit), rest.block) | window_of(rest, hit)
    pages = -(-hit // rest.block)
    held |= {pages + i for i, real in enumerate(rest.new(pages, end)) if real}
    assert len(held) <= rest.most(end, end, hits=True)


@settings(max_examples=200)
@given(rest=sizes, end=st.integers(2, 900))
def test_a_prompt_sent_again_finds_its_window(rest, end):
    held = {i for i, real in enumerate(rest.new(0, end)) if real}
    hit = (end - 1) // rest.hit * rest.hit
    assert window_of(rest, hit) <= held
    if rest.every and end > rest.every:
        mark = end // rest.every * rest.every
        assert window_of(rest, mark) <= held


def test_a_long_step_stores_little():
    rest = RestBlocks(block=16, hit=32, sink=16, window=144)
    assert sum(rest.new(0, 8192)) == 1 + 11
    assert rest.most(8192, 8192, hits=False) == 1 + 12
    assert rest.most(2048, 8192, hits=False) == rest.most(8192, 8192, hits=True) == 1 + 2 * 12
