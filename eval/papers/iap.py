"""IAP: Rethinking KV Cache Pruning with Channel Interdependence. 4 figures, 8 tables."""

from __future__ import annotations

from leank.eval.papers.item import Analysed, Contrast, Expect, Item
from leank.eval.papers.presets import SIZES, gpu, here, longbench, on, sized, where
from leank.eval.papers.think import EQUAL, LLAMA2, LLAMA3, MISTRAL, SMALL

CHANNELS = (*(f"papers/{t}_{m}" for t in ("snapkv", "h2o") for m in ("think", "iap_free", "iap")),)
OF_LLAMA = (*sized((256, 512, 1024, 2048), "snapkv_think"), *sized((1024, 2048), "h2o_think", "h2o_iap"),
            "method.snapkv_think.each.channels.ratio=[0.5,0.6]", "method.h2o_think.each.channels.ratio=[0.5,0.6]",
            "~method.h2o_iap_free")  # fmt: skip
OF_MISTRAL = (
    *sized((256, 512, 1024), "snapkv_think", "h2o_think"), *sized((256,), "snapkv_iap"),
    *(f"method.{m}.each.channels.ratio=[0.5]" for m in ("snapkv_think", "h2o_think", "snapkv_iap", "h2o_iap_free")),
)  # fmt: skip
ON_MISTRAL = ("papers/snapkv_think", "papers/snapkv_iap", "papers/snapkv_iap_wide",
              "papers/h2o_think", "papers/h2o_iap_free", "papers/h2o_iap_wide")  # fmt: skip
PROTECT = ("method.snapkv_iap.channels.salient_min=0.05", "method.snapkv_iap.channels.salient_max=0.1")
grid = here(
    *CHANNELS,
    sets=(*sized(SIZES, *(name.removeprefix("papers/") for name in CHANNELS)),
          "method.snapkv_think.each.channels.ratio=[0.5,0.6]", "method.h2o_think.each.channels.ratio=[0.5,0.6]"),
)  # fmt: skip
protected = here("papers/snapkv_iap", "papers/snapkv_iap_free", sets=sized(SIZES, "snapkv_iap", "snapkv_iap_free"))
kivi = here("papers/kivi4", "papers/kivi4_iap")


def against_think(tokens: str, ratio: float, equal: bool = False) -> tuple[Contrast, ...]:
    """Compare IAP with ThinK at each KV size."""
    names = [(f"{tokens}_iap_free_{n}_{ratio:g}", f"{tokens}_think_{n}_{ratio:g}") for n in SIZES]
    return tuple(Contrast(*both, bound=EQUAL if equal else 0.0, equal=equal) for both in names)


PROMPTS = "Prompts of RULER's niah_single_2, a needle in natural text, instead of Qasper's and NarrativeQA's."
SHORT = {"samples": 1, "length": 1024}
INTERACTION = Analysed("interaction", quick=SHORT)
PAIRED, SAMPLE = ("layer", "sample", "ratio"), ("sample",)  # rows of ThinK and of IAP with the same prompt
SHALLOW, DEEP = range(3), range(3, 99)  # layers of the reference model, which has 7
INTERACT = (
    Expect("share of the largest terms that lie off the diagonal", where(measure="extreme"), bound=0.1,
           units="layers"),
    Expect("share of the largest terms off the diagonal, first three of 7 layers over the others",
           where(measure="extreme", layer=SHALLOW),
           where(measure="extreme", layer=DEEP), units="layers"),
)  # fmt: skip

ITEMS = (
    Item("iap:fig1", "How much each pair of channels adds to the error together, in layers of growing depth.",
         "Channels interact: many terms off the diagonal are large, fewer so in deep layers.",
         here=(INTERACTION,), real=(on("llama3_8b", "interaction"),), needs=LLAMA3, claims=INTERACT, note=PROMPTS),
    Item("iap:fig2", "Mean and standard deviation of the queries' channels in the observation window.",
         "Queries vary more than their mean says, so a window cannot stand for all queries.",
         here=(Analysed("query_spread", quick={"length": 1024}),), real=(on("llama3_8b", "query_spread"),),
         needs=LLAMA3, claims=(Expect("share of channels that vary by more than their mean",
                                      where(measure="unsteady"), bound=0.5, units="layers"),)),
    Item("iap:fig3", "By how much IAP's error of the logits is below ThinK's, by layer.",
         "IAP's error is smaller, most of all in shallow layers.",
         here=(Analysed("layer_error", {"samples": 50}, quick={"samples": 10, "length": 1024}),),
         real=(on("llama3_8b", "layer_error", samples=20), on("mistral_7b", "layer_error", samples=20)),
         needs=f"{LLAMA3}, {MISTRAL}",
         claims=(Expect("relative error of the logits in the first three of 7 layers, ThinK over IAP",
                        where(measure="logits", method="ThinK", layer=SHALLOW),
                        where(measure="logits", method="IAP", layer=SHALLOW), by=PAIRED, over=SAMPLE),
                 Expect("relative error of attention outputs, ThinK over IAP",
                        where(measure="outputs", method="ThinK"), where(measure="outputs", method="IAP"), by=PAIRED,
                        over=SAMPLE)),
         note="The paper shows logits alone. Scores come from attention outputs, whose error hardly differs here "
         "(docs/analyses.md); that fits the equal scores of IAP and ThinK."),
    Item("iap:fig4", "More interaction maps, of two models.", "The same holds on both models.",
         here=(INTERACTION,), real=(on("llama3_8b", "interaction"),
                                                on("mistral_7b", "interaction")),
         needs=f"{LLAMA3}, {MISTRAL}", claims=INTERACT, note=PROMPTS),
    Item(
        "iap:table1", "LongBench on LLaMA-3: IAP and ThinK at 50 and 60% on SnapKV and H2O, by KV size.",
        "IAP is better in most settings.", here=(grid,),
        real=(longbench("llama3_8b", "iap", *CHANNELS, sets=OF_LLAMA),), needs=f"{LLAMA3}, LongBench", tables=("1",),
        claims=(*against_think("snapkv", 0.5), *against_think("snapkv", 0.6), *against_think("h2o", 0.6)),
        note="[a, b] is [0, 0] where the paper has it so, below a KV size of 1024. " + SMALL,
    ),
    Item(
        "iap:table2", "LongBench on Mistral: IAP and ThinK at 50% on SnapKV and H2O, by KV size.",
        "IAP is better on SnapKV, equal on H2O.", here=(grid,),
        real=(longbench("mistral_7b", "iap", *ON_MISTRAL, sets=OF_MISTRAL),), needs=f"{MISTRAL}, LongBench",
        tables=("2",), claims=(*against_think("snapkv", 0.5), *against_think("h2o", 0.5, equal=True)), note=SMALL,
    ),
    Item(
        "iap:table3", "KIVI at 4 bits, alone and with IAP at 40 and 50%.", "IAP on KIVI costs half a point, then one.",
        here=(kivi,), real=(longbench("llama2_7b", "iap", "papers/kivi4", "papers/kivi4_iap"),),
        needs=f"{LLAMA2}, LongBench",
        claims=(Contrast("kivi4_iap_0.4", "kivi4", bound=EQUAL), Contrast("kivi4_iap_0.5", "kivi4", bound=EQUAL)),
    ),
    Item(
        "iap:table4", "How many recent tokens stay whole with IAP: 32 or 64.", "It makes no difference.",
        here=(here("papers/snapkv_iap_recent", sets=sized([256], "snapkv_iap_recent_32", "snapkv_iap_recent_64")),),
        real=(longbench("llama3_8b", "iap", "papers/snapkv_iap_recent"),), needs=f"{LLAMA3}, LongBench",
        claims=(Contrast("snapkv_iap_recent_32_256", "snapkv_iap_recent_64_256", bound=EQUAL, equal=True),),
        note="Recent tokens count to the KV size of 256, so with 64 fewer others are chosen.",
    ),
    Item(
        "iap:table5", "IAP with [a, b] of [0, 0] and [3, 7]: how many channels of a large norm are protected.",
        "Protecting them helps at a KV size of 1024 and more.",
        here=(protected,),
        real=(longbench("llama3_8b", "iap", "papers/snapkv_iap", "papers/snapkv_iap_free",
                        sets=sized((512, 1024, 2048), "snapkv_iap", "snapkv_iap_free")),),
        needs=f"{LLAMA3}, LongBench", claims=(Contrast("snapkv_iap_512_0.6", "snapkv_iap_free_512_0.6"),), note=SMALL,
    ),
    Item("iap:table6", "Memory, time to the first token and per token: KIVI at 4 bits, alone and with IAP.",
         "Memory falls by 16 and 17%; the first token comes later.", here=(kivi,),
         real=(gpu("python -m scripts.bench.methods OUT --lengths 4097 --new 128 --window 128 --batches 1 15 "
                   "--methods dense papers/kivi4 papers/kivi4_iap"),), needs="a GPU",
         claims=(Contrast("kivi4_iap_0.5", "kivi4", "bytes", 1), Contrast("kivi4_iap_0.6", "kivi4", "bytes", 1)),
         note="Bytes are those of the method; seconds are of the machine that runs this, on the shape "
         "of Llama-3.1-8B, not of LLaMA-2."),
    Item("iap:table7", "Which [a, b] the paper chose on LLaMA-3, by KV size.", "None below 1024, [3, 7] from there on.",
         here=(protected,),
         real=(longbench("llama3_8b", "iap", "papers/snapkv_iap", "papers/snapkv_iap_free", "papers/h2o_iap",
                         "papers/h2o_iap_free"),),
         needs=f"{LLAMA3}, LongBench", claims=(Contrast("snapkv_iap_free_128_0.5", "snapkv_iap_128_0.5"),),
         note="conf/method/papers.yaml has both forms: snapkv_iap and snapkv_iap_free."),
    Item("iap:table8", "Which [a, b] the paper chose on Mistral, by KV size.", "[3, 7] or [5, 10] on SnapKV.",
         here=(here("papers/snapkv_iap", "papers/snapkv_iap_free",
                    sets=(*sized(SIZES, "snapkv_iap", "snapkv_iap_free"), *PROTECT)),),
         real=(longbench("mistral_7b", "iap", "papers/snapkv_iap", "papers/snapkv_iap_wide", "papers/h2o_iap_free",
                         "papers/h2o_iap_wide", sets=sized((256,), "snapkv_iap")),),
         needs=f"{MISTRAL}, LongBench", claims=(Contrast("snapkv_iap_512_0.5", "snapkv_iap_free_512_0.5"),),
         note="[5, 10] here, as in papers/snapkv_iap_wide."),
)  # fmt: skip
