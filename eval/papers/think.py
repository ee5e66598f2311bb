"""ThinK: Thinner Key Cache by Query-Driven Pruning. 7 figures, 12 tables."""

from __future__ import annotations

from leank.eval.papers.item import Analysed, Contrast, Expect, Item
from leank.eval.papers.presets import SIZES, gpu, here, longbench, on, real, sized, where

LLAMA3, MISTRAL, LLAMA2 = "LLaMA-3-8B-Instruct", "Mistral-7B-Instruct-v0.2", "LLaMA-2-7B-chat"
EQUAL = -2.0  # points that a method may lose and still count as equal
SMALL = "KV sizes of 128, 256 and 512 here, for prompts of 1K to 4K; the paper has up to 2048."


def pairs(first: str, second: str, ratio: float, bound: float) -> tuple[Contrast, ...]:
    """Compare two methods at each KV size; `first` has a ratio, too."""
    return tuple(Contrast(f"{first}_{size}_{ratio:g}", f"{second}_{size}", bound=bound) for size in SIZES)


norms = here(
    "papers/snapkv", "papers/snapkv_think", "papers/snapkv_l1", "papers/snapkv_l2", "papers/h2o", "papers/h2o_think",
    "papers/h2o_l1", "papers/h2o_l2",
    sets=(*sized([256], "snapkv", "snapkv_think", "snapkv_l1", "snapkv_l2", "h2o", "h2o_think", "h2o_l1", "h2o_l2"),
          *(f"method.{t}_{m}.each.channels.ratio=[0.3,0.4,0.6]" for t in ("snapkv", "h2o")
            for m in ("think", "l1", "l2"))),
)  # fmt: skip
grid = here(
    "papers/snapkv", "papers/snapkv_think", "papers/h2o", "papers/h2o_think",
    sets=sized(SIZES, "snapkv", "snapkv_think", "h2o", "h2o_think"),
)  # fmt: skip
GRID = ("papers/h2o", "papers/h2o_think", "papers/snapkv", "papers/snapkv_think")
equal_bytes = here(
    "papers/snapkv", "papers/snapkv_think", "papers/h2o", "papers/h2o_think",
    sets=(*sized([256], "snapkv_think", "h2o_think"), "method.snapkv.each.tokens.budget=[212]",
          "method.h2o.each.tokens.budget=[212]", "method.snapkv_think.each.channels.ratio=[0.4]",
          "method.h2o_think.each.channels.ratio=[0.4]"),
)  # fmt: skip
REAL_EQUAL_BYTES = longbench(
    "mistral_7b", "think", *GRID,
    sets=(*sized((109, 416, 826, 1645), "snapkv", "h2o"),
          *(f"method.{one}_think.each.channels.ratio=[0.4]" for one in ("snapkv", "h2o"))),
)  # fmt: skip
values = here(
    "papers/snapkv", "papers/snapkv_thinkv", "papers/h2o", "papers/h2o_thinkv",
    sets=sized(SIZES, "snapkv", "snapkv_thinkv", "h2o", "h2o_thinkv"),
)  # fmt: skip
NIAH_SETS = ("benchmark.longest=8000", *sized((128, 512, 1024, 2048), "snapkv", "snapkv_think"))
kivi4 = here("papers/kivi4", "papers/kivi4_think")
SPEED = gpu(
    "python -m scripts.bench.methods OUT --lengths 160 --new 338 --window 128 --batches 1 64 300 largest "
    "--methods dense papers/kivi4 papers/kivi4_think"
)

ITEMS = (
    Item("think:fig1", "The pruning of one head's key cache, as a drawing.", note="docs/architecture.md describes it."),
    Item("think:fig2", "What is stored while decoding, as a drawing.",
         note="Generated keys are pruned here when they leave the window; the paper keeps them whole."),
    Item(
        "think:fig3", "(a) ThinK on H2O and SnapKV at equal memory. (b) Memory of KIVI and KIVI + ThinK by batch size.",
        "Channels and tokens together keep more accuracy per byte than tokens alone, and KIVI gets smaller by a fifth.",
        here=(equal_bytes, kivi4),
        real=(REAL_EQUAL_BYTES, SPEED), needs=f"{MISTRAL}, LongBench; a GPU for (b)",
        claims=(Contrast("snapkv_think_256_0.4", "snapkv_212"), Contrast("h2o_think_256_0.4", "h2o_212"),
                Contrast("kivi4_think_0.4", "kivi4", "bytes", 0.95)),
        note="At 40%, 256 tokens of SnapKV + ThinK take the bytes of 212 of SnapKV: 80% of those beyond the window. "
        "Sizes of (b) are of one row; batches add up. Table 4 has 2 bits.",
    ),
    Item("think:fig4", "Magnitude of keys and values by token and channel in two heads.",
         "Keys have a few strong channels, values have none.", here=(Analysed("magnitudes", quick={"length": 1024}),),
         real=(on("llama2_7b", "magnitudes"),), needs=LLAMA2,
         claims=(Expect("spread of the channels' sizes, K over V", where(measure="spread", part="K"),
                        where(measure="spread", part="V"), by=("layer", "head"), units="heads"),),
         note="All heads of the reference model, on one prompt."),
    Item("think:fig5", "Energy of the singular values of attention, alone and added up.",
         "Attention has low rank: 50 values hold 90% of the energy.", here=(Analysed("singular_energy"),),
         real=(on("llama2_7b", "singular_energy"),), needs=LLAMA2,
         claims=(Expect("energy of the first 50 singular values",
                        where(measure="cumulative", number=50, layer=range(99)), bound=0.9, units="layers"),),
         note="Uniform causal attention, in the figure, has more energy in its first values than this model's."),
    Item("think:fig6", "Needle in a haystack by length and depth: SnapKV and SnapKV + ThinK.",
         "ThinK finds the needles that SnapKV finds.",
         real=(real("mistral_7b", "niah", "papers/snapkv", "papers/snapkv_think", sets=("benchmark.longest=32000",)),),
         needs=MISTRAL, tables=("5",),
         note="The reference model was not trained on such needles; think:table5 has RULER's."),
    Item("think:fig7", "Pruning together with KIVI, as a drawing.",
         note="eval/methods/bits/kivi.py and eval/cache/storage/quantised.py: channels first, then bits."),
    Item(
        "think:table1", "Channels pruned by the l1 or the l2 norm of K, on top of H2O and SnapKV.",
        "30% is free, 40% costs; a criterion that looks at the queries is better.", here=(norms,),
        real=(longbench("llama3_8b", "think", "papers/snapkv", "papers/snapkv_think", "papers/snapkv_l1",
                        "papers/snapkv_l2", "papers/h2o", "papers/h2o_think", "papers/h2o_l1", "papers/h2o_l2",
                        sets=sized([512], "snapkv", "snapkv_think", "h2o", "h2o_think")),),
        needs=f"{LLAMA3}, LongBench",
        claims=(Contrast("snapkv_l2_256_0.3", "snapkv_256", bound=EQUAL),
                *(Contrast(f"{t}_think_256_{r}", f"{t}_{n}_256_{r}") for t in ("snapkv", "h2o") for r in (0.4, 0.6)
                  for n in ("l1", "l2"))),
        note="KV size 256 here, 512 in the paper; 60% as well, where the criteria part.",
    ),
    Item(
        "think:table2", "LongBench on LLaMA-3: H2O and SnapKV, alone and with ThinK at 40 to 60%, by KV size.",
        "ThinK costs nothing at 40%, little at 60%, whatever the KV size.", here=(grid,),
        real=(longbench("llama3_8b", "think", *GRID), longbench("llama3_70b", "think", *GRID)),
        needs=f"{LLAMA3}, LLaMA-3-70B-Instruct, LongBench", tables=("2",),
        claims=(*pairs("snapkv_think", "snapkv", 0.4, EQUAL), *pairs("h2o_think", "h2o", 0.4, EQUAL)), note=SMALL,
    ),
    Item(
        "think:table3", "LongBench on Mistral: the same grid as table 2.", "The same holds on another model.",
        here=(grid,), real=(longbench("mistral_7b", "think", *GRID),), needs=f"{MISTRAL}, LongBench", tables=("3",),
        claims=(*pairs("snapkv_think", "snapkv", 0.5, EQUAL), *pairs("h2o_think", "h2o", 0.5, EQUAL)), note=SMALL,
    ),
    Item(
        "think:table4", "KIVI at 2 bits, alone and with ThinK at 40%.", "ThinK on KIVI costs next to nothing.",
        here=(here("papers/kivi2", "papers/kivi2_think"),),
        real=(longbench("llama2_7b", "think", "papers/kivi2", "papers/kivi2_think"),), needs=f"{LLAMA2}, LongBench",
        claims=(Contrast("kivi2_think_0.4", "kivi2", bound=EQUAL), Contrast("kivi2_think_0.4", "kivi2", "bytes", 1)),
    ),
    Item(
        "think:table5", "Needle in a haystack, mean over the grid: SnapKV and SnapKV + ThinK by KV size.",
        "ThinK at 40% finds as many needles as SnapKV.",
        here=(grid,),
        real=(real("llama3_8b", "niah", "papers/snapkv", "papers/snapkv_think", sets=NIAH_SETS),
              real("mistral_7b", "niah", "papers/snapkv", "papers/snapkv_think",
                   sets=("benchmark.longest=32000", *NIAH_SETS[1:]))),
        needs=f"{LLAMA3}, {MISTRAL}", tables=("5",), claims=pairs("snapkv_think", "snapkv", 0.4, EQUAL),
        note="RULER's needles here, as the reference model was trained on those. " + SMALL,
    ),
    Item(
        "think:table6", "How many recent tokens stay whole: 0, 32, 128.", "0 costs two points; 32 is enough.",
        here=(here("papers/snapkv_think_recent", "papers/h2o_think_recent",
                   sets=(*sized([256], "snapkv_think_recent", "h2o_think_recent"),)),),
        real=(longbench("mistral_7b", "think", "papers/snapkv_think_recent", "papers/h2o_think_recent"),),
        needs=f"{MISTRAL}, LongBench",
        claims=(Contrast("snapkv_think_recent_256_32", "snapkv_think_recent_256_0"),
                Contrast("snapkv_think_recent_256_32", "snapkv_think_recent_256_128", bound=EQUAL)),
        note="New tokens leave the window `flush` at a time, so with 0 up to 31 tokens of the reply are whole. "
        "Recent tokens count to the KV size of 256: the more of them stay, the fewer others are chosen. The "
        "authors' code keeps the same tokens whatever the recent size, which says how many of them are pruned. With 0, "
        "SnapKV keeps its 32 observed tokens here, too; H2O protects none.",
    ),
    Item(
        "think:table7", "ThinK on H2O and SnapKV at equal memory.", "At equal bytes, tokens and channels beat tokens.",
        here=(equal_bytes,),
        real=(REAL_EQUAL_BYTES,),
        needs=f"{MISTRAL}, LongBench",
        claims=(Contrast("snapkv_think_256_0.4", "snapkv_212"), Contrast("h2o_think_256_0.4", "h2o_212")),
        note="See figure 3. The paper's budgets are 109, 416, 826 and 1645 tokens, for 128 to 2048 with ThinK at 40%.",
    ),
    Item(
        "think:table8", "K and V both pruned (ThinKV), on H2O and SnapKV.", "30% of both is acceptable; V is harder.",
        here=(values,),
        real=(longbench("llama3_8b", "think", "papers/h2o", "papers/h2o_thinkv", "papers/snapkv",
                        "papers/snapkv_thinkv"),
              longbench("llama3_8b", "think", "papers/h2o_thinkv", "papers/snapkv_thinkv", sets=(
                  *sized([2048], "h2o_thinkv", "snapkv_thinkv"), *(f"method.{label}_thinkv.each.channels.{share}=[0.4]"
                  for label in ("h2o", "snapkv") for share in ("ratio", "values")))),
              longbench("mistral_7b", "think", "papers/h2o", "papers/h2o_thinkv", "papers/snapkv",
                        "papers/snapkv_thinkv")),
        needs=f"{LLAMA3}, {MISTRAL}, LongBench", tables=("8",),
        claims=(*(Contrast(f"snapkv_thinkv_{n}_0.3_0.3", f"snapkv_{n}", bound=EQUAL) for n in SIZES),
                Contrast("snapkv_thinkv_256_0.3_0.1", "snapkv_thinkv_256_0.3_0.3")), note=SMALL,
    ),
    Item(
        "think:table9", "ThinK alone, on the whole cache.", "40% costs nothing, 60% little.",
        here=(here("papers/think_alone"),),
        real=tuple(longbench(model, "think", "papers/think_alone") for model in ("llama3_8b", "mistral_7b")),
        needs=f"{LLAMA3}, {MISTRAL}, LongBench", tables=("9",),
        claims=tuple(Contrast(f"think_alone_{r}", "dense", bound=EQUAL) for r in (0.4, 0.5, 0.6)),
    ),
    Item(
        "think:table10", "Memory, time to the first token and per token: KIVI at 4 bits, alone and with ThinK.",
        "Memory falls by 14 to 17%, tokens come a little faster, the first one a little later.",
        here=(kivi4,), real=(SPEED,), needs="a GPU",
        claims=(Contrast("kivi4_think_0.4", "kivi4", "bytes", 1), Contrast("kivi4_think_0.5", "kivi4", "bytes", 1),
                Contrast("kivi4_think_0.5", "kivi4", "per_token", 1)),
        note="Bytes are those of the method; seconds are of the machine that runs this, at small batches. The "
        "benchmark has 300 rows, on the shape of Llama-3.1-8B, not of LLaMA-2.",
    ),
    Item("think:table11", "Throughput: KIVI at 4 bits, alone and with ThinK.", "ThinK makes KIVI 7 to 10% faster.",
         here=(kivi4,), real=(SPEED,), needs="a GPU", claims=(Contrast("kivi4_think_0.5", "kivi4", "per_token", 1),),
         note="See table 10."),
    Item("think:table12", "Palu and ASVD, which decompose the projections, against ThinK.",
         "ThinK is better, without calibration.",
         here=(), real=(longbench("mistral_7b", "think", "papers/think_alone"),
                        longbench("llama2_7b", "think", "papers/think_alone")),
         needs=f"{MISTRAL}, {LLAMA2}, LongBench", tables=("12",),
         note="ThinK's rows alone: Palu and ASVD change the model's projections, which no axis here describes."),
)  # fmt: skip
