"""Lethe: Layer- and Time-Adaptive KV Cache Pruning for Reasoning-Intensive LLM Serving. 6 figures, 6 tables."""

from __future__ import annotations

from collections.abc import Sequence

from leank.eval.papers.item import Analysed, Contrast, EvalRun, Expect, Item
from leank.eval.papers.presets import MIXED, gpu, methods, on, real, where

MODELS = ("r1_qwen_7b", "r1_qwen_32b", "r1_llama_8b", "r1_llama_70b")
NAMES = "DeepSeek-R1-Distill-Qwen-7B and -32B, -Llama-8B and -70B"
RIVALS = ("h2o", "streaming_llm", "pyramidkv", "papers/lethe")
BOUND = (
    "Random weights attend almost evenly, and then no layer has a breakpoint: the benchmark bounds what a layer holds "
    "(limit), and with real weights Lethe may hold more. Its shape is that of Llama-3.1-8B alone."
)
LATE = range(128, 10**6)  # decoding steps
HELD = (
    Expect(
        "tokens seen over tokens held after 128 steps and more",
        where(measure="seen", step=LATE),
        where(measure="held", step=LATE),
        by=("task", "sample", "layer", "step"),
        over=("task", "sample"),
    ),
)
# long replies: the model writes a path of 64 steps, some 700 tokens
ON_CHAINS = (f"model.name={MIXED.path}",)
REPLIES = Analysed(
    "retained_tokens", {"task": "chain", "length": 2048, "samples": 16, "steps": 640},
    quick={"samples": 2, "steps": 320},
    overrides=ON_CHAINS, need=MIXED,
)  # fmt: skip
LEVEL = (Expect("growth of the most that a layer holds from the first half of long replies to the second, as a share "
                "of the tokens written in between", where(measure="growth", task="chain"), over=("sample",), bound=0.1,
                above=False, chosen=True),)  # fmt: skip
HOLD = (
    "The model of long replies has 3 layers of one KV head: two of them never attend unevenly enough for a round and "
    "hold all tokens, the one between holds half of what is written."
)
PLATEAU = f"A tenth is a choice made here; a dense cache has 1. {HOLD}"
SPEED = gpu(
    "python -m scripts.bench.methods OUT --lengths 256 --new 20480 --batches 1 4 8 16 32 --methods dense lethe "
    "--set +method.lethe.tokens.limit=1024"
)
QUICK_CHAINS = ("benchmark.samples=2", "benchmark.lengths=[2048]", "batch_size=2")


def chains(*names: str, sets: Sequence[str] = ()) -> EvalRun:
    """Replay the task of long replies on the model that was trained on it."""
    tasks = ("benchmark.tasks=[chain]", "benchmark.lengths=[2048,4096]", "max_new_tokens=null")
    return EvalRun(("+experiment=papers/here", *ON_CHAINS, *tasks, methods(names), *sets), QUICK_CHAINS, MIXED)


rivals = chains("reference/h2o", "streaming_llm", "pyramidkv", "reference/lethe",
                sets=("method.pyramidkv.tokens.budget=512", "method.streaming_llm.window=496"))  # fmt: skip
recent = chains("papers/lethe_recent", sets=("+method.lethe_recent.tokens.evict_at=512",))
sparse = chains("papers/lethe_sparse", sets=("+method.lethe_sparse.tokens.evict_at=512",))
ON_MATH = (
    "On chains here, whose replies of 700 tokens have an end that can be checked; no reasoning. The model that writes "
    "them has 3 layers of one KV head, which leaves layers little to differ in. A reply copies 64 rare words from all "
    "over the prompt, and one that is gone spoils it: all methods that drop tokens fail at these budgets. "
)

ITEMS = (
    Item("lethe:fig1", "Hoyer sparsity of attention by layer and decoding step.",
         "Layers differ, and a layer changes over time, so each needs a budget of its own that moves.",
         here=(Analysed("sparsity"),), real=(on("r1_llama_8b", "sparsity", steps=5700, every=50),
                                             on("r1_qwen_7b", "sparsity", steps=3000, every=50)),
         needs="DeepSeek-R1-Distill-Llama-8B, -Qwen-7B",
         note="The paper gives no number, and has prompts of MATH-500 and MMLU, not of RULER. Rows have the standard "
         "deviations between layers and over steps."),
    Item("lethe:fig2", "How Lethe runs beside decoding, as a drawing.",
         note="docs/architecture.md has the way of a step; eval/cache/storage/eviction.py evicts."),
    Item("lethe:fig3", "Which tokens two layers still hold after 1,000 and 2,000 steps.",
         "Layers keep different tokens, some hundreds instead of thousands.",
         here=(Analysed("retained_tokens"), REPLIES),
         real=(on("r1_qwen_7b", "retained_tokens", steps=2000, evict_at=1024),),
         needs="DeepSeek-R1-Distill-Qwen-7B", claims=HELD, note=f"Means over the layers. {HOLD}"),
    Item("lethe:fig4", "Latency, memory and throughput against the tokens generated, dense and Lethe.",
         "Memory stops growing after some thousand tokens, and tokens come faster.",
         here=(REPLIES, Analysed("retained_tokens")), real=(SPEED,), needs="a GPU", claims=(*LEVEL, *HELD),
         note=f"Memory as tokens held, from retained_tokens. {PLATEAU} {BOUND}"),
    Item("lethe:fig5", "Attention of four heads of a layer.", "Heads of a layer look at the same tokens.",
         here=(Analysed("head_similarity"),), real=(on("r1_qwen_7b", "head_similarity", layers=[6]),),
         needs="DeepSeek-R1-Distill-Qwen-7B",
         claims=(Expect("cosine of the attention of two heads of a layer", where(measure="mean_cosine", part="all"),
                        bound=0.5, units="layers", chosen=True),),
         note="The paper gives no number; 0.5 is a choice made here. The figure has the tokens between sink and window "
         "apart; these alone may leave."),
    Item("lethe:fig6", "The KV cache's share of all GPU memory by length, 8B and 70B.",
         "It grows to half of all memory.",
         here=(gpu("python -m scripts.bench.decoding memory OUT --context 20480 --batch 1"),),
         note="The bytes follow from the model's shape: eval.methods.memory.dense_bytes."),
    Item("lethe:table1", "MATH-500 and eight subjects of MMLU, with reasoning: Lethe, H2O, StreamingLLM, PyramidKV.",
         "Lethe stays near the full cache, the others fall behind on MATH-500.", here=(rivals,),
         real=tuple(real(model, benchmark, *RIVALS) for model in MODELS for benchmark in ("math500", "mmlu")),
         needs=f"{NAMES}; MATH-500, MMLU", tables=("1", "1 (MATH-500)"),
         claims=(Contrast("lethe", "dense", bound=-2), *(Contrast("lethe", one) for one in ("h2o", "streaming_llm",
                                                                                          "pyramidkv"))),
         note=ON_MATH + "The paper does not give the rivals' budgets: 1024 with real weights, 512 on chains."),
    Item("lethe:table2", "Memory while generating, by batch size.", "Lethe needs less, and fits where dense does not.",
         here=(REPLIES, Analysed("retained_tokens")), real=(SPEED,), needs="a GPU", claims=(*LEVEL, *HELD),
         note="Memory as tokens held, of one row. " + BOUND),
    Item("lethe:table3", "Throughput by batch size.", "Lethe is faster, the larger the batch, the more so.",
         here=(SPEED,), note=BOUND),
    Item("lethe:table4", "Which adaptations related methods have, as a list.",
         note="docs/methods.md lists the methods here by axis."),
    Item("lethe:table5", "MATH-500 by recent ratio, 0.1 to 0.4.", "0.3 is best or close to it.",
         here=(recent,), claims=(Contrast("lethe_recent_0.3", "lethe_recent_0.1"),),
         real=tuple(real(model, "math500", "papers/lethe_recent") for model in ("r1_qwen_7b", "r1_llama_8b")),
         needs="DeepSeek-R1-Distill-Qwen-7B, -Llama-8B; MATH-500", note=ON_MATH),
    Item("lethe:table6", "MATH-500 by sparse ratio (tau), 20 to 1000.", "Larger is better, up to 400.",
         here=(sparse,), claims=(Contrast("lethe_sparse_400", "lethe_sparse_20"),),
         real=tuple(real(model, "math500", "papers/lethe_sparse") for model in ("r1_qwen_7b", "r1_llama_8b")),
         needs="DeepSeek-R1-Distill-Qwen-7B, -Llama-8B; MATH-500", note=ON_MATH),
)  # fmt: skip
