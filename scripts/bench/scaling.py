"""Samples per second of the real training program on one GPU and on several, and the share of time that a GPU idles.

    python -m scripts.bench.scaling OUT --gpus 1 4 --trace         # Llama-3.1-8B shape, random weights (16 GB)
    python -m scripts.bench.scaling OUT --gpus 1 2 --trainer ddp fsdp --experiment llama_70pct_fast
    python -m scripts.bench.scaling OUT --gpus 1 2 --trace --shape reference --length 1024 --steps 4  # a CPU

Runs `python -m leank_train` one after the other, stage 1 alone: one process as it is, several with each --trainer in
turn, where sequence_parallel shares each document among all of them. --experiment decides the objective. All documents
have one length, or, given two, lengths between them, the same ones in every run. Seconds per step come from the run's
own record, without the first --warm-up. The weights lie in --weights FOLDER, where they are made if it is empty, and
stay there; without it they are made in a temporary folder. --shape reference takes the model in FOLDER, or the shipped
one. Prints and writes OUT/scaling.json, which keeps the runs of earlier calls with the same device, shape, length and
experiment. The output of the runs is in OUT/TRAINER_K.log.

--trace: the run of one process goes on for some more steps, traced. OUT/trace.json.gz has the GPU's kernels and copies
(on a CPU: PyTorch's operators). Idle is the share of these steps in which none runs. The longest gap shows whether a
step ever waited for data, which workers make meanwhile.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import torch
from lightning.pytorch.loggers import Logger
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity, profile

from leank.backbone import load_tokenizer
from leank.data_gen.amount import amount
from leank.files import write_json
from scripts.bench.common import ROOT, clear, device_name, llama8b, wait

EXPERIMENT = {"llama8b": "llama_70pct", "reference": "reference_demo"}
SEVERAL = ("ddp", "sequence_parallel", "fsdp")  # trainers for several GPUs
SETTLE = 5  # steps between the profiler's start-up and the trace: they use up the data made meanwhile (4 per worker)
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
WORK_CPU = ("cpu_op",)
LENGTH = {"llama8b": 16384, "reference": 1024}  # tokens


Record = dict[str, Any]  # figures of one run, or of all of them


class Trace(Logger):
    """Traces training steps into save_dir/trace.json.gz and writes their seconds to save_dir/trace.json.

    It is a logger because Lightning calls one at the end of every step. `traced_training` puts it in the place of the
    run's own logger.
    first: steps before the traced ones. steps: how many are traced.
    """

    name, version = "trace", None

    def __init__(self, save_dir: Path, first: int, steps: int) -> None:
        super().__init__()
        self.out, self.first, self.steps, self.taken = save_dir, first, steps, 0
        self.activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Ignore the settings: a trace has none."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Count a step that ended, and start or stop the trace."""
        self.taken += 1
        if self.taken == self.first - SETTLE:
            warm_up = profile(activities=[self.activity])
            warm_up.start()  # the first takes seconds
            warm_up.stop()
        if self.taken == self.first:
            self.profile = profile(activities=[self.activity])
            wait()
            self.profile.start()
            self.begin = time.perf_counter()
        if self.taken == self.first + self.steps:
            wait()
            seconds = time.perf_counter() - self.begin
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.out / "trace.json.gz"))
            write_json(self.out / "trace.json", {"steps": self.steps, "seconds": seconds})


def traced_training(first: int, steps: int) -> None:
    """`python -m leank_train` with the arguments of this process, traced."""
    from leank_train import train as training
    from leank_train.__main__ import main as command

    def trace(config: object, folder: Path) -> Trace:
        return Trace(folder, first, steps)

    with patch.object(training, "make_logger", trace):
        command()


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of (begin, end) as spans that do not touch, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def idle(trace: Path, seconds: float) -> dict[str, float]:
    """Of a chrome trace over `seconds`: the share of time without work, and the longest gap between work in ms.

    Raises ValueError for a trace without work.
    """
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in WORK]
    work = work or [e for e in events if e.get("ph") == "X" and e.get("cat") in WORK_CPU]
    spans = merged([(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in work])  # microseconds
    if not spans:
        raise ValueError(f"{trace} holds no kernels: is CUPTI there, and has the GPU no other profiler?")
    busy = sum(end - begin for begin, end in spans) / 1e6
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
    return {"seconds": seconds, "busy_seconds": busy, "idle": 1 - busy / seconds, "gap_ms": max(gaps, default=0) / 1e3}


def make_weights(folder: Path) -> None:
    """Save a model of Llama-3.1-8B's shape with random weights and the reference tokenizer, unless it is there."""
    if (folder / "tokenizer.json").exists():  # written last
        return
    model = llama8b("cuda")
    model.save_pretrained(folder, max_shard_size="4GB")  # one shard at a time is copied to the host
    load_tokenizer("reference").save_pretrained(folder)
    del model
    clear()


def train(
    out: Path, trainer: str, gpus: int, log: Path, settings: Sequence[str], trace: tuple[int, int] | None = None
) -> float:
    """Run the program once and return its seconds from start to end.

    out: the run's folder. log: file for its output. settings: overrides of its configuration.
    trace: (steps before the traced ones, traced steps); None traces nothing.
    Raises SystemExit with the end of the log if the run fails.
    """
    program = ["-m", "leank_train"]
    if trace is not None:
        program = ["-c", f"from scripts.bench.scaling import traced_training; traced_training{trace}"]
    line = [sys.executable, *program, *settings, f"hydra.run.dir={out}", f"trainer.devices={gpus}"]
    line += [f"trainer={trainer}"] + [f"trainer.sequence_parallel={gpus}"] * (trainer == "sequence_parallel")
    environment = {"NCCL_DEBUG": "VERSION", **os.environ}  # says in the log that NCCL is used
    begin = time.perf_counter()
    with log.open("w") as file:
        code = status(line, environment, file)
    if code:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{' '.join(line)}\nended with {code}; the end of {log}:\n{last}")
    return time.perf_counter() - begin


def status(line: Sequence[str], environment: Mapping[str, str], file: TextIO) -> int:
    """Run a program and return its exit status; what ends this process ends the program, which would hold its GPUs."""
    with subprocess.Popen(line, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT) as process:
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def speed(out: Path, trainer: str, gpus: int, warm_up: int, steps: int) -> Record:
    """Contexts and (context, answer) pairs per second over `steps` steps after the warm-up, from the run's record."""
    record = torch.load(out / "checkpoints/stage1/done.ckpt", map_location="cpu", weights_only=True)["record"]
    data = OmegaConf.load(out / "config.yaml").data
    times = record["times"][warm_up : warm_up + steps]
    step = sum(times) / len(times)
    contexts = data.documents * (1 if trainer == "sequence_parallel" else gpus) / step
    return {
        "trainer": trainer, "gpus": gpus, "steps": len(times), "step_seconds": step,
        "slowest_step_seconds": max(times), "contexts_per_s": contexts, "pairs_per_s": contexts * data.questions,
        "peak_gb": record["peak_bytes"] / 1e9,
    }  # fmt: skip


def kept(file: Path, result: Record) -> Record:
    """What an earlier call wrote if its device, shape and length are those of `result`, else `result`."""
    before: Record = json.loads(file.read_text()) if file.exists() else {}
    return before if all(before.get(k) == v for k, v in result.items() if k != "runs") else result


def model_name(args: argparse.Namespace, scratch: Path) -> str:
    """What the runs take as model.name; the weights of the 8B shape are made first, if they are not there."""
    if args.shape == "reference":
        return str(args.weights.resolve()) if args.weights else "reference"
    folder = (args.weights or scratch / "weights").resolve()
    begin = time.perf_counter()
    make_weights(folder)
    print(f"weights   {folder}  ({time.perf_counter() - begin:.1f} s)", flush=True)
    return str(folder)


def bench(
    trainer: str, gpus: int, args: argparse.Namespace, settings: Sequence[str], scratch: Path, result: Record
) -> None:
    """Run the program on so many processes and add what it took to `result`."""
    timed = args.warm_up + args.steps
    traced = None if gpus > 1 or not args.trace else (timed + SETTLE, args.trace)
    steps = timed + (SETTLE + args.trace if traced else 0)
    run, log = scratch / f"{trainer}_{gpus}", args.out / f"{trainer}_{gpus}.log"
    spent = train(run, trainer, gpus, log, [*settings, f"stage1.steps={steps}"], traced)
    training = json.loads((run / "metrics.json").read_text())["seconds"]["training"]
    row = speed(run, trainer, gpus, args.warm_up, args.steps)
    row["other_seconds"] = spent - training
    rows = [r for r in result["runs"] if (r["trainer"], r["gpus"]) != (trainer, gpus)] + [row]
    fewest = min(rows, key=lambda r: r["gpus"])
    row["speed_up"] = row["contexts_per_s"] / fewest["contexts_per_s"]
    result["runs"] = rows
    print(row)
    print(*[line for line in log.read_text(errors="replace").splitlines() if "NCCL version" in line][:1])
    if traced:
        (args.out / "trace.json.gz").write_bytes((run / "trace.json.gz").read_bytes())
        found = json.loads((run / "trace.json").read_text())
        try:
            result["trace"] = {"steps": found["steps"], **idle(args.out / "trace.json.gz", found["seconds"])}
            print(f"idle {result['trace']['idle']:.2%} of {found['seconds']:.2f} s, {amount(found['steps'], 'step')}; "
                  f"longest gap {result['trace']['gap_ms']:.1f} ms")  # fmt: skip
        except ValueError as error:  # the runs with more GPUs are still to come
            print(error)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The settings of the command line, checked; `out` is absolute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 4], help="processes of each run")
    parser.add_argument("--shape", choices=list(EXPERIMENT), default="llama8b")
    parser.add_argument("--trainer", choices=SEVERAL, nargs="+", default=["ddp"], help="of the runs on several GPUs")
    parser.add_argument("--experiment", help="of conf/train/experiment; default: that of the shape")
    parser.add_argument("--weights", type=Path, help="folder of the model; llama8b: 16 GB")
    parser.add_argument("--length", type=int, nargs="+", help="tokens; two: the shortest and the longest")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each run")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before those")
    parser.add_argument("--trace", type=int, nargs="?", const=8, default=0, metavar="STEPS", help="steps traced, or 8")
    args = parser.parse_args(argv)
    if args.shape == "llama8b" and not torch.cuda.is_available():
        parser.error("--shape llama8b needs a GPU; --shape reference runs on a CPU")
    if min(args.gpus) < 1 or args.steps < 1 or args.warm_up < 1:
        parser.error("--gpus, --steps and --warm-up need whole numbers from 1 on")
    if args.trace and 1 not in args.gpus:
        parser.error("--trace is of the run of one process: add 1 to --gpus")
    args.length, args.out = args.length or [LENGTH[args.shape]], args.out.resolve()
    args.experiment = args.experiment or EXPERIMENT[args.shape]
    return args


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "scaling.json"
    new: Record = {"device": device_name(), "shape": args.shape, "experiment": args.experiment, "length": args.length}
    result = kept(file, {**new, "runs": []})
    with tempfile.TemporaryDirectory(prefix="bench_scaling_") as folder:
        scratch = Path(folder)
        settings = [
            f"+experiment={args.experiment}", f"model.name='{model_name(args, scratch)}'", "logger=none",
            "validation.samples=0", f"data.min_length={args.length[0]}", f"data.max_length={args.length[-1]}",
            "stage2.steps=0",
        ]  # fmt: skip
        for gpus in args.gpus:
            for trainer in args.trainer if gpus > 1 else ["auto"]:
                bench(trainer, gpus, args, settings, scratch, result)
                write_json(file, result)
                sys.stdout.flush()


if __name__ == "__main__":
    main()
