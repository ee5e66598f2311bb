"""ASL: Adaptive Layer Selection for Layer-Wise Token Pruning in LLM Inference. 10 figures, 12 tables."""

from __future__ import annotations

from leank.eval.papers.item import Analysed, Contrast, EvalRun, Expect, Item
from leank.eval.papers.presets import QUICK, here, on, real, ruler, where

UL, QWEN = "Llama-3.1-Nemotron-8B-UltraLong-1M-Instruct", "Qwen2.5-7B-Instruct-1M"
BOTH = f"{UL}, {QWEN}"
QA = "SQuAD and HotpotQA for qa_1 and qa_2"
ON_RULER = f"{BOTH}; {QA}"
K = 1024
ALL = (4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
MODELS = ("llama31_8b_ultralong", "qwen25_7b_1m")
ROWS = ("papers/snapkv_asl", "papers/fastkv", "papers/asl", "papers/gemfilter", "papers/asl_two_pass")
FULL = ("papers/fastkv_full", "papers/asl_full")
QWEN_LAYERS = ("method.fastkv.prefill.layer=14", "method.gemfilter.prefill.layer=14")
QWEN_FULL = ("method.fastkv_full.each.prefill.layer=[14]",)
RESCALED = (
    "With L_obs = 8 and tau = 0.3 the ranks of the reference model's 7 layers never settle. The rule for fewer than 24 "
    "layers gives 2 and 0.95, from layer 3 on (docs/methods.md). Budgets are 512: "
    "papers/asl_here in conf/method/papers.yaml."
)
FORCED = ("method.fastkv.prefill.layer=3", "method.fastkv.prefill.budget=512", "method.fastkv.tokens.budget=512",
          "method.gemfilter.prefill.layer=4", "method.gemfilter.prefill.budget=512",
          "method.snapkv.tokens.budget=512", "method.fastkv_full.prefill.budget=512",
          "method.fastkv_full.each.prefill.layer=[3]")  # fmt: skip

main = here("papers/snapkv_asl", "papers/fastkv", "papers/fastkv_full", "papers/gemfilter", "pyramid_infer",
            "papers/asl_here", sets=FORCED)  # fmt: skip
large = here(
    "papers/snapkv_asl", "papers/fastkv", "papers/gemfilter", "papers/asl_here",
    sets=(*FORCED[:6], *(f"method.{m}.prefill.budget=1024" for m in ("fastkv", "gemfilter", "asl", "asl_two_pass")),
          *(f"method.{m}.tokens.budget=1024" for m in ("snapkv", "fastkv", "asl"))),
    quick=(*QUICK, "benchmark.lengths=[2048]"),  # prompts of 1K are whole at this budget
)  # fmt: skip
layers = here("papers/fastkv_full", sets=("method.fastkv_full.prefill.budget=512",
                                          "method.fastkv_full.each.prefill.layer=[1,2,3,4,5]"))  # fmt: skip


def on_ruler(lengths: tuple[int, ...], *names: str, sets: tuple[str, ...] = ()) -> tuple[EvalRun, ...]:
    """Replay RULER on both models, Qwen with its own selection layers."""
    qwen = (*(QWEN_LAYERS if "papers/fastkv" in names else ()), *(QWEN_FULL if "papers/fastkv_full" in names else ()))
    return (ruler(MODELS[0], lengths, *names, sets=sets), ruler(MODELS[1], lengths, *names, sets=(*sets, *qwen)))


def on_infinitebench(*names: str) -> tuple[EvalRun, ...]:
    """Replay InfiniteBench's ten tasks on both models."""
    sets = ("prefill_chunk=8192",)
    return (real(MODELS[0], "infinitebench", *names, sets=sets),
            real(MODELS[1], "infinitebench", *names, sets=(*sets, *QWEN_LAYERS, *QWEN_FULL)))  # fmt: skip


HARD, EASY = ("niah_multikey_3", "niah_multikey_2"), ("niah_single_1", "niah_single_2")
VARIANCE, ABOVE = {"measure": "relative_variance"}, range(4, 99)  # layers above every L_min
UNIT = ("task", "sample")
LATER = (
    Expect(
        "relative variance in layers 4 to 6 of 7, many similar keys over a single one",
        where(**VARIANCE, task=HARD, layer=ABOVE),
        where(**VARIANCE, task=EASY, layer=ABOVE),
        over=UNIT,
    ),
)
SELECTS = tuple(
    Expect(
        f"layers of 7 that read all tokens at tau = {tau}, many similar keys over a single one",
        where(measure="whole_layers", threshold=tau, task=HARD),
        where(measure="whole_layers", threshold=tau, task=EASY),
        over=UNIT,
    )
    for tau in (0.6, 0.75, 0.9)
)
SHORT = {"samples": 1, "length": 1024, "budget": 256}
LONG = 32 * K  # tokens: analyses of an 8B model
TASKS = "RULER's tasks instead of InfiniteBench's."
OWN: dict[str, object] = {  # the paper's, without qa_1 and qa_2
    "length": 128 * K, "budget": 2048, "thresholds": [0.3], "samples": 200,
    "tasks": [*(f"niah_single_{n}" for n in (1, 2, 3)), *(f"niah_multikey_{n}" for n in (1, 2, 3)), "niah_multivalue",
              "niah_multiquery", "vt", "cwe", "fwe"],
}  # fmt: skip
SELECTION = Analysed("selection_layers", {"samples": 50, "thresholds": [0.6, 0.75, 0.9]}, quick={"samples": 5})
SETTLING = Analysed("relative_variance", {"samples": 25}, quick=SHORT)
NEVER = "L_obs is 2 for 7 layers. Where no layer selects, all layers read all tokens."
BY_LAYER = ("method.fastkv_full.each.prefill.layer=[9,11,13,15,17,19,21,23]",)
EIGHT = (*(f"method.{m}.prefill.budget=8192" for m in ("fastkv", "asl", "gemfilter", "asl_two_pass")),
         *(f"method.{m}.tokens.budget=8192" for m in ("snapkv", "fastkv", "asl")))  # fmt: skip
TAUS = ("method.asl_full.each.prefill.threshold=[0.2,0.3,0.4,0.5,0.6]",)

ITEMS = (
    Item("asl:fig1", "FastKV by its selection layer on four tasks, nothing compressed below it.",
         "Easy tasks allow an early layer, hard ones need a late one.", here=(layers,),
         real=(*(ruler(model, [128 * K], "papers/fastkv_full", sets=BY_LAYER) for model in MODELS),
               *(real(model, "infinitebench", "papers/fastkv_full",
                      sets=("benchmark.tasks=[kv_retrieval]", "prefill_chunk=8192", *BY_LAYER)) for model in MODELS)),
         needs=f"{ON_RULER}; InfiniteBench for KV retrieval",
         claims=(Contrast("fastkv_full_5", "fastkv_full_1"),)),
    Item("asl:fig2", "FastKV and ASL side by side, as a drawing.", note="eval/methods/prefill has both."),
    Item("asl:fig3", "Attention over the prompt in early, middle and late layers, KV retrieval and QA.",
         "Attention is spread in early layers, and settles on few tokens later.",
         here=(Analysed("ranks", quick={"length": 1024}),),
         real=(on("qwen25_7b_1m", "ranks", length=16 * K, top=2048),), needs=QWEN, note=TASKS,
         claims=(Expect("attention on the first 128 tokens, layers 4 to 6 of 7 over 0 to 2",
                        where(measure="top_share", layer=range(4, 7)), where(measure="top_share", layer=range(3)),
                        units="layers of two tasks"),)),
    Item("asl:fig4", "Ranks of the tokens across layers, KV retrieval and QA.", "The top ranks settle with depth.",
         here=(Analysed("ranks", quick={"length": 1024}),),
         real=(on("qwen25_7b_1m", "ranks", length=16 * K, top=2048),), needs=QWEN, note=TASKS,
         claims=(Expect("rank of the tokens that the last layer prefers, layers 0 to 2 of 7 over 4 and 5",
                        where(measure="rank", quantile=0.5, layer=range(3)),
                        where(measure="rank", quantile=0.5, layer=range(4, 6)),
                        units="layers of two tasks"),)),
    Item("asl:fig5", "How the relative variance is computed, as a drawing.", note="eval/methods/prefill/asl.py."),
    Item("asl:fig6", "Relative variance by layer for ten tasks.", "Hard tasks settle later.",
         here=(SETTLING,),
         real=(on("qwen25_7b_1m", "relative_variance", length=LONG, budget=2048),),
         needs=QWEN, note=f"{TASKS} L_obs is 2 for 7 layers.", claims=LATER),
    Item("asl:fig7", "Needle in a haystack on Qwen to 256K: ASL, ASL in two passes, SnapKV, FastKV, GemFilter.",
         "ASL finds every needle in one pass and in two.",
         real=(real("qwen25_7b_1m", "niah", *ROWS, sets=("benchmark.longest=256000", "prefill_chunk=8192",
                                                       *QWEN_LAYERS)),),
         needs=QWEN, note="The reference model was not trained on such needles; asl:table3 has RULER's."),
    Item("asl:fig8", "Relative variance for several L_min and L_obs.", "A small L_obs and an early L_min react faster.",
         here=(Analysed("relative_variance", {"observed": [2, 3], "firsts": [1, 2]}, quick=SHORT),),
         real=(on("qwen25_7b_1m", "relative_variance", length=LONG, budget=2048, observed=[4, 8, 12],
                  firsts=[5, 9, 13]),),
         needs=QWEN,
         claims=(Expect("relative variance above L_min, L_obs of 3 over 2", where(**VARIANCE, observed=3, layer=ABOVE),
                        where(**VARIANCE, observed=2, layer=ABOVE),
                        by=("task", "sample", "layer", "first"), over=UNIT),),
         note=TASKS),
    Item("asl:fig9", "Which layer selects, by task, on Llama.", "Hard tasks select later than FastKV's layer.",
         here=(SELECTION,),
         real=(on("llama31_8b_ultralong", "selection_layers", **OWN),), needs=UL, note=NEVER, claims=SELECTS),
    Item("asl:fig10", "Which layer selects, by task, on Qwen.", "Hard tasks select later than FastKV's layer.",
         here=(SELECTION,),
         real=(on("qwen25_7b_1m", "selection_layers", **OWN),), needs=QWEN, note=NEVER, claims=SELECTS),
    Item("asl:table1", "Methods that prune tokens layer by layer, as a list.",
         note="FastKV, GemFilter, PyramidInfer, PyramidKV and ASL are here; LazyLLM, PromptDistill, SlimInfer, OmniKV, "
         "SqueezeAttention, EvolKV, DynamicKV and CAKE are not."),
    Item("asl:table2", "InfiniteBench: ASL, FastKV, GemFilter, SnapKV, compressed below the selection or not.",
         "ASL keeps KV retrieval where a fixed layer loses it.",
         real=on_infinitebench(*ROWS, *FULL), needs=f"{BOTH}, InfiniteBench", tables=("2",),
         note="The reference model reads 8,192 tokens."),
    Item("asl:table3", "RULER by length for the same methods.",
         "ASL is above FastKV, most of all if nothing is compressed below.",
         here=(main,), real=on_ruler(ALL, *ROWS, *FULL, "pyramid_infer"), needs=ON_RULER, tables=("3",),
         claims=(Contrast("asl", "fastkv"), Contrast("asl_full_0.95", "fastkv_full_3"),
                 Contrast("asl_two_pass", "gemfilter")), note=RESCALED),
    Item("asl:table4", "Time to the first token, as a ratio to dense, by length.",
         "ASL is faster than dense, slower than a fixed layer.", here=(main,),
         real=on_ruler(ALL, *ROWS, "pyramid_infer"), needs=ON_RULER,
         claims=(Contrast("asl_full_0.95", "dense", "first_token", 1),
                 Contrast("fastkv_full_3", "asl_full_0.95", "first_token", 1)),
         note="Seconds are of the machine that runs this. " + RESCALED),
    Item("asl:table5", "Time per token, as a ratio to dense, by length.", "All are faster than dense at long prompts.",
         here=(main,), real=on_ruler(ALL, *ROWS, "pyramid_infer"), needs=ON_RULER,
         claims=(Contrast("asl", "dense", "per_token", 1),),
         note="Seconds are of the machine that runs this. A model this small spends its time elsewhere."),
    Item("asl:table6", "Throughput over requests: mean, median, slowest.", "ASL trails FastKV and GemFilter somewhat.",
         here=(main,), real=on_ruler(ALL[5:], *ROWS), needs=ON_RULER,
         claims=(Contrast("fastkv", "asl", "first_token", 1),),
         note="From the same rows: seconds of the first token and per token."),
    Item("asl:table7", "Memory of the cache.", "All hold the same small part of dense.", here=(main,),
         real=on_ruler(ALL[5:], *ROWS), needs=ON_RULER,
         claims=(Contrast("asl", "dense", "bytes", 0.5), Contrast("asl", "fastkv", "bytes", 1.05)), note=RESCALED),
    Item("asl:table8", "Accuracy, times and memory at budgets of 2048 and 8192.", "A larger budget helps all of them.",
         here=(large,), real=(on_ruler(ALL[5:], *ROWS)[1], on_ruler(ALL[5:], *ROWS, sets=EIGHT)[1]),
         needs=f"{QWEN}; {QA}",
         claims=(Contrast("asl", "fastkv"),), note="1024 here; table 3 has 512."),
    Item("asl:table9", "ASL by tau, with and without compression below the selection.",
         "A larger tau is faster and loses accuracy.", here=(main,),
         real=on_ruler(ALL[5:], "papers/asl_tau", "papers/asl_full", sets=TAUS), needs=ON_RULER,
         claims=(Contrast("asl_full_0.75", "asl_full_0.95"),
                 Contrast("asl_full_0.95", "asl_full_0.75", "first_token", 1)), note=RESCALED),
    Item("asl:table10", "Time to the first token on InfiniteBench.", "As table 4.",
         real=on_infinitebench(*ROWS, *FULL), needs=f"{BOTH}, InfiniteBench", note="Table 4 has RULER's here."),
    Item("asl:table11", "Time per token on InfiniteBench.", "As table 5.",
         real=on_infinitebench(*ROWS, *FULL), needs=f"{BOTH}, InfiniteBench", note="Table 5 has RULER's here."),
    Item("asl:table12", "RULER by task and tau, the detail of table 9.", "Hard tasks are the ones that tau decides.",
         here=(main,), real=on_ruler(ALL[5:], "papers/asl_tau", "papers/asl_full", sets=TAUS),
         needs=ON_RULER, tables=("12",),
         claims=(Contrast("asl_full_0.75", "asl_full_0.95"),), note=RESCALED),
)  # fmt: skip
