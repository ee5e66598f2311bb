"""Short names for the runs that the papers' items share: on the reference model, and with real weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leank.eval.papers.item import Analysed, Command, EvalRun, Measurement, Need

# --quick: the two hardest tasks at 1K, and as few samples as a verdict takes
QUICK = (
    "benchmark.samples=5", "benchmark.lengths=[1024]", "batch_size=5",
    "benchmark.tasks=[niah_multikey_3,niah_multivalue]",
)  # fmt: skip
MASKS = "leank_train/assets/masks/published/"  # LeanK's published masks, from the repository's root
LLAMA_MASK, QWEN_MASK = f"mask={MASKS}llama3.1-8b-instruct.pth", f"mask={MASKS}qwen2.5-7b-instruct.pth"
SIZES = (128, 256, 512)  # KV sizes for prompts of 1K to 4K
GPU = "a GPU"
# the reference model that was trained on long replies, too; the shipped one was not
MIXED = Need("the model reference_mixed", "assets/reference_mixed")


def methods(names: Sequence[str]) -> str:
    """Choose dense and these methods of conf/method."""
    return f"method=[{','.join(['dense', *names])}]"


def here(*names: str, sets: Sequence[str] = (), quick: Sequence[str] = QUICK) -> EvalRun:
    """Replay RULER's retrieval tasks on the reference model.

    names: of conf/method.
    sets: overrides after these.
    quick: what `--quick` adds.
    """
    return EvalRun(("+experiment=papers/here", methods(names), *sets), tuple(quick))


def sized(sizes: Sequence[int], *labels: str) -> tuple[str, ...]:
    """Set the KV sizes of methods that list them under `each`."""
    return tuple(f"method.{label}.each.tokens.budget=[{','.join(map(str, sizes))}]" for label in labels)


def real(model: str, benchmark: str, *names: str, sets: Sequence[str] = ()) -> EvalRun:
    """Replay a benchmark on a model of conf/shared/model."""
    return EvalRun((f"model={model}", f"benchmark={benchmark}", methods(names), *sets))


def ruler(model: str, lengths: Sequence[int], *names: str, sets: Sequence[str] = ()) -> EvalRun:
    """Replay RULER at these lengths, prompts in pieces that fit a GPU."""
    length = f"benchmark.lengths=[{','.join(map(str, lengths))}]"
    return real(model, "ruler", *names, sets=(length, "prefill_chunk=8192", *sets))


def longbench(model: str, preset: str, *names: str, sets: Sequence[str] = ()) -> EvalRun:
    """Replay LongBench with a paper's tasks."""
    return real(model, "longbench", *names, sets=(f"benchmark.preset={preset}", *sets))


def on(model: str, name: str, **settings: object) -> Analysed:
    """Run an analysis with these settings on a model of conf/shared/model."""
    return Analysed(name, settings, overrides=(f"model={model}",))


def where(**wanted: object) -> Callable[[Measurement], bool]:
    """Whether a row of an analysis has these values; a range or a tuple accepts any of its own."""

    def counts(row: Measurement) -> bool:
        return all(
            row.get(name) in value if isinstance(value, range | tuple) else row.get(name) == value
            for name, value in wanted.items()
        )

    return counts


def gpu(line: str) -> Command:
    """Name a benchmark that needs a GPU."""
    return Command(line, GPU)
