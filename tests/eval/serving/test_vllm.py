"""vLLM with the plug-in, end to end on a CPU; `make vllm-test` makes the environment that these tests need."""

import json
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch

from leank.eval.serving.plan import Server
from leank.mask import ChannelMask
from leank.precision import Precision
from scripts.bench.serving import compare
from tests import ROOT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in an environment of its own: make vllm-test"),
]
REFERENCE = ROOT / "models/reference"
MASK = REFERENCE / "mask_70pct.safetensors"
REQUESTS = ("--requests", "16")


def python(*args, **environment):
    """Run a module in a process of its own, since a process can start one engine."""
    done = subprocess.run(
        [sys.executable, *args], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


def served(folder, variant, *args):
    python("-m", "scripts.bench.serving", "same", str(folder), variant, *REQUESTS, *args)
    return json.loads((folder / f"{variant}.json").read_text())


@pytest.fixture(scope="module")
def by_cache(tmp_path_factory):
    return served(tmp_path_factory.mktemp("cache"), "cache")


@pytest.mark.parametrize("block", ["16", "128"])
def test_replies_are_those_of_the_compressed_cache(tmp_path, by_cache, block):
    found = compare(by_cache, served(tmp_path, "together", "--block-size", block))
    assert found["equal"] == found["requests"]
    assert found["largest difference of logprobs"] < 1e-3
    assert found["pages held at the end"] == 0


def test_pruned_channels_have_the_mean_keys_of_the_mask(tmp_path):
    mask = ChannelMask.load(MASK)
    means = torch.randn(mask.keep.shape, generator=torch.Generator().manual_seed(5))
    mask.with_means(means).save(tmp_path / "means.safetensors")
    given = ("--mask", str(tmp_path / "means.safetensors"))
    found = compare(served(tmp_path, "cache", *given), served(tmp_path, "together", *given))
    assert found["equal"] == found["requests"]
    assert found["largest difference of logprobs"] < 1e-3
    without = compare(served(tmp_path, "cache"), served(tmp_path, "together", *given))
    assert without["largest difference of logprobs"] > 1e-3  # these means are no mask's, and are seen


def test_preempted_requests_give_the_same_replies(tmp_path, by_cache):
    found = compare(by_cache, served(tmp_path, "preempted"))
    assert found["preemptions"] > 0
    assert found["equal"] == found["requests"]
    assert found["pages held at the end"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefix_hits_hold_no_pages_and_hardly_change_replies(tmp_path, by_cache, dtype):
    found = compare(by_cache, served(tmp_path, "prefixes", "--dtype", dtype))
    assert found["pages held at the end"] == 0
    assert found["equal"] >= 0.75 * found["requests"]


ENGINE = """
import json, sys
from scripts.bench.serving import MASK, engine
from vllm import SamplingParams
from leank.eval.serving import check
llm = engine(MASK, max_model_len=8192, max_num_batched_tokens=8192, kv_cache_memory_bytes=2**30)
check(llm)
config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
prompt = "one two three four five six seven. " * 60
params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=12)
several = llm.generate([prompt], params)[0]
params = SamplingParams(temperature=0, max_tokens=12)
first = llm.generate([prompt + "What comes next?"], params)[0]
again = llm.generate([prompt + "What comes next?"], params)[0]
other = llm.generate([prompt + "What comes next?", prompt + "Which number is last?"], params)[1]
print(json.dumps({
    "blocks": config.num_blocks, "groups": [g.kv_cache_spec.block_size for g in config.kv_cache_groups],
    "several": [list(o.token_ids) for o in several.outputs], "tokens": len(first.prompt_token_ids),
    "first": list(first.outputs[0].token_ids), "again": list(again.outputs[0].token_ids),
    "cached": [first.num_cached_tokens, again.num_cached_tokens, other.num_cached_tokens],
}))
"""


def test_several_replies_prefix_hits_and_the_planner():
    found = json.loads(python("-c", ENGINE).splitlines()[-1])
    pages = 8192 // 32 + 1 + 2 * 12
    plan = Server(2**30, longest=8192, step=8192, block=32, itemsize=4)
    assert int(found["blocks"] / pages * 8192) == plan.pruned(ChannelMask.load(MASK), 16, 144)
    assert found["groups"] == [32, 16]
    assert len({tuple(tokens) for tokens in found["several"]}) == 3
    assert found["again"] == found["first"]
    assert found["cached"][1] == (found["tokens"] - 1) // 32 * 32


def saved_layout(folder, packed):
    """A layout of bits for the reference model: channels of its mask in 8 bits, others in few or none."""
    trained, draw = ChannelMask.load(MASK), torch.Generator().manual_seed(1)
    few = torch.tensor([0, 2, 3, 4], dtype=torch.uint8)[torch.randint(4, trained.keep.shape, generator=draw)]
    keys = few.masked_fill(trained.keep, 8) * trained.keep.any(-1, keepdim=True)
    values = torch.tensor([2, 3, 4, 8], dtype=torch.uint8)[torch.randint(4, keys.shape[:2], generator=draw)]
    precision, path = Precision(keys, values, packed=packed), folder / "mask.safetensors"
    ChannelMask(precision.keep, precision=precision).save(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "packed"])
def layout(request, tmp_path_factory):
    """With whole and with packed scales."""
    return saved_layout(tmp_path_factory.mktemp("layout"), request.param)


@pytest.fixture(scope="module")
def by_cache_of_codes(tmp_path_factory, layout):
    return served(tmp_path_factory.mktemp("cache"), "cache", "--mask", str(layout))


@pytest.mark.parametrize(
    ("layout", "variant", "block"),
    [
        (False, "together", "128"),
        (False, "preempted", "64"),
        (False, "prefixes", "64"),
        (True, "preempted", "64"),
    ],
    indirect=["layout"],
)
def test_replies_over_codes_are_those_of_the_compressed_cache(tmp_path, layout, by_cache_of_codes, variant, block):
    """On the absolute grid; preempted and resumed requests, too. A hit of these requests lies in sink and window."""
    found = compare(by_cache_of_codes, served(tmp_path, variant, "--mask", str(layout), "--block-size", block))
    assert found["equal"] == found["requests"]
    assert found["largest difference of logprobs"] < 1e-3
    assert found["pages held at the end"] == 0
    assert bool(found["preemptions"]) == (variant == "preempted")
    assert bool(found["tokens from the prefix cache"]) == (variant == "prefixes")


CODES = """
import json, os, sys
ranks = int(sys.argv[3])
if ranks > 1:  # vLLM itself binds ranks to NUMA nodes only
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[:ranks]))
from scripts.bench.serving import engine, pages_held
from vllm import SamplingParams
from leank.eval.serving import check
how, mask = sys.argv[1:3]
settings = {"hit": {}, "steps": {"enable_prefix_caching": False, "enable_chunked_prefill": True}}[how]
llm = engine(mask, block_size=64, max_model_len=2048, kv_cache_memory_bytes=2**28, tensor_parallel_size=ranks,
             **{"max_num_batched_tokens": 2048 if how == "hit" else 896, **settings})
check(llm)
core, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
prefix = [7 + 11 * i % 900 for i in range(896)]
prompts = [prefix + [5 + (n + 3 * i) % 800 for i in range(n)] for n in (1, 64, 205)]
def replies(prompts, preempt_at=None):
    done, params = {}, SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), {"prompt_token_ids": prompt}, params)
        steps = 0
        while core.has_unfinished_requests():
            steps += 1
            if steps == preempt_at:
                scheduler.reset_prefix_cache(reset_running_requests=True)
            for output in core.step():
                if output.finished:
                    done[i] = list(output.outputs[0].token_ids), output.num_cached_tokens
    return [done[i] for i in range(len(prompts))]
found = {}
if how == "hit":
    replies([prefix + [3]])
    found["hit"] = replies(prompts)
else:
    found["whole"] = replies(prompts)
    found["resumed"] = replies(prompts, preempt_at=70)
print(json.dumps({**found, "held": pages_held(llm), "tokens": core.vllm_config.cache_config.kv_cache_size_tokens}))
"""


def test_a_hit_and_a_resumed_request_read_the_codes_of_others_and_give_equal_replies(layout):
    """The prefix is beyond sink and window, so all that follow it read codes: of another request, or their own.

    Two ranks of tensor parallelism have two of the four KV heads each.
    """
    said = [
        python("-c", CODES, how, str(layout), n).splitlines()
        for how, n in (("hit", "1"), ("steps", "1"), ("steps", "2"))
    ]
    # workers may write after it
    hit, steps, ranks = (json.loads(next(line for line in lines if line.startswith("{"))) for lines in said)
    for name in ("whole", "resumed", "held"):
        assert ranks[name] == steps[name]
    assert [cached for _, cached in hit["hit"]] == [896, 896, 896]
    assert [reply for reply, _ in hit["hit"]] == [reply for reply, _ in steps["whole"]]
    assert [reply for reply, _ in steps["resumed"]] == [reply for reply, _ in steps["whole"]]
    assert hit["held"] == steps["held"] == 0
    mask = ChannelMask.load(layout)
    for found, step, hits, n in ((hit, 2048, True, 1), (steps, 896, False, 1), (ranks, 896, False, 2)):
        plan = Server(2**28, longest=2048, step=step, block=64, itemsize=4, hits=hits, ranks=n)
        assert found["tokens"] == plan.pruned(mask, 64, 256)


REFUSAL = """
import sys, json
from vllm.engine.arg_utils import EngineArgs
for settings in json.loads(sys.argv[1]):
    try:
        EngineArgs(**settings).create_engine_config()
    except Exception as error:
        print("refused:", str(error).replace(chr(10), " "))
    else:
        print("taken")
"""


def test_what_cannot_be_served_is_refused_before_weights_load(tmp_path, tmp_path_factory):
    layout = saved_layout(tmp_path_factory.mktemp("layout"), True)

    def model(**changes):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((REFERENCE / name).read_bytes())
        config = json.loads((REFERENCE / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return str(folder)

    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    beside = model()
    (tmp_path / "0" / "mask.safetensors").write_bytes(MASK.read_bytes())
    ours = {"model": str(REFERENCE), "additional_config": {"leank": {"mask": str(MASK)}}}
    coded = {**ours, "block_size": 64, "additional_config": {"leank": {"mask": str(layout)}}}
    narrow = {"leank": {"mask": str(layout), "window": 200}}
    cases = [
        (ours, "taken"),
        ({**ours, "model": model(num_hidden_layers=6)}, "shape"),
        ({**ours, "block_size": 24}, "block_size=24"),
        (coded, "taken"),
        ({**coded, "block_size": 32}, "block_size=32 must be a multiple of 64"),
        ({**coded, "additional_config": narrow}, "window=200 must be a multiple of 64"),
        ({**coded, "max_model_len": 256}, "window=256 is no less than max-model-len=256"),
        ({**ours, "kv_cache_dtype": "fp8"}, "kv-cache-dtype=fp8"),
        ({**ours, "tensor_parallel_size": 3}, "divisible by tensor parallel size"),
        ({**ours, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative"),
        ({**ours, "kv_offloading_size": 1.0}, "drop --kv-offloading-size"),
        ({**ours, "max_model_len": 160, "additional_config": {"leank": {"mask": str(MASK), "window": 160}}}, "no less"),
        ({**ours, "disable_hybrid_kv_cache_manager": True}, "hybrid"),
        ({**ours, "model": model(sliding_window=64, **mistral)}, "sliding"),
        ({"model": beside, "additional_config": {"leank": {"mask": beside + "/mask.safetensors"}}}, "another folder"),
        ({**ours, "additional_config": {"leank": {"mask": "none.safetensors"}}}, "none.safetensors"),
        ({**ours, "additional_config": {"leank": {"masks": ""}}}, "masks"),
        ({"model": str(REFERENCE)}, "in a process of its own"),
    ]  # fmt: skip
    out = python("-c", REFUSAL, json.dumps([settings for settings, _ in cases]))
    said = [line for line in out.splitlines() if line.startswith(("refused:", "taken"))]
    assert [words in line for line, (_, words) in zip(said, cases, strict=True)] == [True] * len(cases), said


SERVE = (sys.executable, "-m", "leank.eval.serving.serve", str(REFERENCE), "--mask", str(MASK))
SERVER = ("--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--port")
MEMORY = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture
def server(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    with log.open("w") as file:
        command = [*SERVE, *SERVER, str(port)]
        process = subprocess.Popen(command, env={**os.environ, **MEMORY}, stdout=file, stderr=subprocess.STDOUT)
    try:
        while "Application startup complete" not in log.read_text():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process, log=log)
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_a_server_whose_plug_in_is_not_loaded_does_not_start():
    environment = {**os.environ, **MEMORY, "VLLM_PLUGINS": ""}
    done = subprocess.run([*SERVE, *SERVER, "8123"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "leank-serve: this server serves the dense model: worker 0 attends with vllm." in done.stderr


UNREGISTERED = """
from leank.eval.serving.serve import refuse_unregistered
try:
    refuse_unregistered()
except RuntimeError as error:
    print("refused:", error)
else:
    print("taken")
"""


@pytest.mark.parametrize(("plugins", "said"), [("leank", "taken"), ("", "refused: vLLM has no attention backend")])
def test_a_backend_that_the_plug_in_did_not_register_is_refused(plugins, said):
    out = python("-c", UNREGISTERED, VLLM_PLUGINS=plugins, LEANK_MASK=str(MASK))
    assert out.splitlines()[-1].startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--headless"], "it is one HTTP server; drop --headless"),
        (["--worker-extension-cls", "own.Worker"], "--worker-extension-cls own.Worker would take the place of"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(options, said):
    done = subprocess.run([*SERVE, *SERVER, "8123", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"leank-serve: {said}" in done.stderr


def test_no_request_is_lost_and_no_page_stays_held(server):
    load = ("-m", "scripts.bench.serving", "load", server.url, "--requests", "60")
    found = json.loads(python(*load).splitlines()[-1])
    assert found["finished by length"] + found["cancelled"] == 60
    assert found["cancelled"] > 0
    assert found["kv_cache_usage_perc"] == found["num_requests_running"] == found["num_requests_waiting"] == 0
    metrics = urlopen(f"{server.url}/metrics").read().decode()
    assert f'leank_block_bytes{{mask="{MASK.resolve()}"}}' in metrics
    server.process.terminate()
    assert server.process.wait(timeout=60) == 0
    assert "ended by itself" not in server.log.read_text()


def test_a_server_whose_engine_is_killed_under_load_ends_with_an_error(server):
    import psutil

    load = ("-m", "scripts.bench.serving", "load", server.url, "--requests", "400")
    asking = subprocess.Popen([sys.executable, *load], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    while not any(
        line.startswith("vllm:num_requests_running{") and float(line.rsplit(" ", 1)[1])
        for line in urlopen(f"{server.url}/metrics").read().decode().splitlines()
    ):
        assert asking.poll() is None
        time.sleep(0.2)
    children = psutil.Process(server.process.pid).children()
    (engine,) = (child for child in children if "EngineCore" in " ".join(child.cmdline()))
    engine.kill()
    assert server.process.wait(timeout=60) == 1
    assert "leank-serve: the process of the engine has ended by itself" in server.log.read_text()
    with pytest.raises(URLError):
        urlopen(f"{server.url}/health")
    found = json.loads(asking.communicate(timeout=60)[0].splitlines()[-1])
    assert found["not answered"] > 0
    assert "lost" not in found


@pytest.mark.parametrize("of", ["mask", "layout"])
def test_under_load_each_reply_is_the_one_without(tmp_path, layout, of):
    """Cancelled, behind a prefix hit, preempted and resumed, to the last token."""
    given = ("--mask", str(layout), "--block-size", "64", "--memory", "40") if of == "layout" else ("--memory", "13")
    python(
        *("-m", "scripts.bench.serving_soak", str(tmp_path), "--seconds", "0", "--known", "8", "--requests", "24"),
        *given,
    )
    (row,) = map(json.loads, (tmp_path / "soak.jsonl").read_text().splitlines())
    assert row["finished"] + row["cancelled"] == 24
    assert row["other"] == row["held"] == 0
    assert row["preempted"] > 0
    assert row["hits"] > 0
    assert row["compared"] > 1000


def test_a_load_in_steps_leaves_no_page_held_and_no_wrong_reply(tmp_path):
    python(
        *("-m", "scripts.bench.serving", "offline", str(tmp_path), "--requests", "10", "--at-once", "4"),
        *("--lengths", "256", "512", "--reply", "8", "--settings", json.dumps({"kv_cache_memory_bytes": 2**27})),
    )
    found = json.loads((tmp_path / "load_mask_4.json").read_text())
    assert found["finished"] + found.get("cancelled", 0) == 10 + found["replies compared"] // 2
    assert found["share of prompts from the prefix cache"] > 0
    assert found["pages held at the end"] == found["wrong replies"] == 0
    assert found["sure tokens"] > 0
