"""LeanK: Learnable K Cache Channel Pruning for Efficient Decoding. 10 figures, 23 tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from leank.eval.papers.item import Analysed, Command, Contrast, EvalRun, Expect, Item, Measurement, Need
from leank.eval.papers.presets import LLAMA_MASK, QWEN_MASK, gpu, here, longbench, on, real, ruler, where

LLAMA, QWEN = "Llama-3.1-8B-Instruct", "Qwen2.5-7B-Instruct"
RULER = f"{LLAMA}; SQuAD and HotpotQA for qa_1 and qa_2"
K = 1024
ALL = (4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
HIGH, LOW = range(32), range(32, 64)  # RoPE pairs of a head of 128 channels, by frequency
NO_LOSS = -2.0  # points that a method may lose and still count as equal
STATIC = "method.static_norm.channels.samples=100", "method.static_norm.channels.length=4096"
QUICK_STATIC = "method.static_norm.channels.samples=8", "method.static_norm.channels.length=1024"

main = here("leank", "papers/think")
REAL_BY_LENGTH = (
    ruler("llama31_8b", ALL, "leank", "papers/think", sets=(LLAMA_MASK,)),
    ruler("qwen25_7b", ALL[:4], "leank", "papers/think", sets=(QWEN_MASK,)),
    ruler("qwen25_7b_yarn", ALL[4:], "leank", "papers/think", sets=(QWEN_MASK,)),
)
REAL_GSM = (
    real("llama31_8b", "gsm_infinite", "leank", "think", sets=(LLAMA_MASK,)),
    real("qwen25_7b", "gsm_infinite", "leank", "think", sets=(QWEN_MASK,)),
)
DUO = ("method.duo_attention.sink=128", "method.duo_attention.window=1024")  # those of duo_leank
STAGE_2 = Command("python -m leank_train -m +experiment=qwen_70pct_yarn +sweep=stage2", f"{QWEN} and 8 GPUs")
static = here("leank", "papers/think", "papers/static_norm", sets=STATIC)
static = EvalRun(static.overrides, (*static.quick, *QUICK_STATIC))
double = here("leank", "papers/think", "papers/double_sparsity_channels",
              sets=("method.double_sparsity_channels.channels.samples=64",))  # fmt: skip
on_top = here(
    "leank", "reference/duo_attention", "duo_leank", "papers/quest", "papers/quest_leank", "papers/kivi2",
    "papers/kivi2_leank",
    sets=("method.quest.reads.budget=512", "method.quest_leank.reads.budget=512"),
)  # fmt: skip
budget = here("leank", "leank_budget", "papers/think")
stages = Command("python -m leank_train -m +experiment=sweep_reference +sweep=stage2")
TABLE_12 = Need("the masks of table 12", "assets/masks/reference/stages")
with_masks = replace(here("papers/stages"), need=TABLE_12)
STAGES = tuple(Contrast(f"leank_both_{ratio}_seed1", f"leank_first_{ratio}_seed1") for ratio in (70, 95))
WHOLE = (
    "Prompts are compressed from 160 tokens on here, from 1,152 in the paper, which does not say what its ThinK keeps "
    "whole: here sink and window of the mask. Qwen's published mask serves all lengths; the paper has two."
)


KEPT = {"measure": "kept", "method": "mask", "layer": range(99)}  # the mask's share of a RoPE pair in each layer


def different(axis: str, name: str) -> Callable[[Measurement], bool]:
    """Whether a row is the correlation of two tasks, or of two lengths, that differ; each pair counts once."""
    chosen = where(measure="pearson", axis=axis)
    return lambda row: chosen(row) and str(row[name]) < str(row[f"other_{name}"])


def halves(pair: int) -> tuple[Expect, Expect]:
    """Claim that low frequencies are kept more often, and that `pair` stands out of the high ones."""
    others = tuple(number for number in HIGH if number != pair)
    return (
        Expect("kept share of the low-frequency half", where(**KEPT, pair=LOW), where(**KEPT, pair=HIGH),
               over=("layer",), units="layers"),
        Expect(f"kept share of pair {pair}", where(**KEPT, pair=pair), where(**KEPT, pair=others), over=("layer",),
               units="layers"),
    )  # fmt: skip


ITEMS = (
    Item(
        "leank:fig1",
        "Left, middle: correlation of channel norms between tasks and between lengths. Right: norm of groups of four "
        "channels against what removing them costs.",
        "The same channels matter in every task and at every length; a large norm does not mean a large effect.",
        here=(Analysed("staticity", quick={"samples": 1, "lengths": [512, 1024], "length": 1024}),
              Analysed("group_removal", quick={"samples": 1, "length": 512})),
        real=(Analysed("staticity", {"length": 64 * K, "lengths": ALL[:5]}, overrides=("model=llama31_8b",)),
              on("llama31_8b", "group_removal", length=64 * K)),
        needs=LLAMA,
        claims=(Expect("correlation of channel norms between two tasks", different("tasks", "task"), bound=0.9,
                       units="pairs of tasks"),
                Expect("correlation of channel norms between two lengths", different("lengths", "length"), bound=0.9,
                       units="pairs of lengths")),
    ),
    Item("leank:fig2", "The two training stages and the cache that is deployed, as a drawing.",
         note="docs/architecture.md describes it."),
    Item("leank:fig3", "What the two training stages minimise, as a drawing.",
         note="docs/architecture.md has both objectives in a table."),
    Item(
        "leank:fig4",
        "RULER against the pruning ratio, LeanK and ThinK.",
        "LeanK is better at every ratio, and the more is pruned, the more so.",
        here=(here("papers/leank_ratios", "papers/think", "lowest_frequencies",
                   sets=("method.think.each.channels.ratio=[0.5,0.7,0.8,0.9,0.95]",
                         "+method.lowest_frequencies.each.channels.ratio=[0.5,0.7,0.8,0.9,0.95]")),),
        real=(Command("python -m leank_train -m +experiment=llama_70pct +sweep=ratio 'validation.lengths=[65536]'",
                      f"{LLAMA} and 8 GPUs"),),
        needs=f"{LLAMA} and 8 GPUs",
        claims=tuple(Contrast(f"leank_kl_{r}_seed1", f"think_{r / 100:g}") for r in (50, 70, 80, 90, 95)),
        note="Masks of the KL objective, one training each; lowest frequencies need no training.",
    ),
    Item("leank:fig5", "Time of decode attention in every layer of Llama, dense and LeanK.",
         "Attention is 1.3 times as fast.", here=(gpu("python -m scripts.bench.attention layers OUT"),),
         note="docs/results/attention.md has it measured on an H200."),
    Item("leank:fig6", "Memory against the batch size, dense and LeanK.",
         "At 4K + 1K tokens the batch grows by 20%, and 64 rows save 10 GB.",
         here=(gpu("python -m scripts.bench.decoding memory OUT --context 5120 --batch 1 8 16 32 64"),)),
    Item(
        "leank:fig7",
        "Share of the kept channels in each RoPE pair, on Llama.",
        "Low frequencies are kept more often; pair 22 is kept although its frequency is high.",
        here=(Analysed("kept_by_pair", {"samples": 0}, overrides=(LLAMA_MASK,), model=False),
              Analysed("empty_heads", overrides=(LLAMA_MASK,), model=False)),
        real=(Analysed("kept_by_pair", {"length": 64 * K}, overrides=("model=llama31_8b", LLAMA_MASK)),),
        needs=f"{LLAMA}, for ThinK's curve beside it",
        claims=halves(22),
        note="From the mask that the authors published; ThinK's curve needs the weights.",
    ),
    Item(
        "leank:fig8",
        "Accuracy when heads with the highest, the lowest or random w_hf keep sink and window alone.",
        "Heads of low w_hf carry retrieval; those of high w_hf can be cut.",
        here=(Analysed("w_hf", quick={"samples": 2, "length": 1024}),),
        real=(on("llama31_8b", "w_hf", task="niah_multikey_3", tasks=["niah_multikey_3"], length=64 * K, samples=20,
                 sink=64, window=256),),
        needs=LLAMA,
        claims=(Expect("right answers (%) with a quarter of the heads streaming, highest w_hf over lowest",
                       where(measure="exact", order="highest", share=0.25),
                       where(measure="exact", order="lowest", share=0.25), units="means of four samples"),
                Expect("right answers (%) with a quarter of the heads streaming, highest w_hf over random",
                       where(measure="exact", order="highest", share=0.25),
                       where(measure="exact", order="random", share=0.25), units="means of four samples")),
        note="Four samples of two tasks. The paper gives no sink and window; with real weights they are "
        "DuoAttention's, 64 and 256. Table 11 has the same heads with 50 samples of nine tasks.",
    ),
    Item(
        "leank:fig9",
        "Share of the kept channels in each RoPE pair, on Qwen.",
        "Low frequencies are kept more often; pair 31 stands out of the high half.",
        here=(Analysed("kept_by_pair", {"samples": 0}, overrides=(QWEN_MASK,), model=False),
              Analysed("empty_heads", overrides=(QWEN_MASK,), model=False)),
        real=(Analysed("kept_by_pair", {"length": 32 * K}, overrides=("model=qwen25_7b", QWEN_MASK)),),
        needs=f"{QWEN}, for ThinK's curve beside it",
        claims=(*halves(31), Expect("share of empty heads in the first five layers", where(measure="empty_in_first"),
                                    bound=0.4, counted=True)),
        note="From the mask that the authors published, with its empty heads (appendix M): 31% of the heads, "
        "not the paper's 16%.",
    ),
    Item("leank:fig10", "Time of decode attention in every layer of Qwen, dense and LeanK.",
         "Attention is 1.6 times as fast.", here=(gpu("python -m scripts.bench.attention layers OUT"),),
         note="docs/results/attention.md has it measured on an H200."),
    Item(
        "leank:table1",
        "A static mask of mean channel norms against ThinK, which chooses for every prompt.",
        "The static mask is at least as good, so which channels matter does not depend on the prompt.",
        here=(static,),
        real=(ruler("llama31_8b", [64 * K], "papers/think", "papers/static_norm"),), needs=RULER, tables=("20",),
        claims=(Contrast("static_norm_0.6", "think_0.6", bound=-1), Contrast("static_norm_0.7", "think_0.7", bound=-1)),
        note="100 samples at 4K here.",
    ),
    Item(
        "leank:table2", "LongBench: LeanK and ThinK.", "LeanK loses next to nothing where ThinK loses 5%.",
        real=(longbench("llama31_8b", "leank", "leank", "papers/think", sets=(LLAMA_MASK,)),
              longbench("qwen25_7b", "leank", "leank", "papers/think", sets=(QWEN_MASK,))),
        needs=f"{LLAMA}, {QWEN}, LongBench", tables=("2",), note="The reference model cannot read natural text.",
    ),
    Item(
        "leank:table3", "RULER by length: LeanK and ThinK.", "LeanK at 70% loses next to nothing, ThinK much.",
        here=(main,),
        real=REAL_BY_LENGTH, needs=f"{RULER}; {QWEN}", tables=("3",),
        claims=(Contrast("leank", "dense", bound=NO_LOSS), Contrast("leank", "think_0.7")), note=WHOLE,
    ),
    Item(
        "leank:table4", "GSM-Infinite, area under the accuracy by operations: LeanK and ThinK.",
        "LeanK keeps what long reasoning needs, ThinK does not.",
        real=REAL_GSM, needs=f"{LLAMA}, {QWEN}", tables=("4",), note="The reference model cannot reason.",
    ),
    Item(
        "leank:table5", "LeanK on top of DuoAttention.", "Half of the heads stream, LeanK prunes the others for free.",
        here=(on_top,), real=(ruler("llama31_8b", [64 * K], "duo_attention", "duo_leank", sets=(LLAMA_MASK, *DUO)),),
        needs=RULER, tables=("21",), claims=(Contrast("duo_leank", "duo_attention", bound=NO_LOSS),
                                            Contrast("duo_leank", "duo_attention", "bytes", 1)),
        note="Heads stream by w_hf; the paper's by DuoAttention's trained gates, which are a setting: "
        "method.duo_attention.tokens.pattern=PATH method.duo_leank.tokens.pattern=PATH.",
    ),
    Item(
        "leank:table6", "LeanK on top of Quest.", "Reading LeanK's channels alone makes Quest better.",
        here=(on_top,), real=(ruler("llama31_8b", [64 * K], "papers/quest", "papers/quest_leank", sets=(LLAMA_MASK,)),),
        needs=RULER, tables=("21",), claims=(Contrast("quest_leank", "quest"),),
        note="Pages of 64, 1,024 tokens read; 512 here.",
    ),
    Item(
        "leank:table7", "LeanK on top of KIVI at 2 bits.", "KIVI on LeanK's channels loses half a point.",
        here=(on_top,), real=(ruler("llama31_8b", [32 * K], "papers/kivi2", "papers/kivi2_leank", sets=(LLAMA_MASK,)),),
        needs=RULER, tables=("21",), claims=(Contrast("kivi2_leank", "kivi2", bound=NO_LOSS),
                                            Contrast("kivi2_leank", "kivi2", "bytes", 1)),
        note="The published mask gives 9.1x at 32K, the paper has 9.7x: docs/fidelity.md.",
    ),
    Item("leank:table8", "Generation time and throughput, dense and LeanK, 4K prompts.", "Throughput grows by a fifth.",
         here=(gpu("python -m scripts.bench.decoding generation OUT --prompt 4096 --new 128 1024 --batch 64"),)),
    Item(
        "leank:table9", "ThinK, ThinK with LeanK's number of channels per head, and LeanK.",
        "The budget per head brings most of the gain, the learned choice the rest.", here=(budget,),
        real=(ruler("llama31_8b", [64 * K], "leank", "leank_budget", "papers/think", sets=(LLAMA_MASK,)),),
        needs=RULER, tables=("23",), claims=(Contrast("leank_budget", "think_0.7"), Contrast("leank", "leank_budget")),
    ),
    Item(
        "leank:table10", "Double Sparsity's label channels as a pruning mask, against LeanK.",
        "As a mask they are far worse than LeanK, and than ThinK.", here=(double,),
        real=(ruler("llama31_8b", [64 * K], "leank", "papers/think", "papers/double_sparsity_channels",
                    sets=(LLAMA_MASK,)),),
        needs=RULER, tables=("19",),
        claims=(Contrast("leank", "double_sparsity_channels_0.7"),
                Contrast("think_0.7", "double_sparsity_channels_0.7")),
        note="The authors' calibration keeps the sums of its last block alone and mixes heads; here all blocks count. "
        "That may be why theirs fares so much worse. They are above ThinK in one task of nine, niah_multivalue, by 5 "
        "points; there ThinK is 10 below dense.",
    ),
    Item(
        "leank:table11", "RULER with heads of the highest, lowest and random w_hf made streaming, by task.",
        "Half of the heads, those of the highest w_hf, can go; a quarter of the lowest cannot.",
        here=(here("papers/w_hf"),),
        real=(ruler("llama31_8b", [64 * K], "papers/w_hf"),), needs=RULER, tables=("11",),
        claims=(Contrast("w_hf_highest_0.25", "w_hf_lowest_0.25"), Contrast("w_hf_highest_0.25", "w_hf_random_0.25"),
                Contrast("w_hf_highest_0.5", "dense", bound=NO_LOSS)),
        note="Random heads are one draw (method.w_hf.tokens.seed); the paper has the mean of four, as figure 8 here.",
    ),
    Item(
        "leank:table12", "LeanK without and with the second training stage.", "Without it, 7 points are lost on Qwen.",
        here=(with_masks, stages), real=(STAGE_2,), needs=f"{QWEN} and 8 GPUs", tables=("22",), claims=STAGES,
        note="Without stage 2 the paper cuts alpha channel by channel (pruning.align=1); here in blocks, as with it. "
        "Masks of the KL objective, one training each: 200 steps of stage 1 alone, and 40 of stage 2 after them. "
        "The paper's objective has no effect here either: docs/results/masks.md#stage-2. Stage 1 alone is as good as "
        "dense on this model, so there is nothing left to win. Intervals are over samples, not over trainings.",
    ),
    Item("leank:table13", "RULER by task and length: LeanK and ThinK, the detail of table 3.",
         "LeanK keeps every task, at every length.", here=(main,),
         real=REAL_BY_LENGTH, needs=f"{RULER}; {QWEN}", tables=("13",),
         claims=(Contrast("leank", "dense", bound=NO_LOSS),), note=WHOLE),
    Item("leank:table14", "GSM-Infinite by number of operations, the detail of table 4.",
         "LeanK follows dense at every number of operations.",
         real=REAL_GSM, needs=f"{LLAMA}, {QWEN}", tables=("14",), note="The reference model cannot reason."),
    Item("leank:table15", "LeanK by lambda.", "Any lambda from 0.04 to 0.10 does; 0.06 is best.",
         here=(Command("python -m leank_train -m +experiment=sweep_reference +sweep=lam"),),
         real=(Command("python -m leank_train -m +experiment=llama_70pct +sweep=lam", f"{LLAMA} and 8 GPUs"),),
         needs=f"{LLAMA} and 8 GPUs", tables=("15",)),
    Item("leank:table16", "LeanK trained on other tasks.", "DuoAttention's task does as well as the paper's two.",
         here=(Command("python -m leank_train -m +experiment=sweep_reference +sweep=tasks"),),
         real=(Command("python -m leank_train -m +experiment=qwen_70pct +sweep=tasks", f"{QWEN} and 8 GPUs"),),
         needs=f"{QWEN} and 8 GPUs", tables=("16",)),
    Item("leank:table17", "Static norm, ThinK and LeanK at 70%, by length.",
         "Learned is better than static, static better than dynamic.", here=(static,),
         real=(ruler("llama31_8b", ALL, "leank", "papers/think", "papers/static_norm", sets=(LLAMA_MASK,)),),
         needs=RULER, tables=("17",),
         claims=(Contrast("leank", "static_norm_0.7"), Contrast("static_norm_0.7", "think_0.7")),
         note="100 samples at 4K here, at 64K in the paper. ThinK is above the static norm in one task of nine, "
         "niah_multivalue, by 7 points at 70% and 2 at 60%; the other eight are within a point."),
    Item(
        "leank:table18", "LeanK and SnapKV at equal cache size.", "LeanK is better, most of all at many similar keys.",
        here=(here("leank", "snapkv", sets=("match=leank",)),),
        real=(ruler("llama31_8b", [32 * K], "leank", "snapkv", sets=(LLAMA_MASK, "match=leank")),
              ruler("qwen25_7b", [32 * K], "leank", "snapkv", sets=(QWEN_MASK, "match=leank"))),
        needs=f"{RULER}; {QWEN}", tables=("18",), claims=(Contrast("leank", "snapkv"),),
    ),
    Item("leank:table19", "Double Sparsity's channels by task, the detail of table 10.",
         "They lose every retrieval task.",
         here=(double,), real=(ruler("llama31_8b", [64 * K], "leank", "papers/double_sparsity_channels",
                                     sets=(LLAMA_MASK,)),),
         needs=RULER, tables=("19",), claims=(Contrast("leank", "double_sparsity_channels_0.7"),)),
    Item("leank:table20", "Static norm and ThinK by task, the detail of table 1.",
         "Static norm is at least as good as ThinK.", here=(static,),
         real=(ruler("llama31_8b", [64 * K], "papers/think", "papers/static_norm"),), needs=RULER, tables=("20",),
         claims=(Contrast("static_norm_0.6", "think_0.6", bound=-1),)),
    Item("leank:table21", "LeanK on DuoAttention, Quest and KIVI by task, the detail of tables 5 to 7.",
         "LeanK costs none of them more than half a point.", here=(on_top,),
         real=(ruler("llama31_8b", [64 * K], "duo_attention", "duo_leank", "papers/quest", "papers/quest_leank",
                     sets=(LLAMA_MASK, *DUO)),
               ruler("llama31_8b", [32 * K], "papers/kivi2", "papers/kivi2_leank", sets=(LLAMA_MASK,))),
         needs=RULER, tables=("21",), claims=(Contrast("duo_leank", "duo_attention", bound=NO_LOSS),
                                             Contrast("quest_leank", "quest", bound=NO_LOSS),
                                             Contrast("kivi2_leank", "kivi2", bound=NO_LOSS))),
    Item("leank:table22", "The second stage by task, the detail of table 12.", "It brings 7 points on Qwen.",
         here=(with_masks, stages), real=(STAGE_2,),
         needs=f"{QWEN} and 8 GPUs", tables=("22",), claims=STAGES, note="See table 12."),
    Item("leank:table23", "Budget and choice of channels by task, the detail of table 9.",
         "Budget per head and learned choice both help.", here=(budget,),
         real=(ruler("llama31_8b", [64 * K], "leank", "leank_budget", "papers/think", sets=(LLAMA_MASK,)),),
         needs=RULER, tables=("23",),
         claims=(Contrast("leank_budget", "think_0.7"), Contrast("leank", "leank_budget"))),
)  # fmt: skip
