"""Evaluate methods on a benchmark, compute the report of a run again, or compare two of its methods by sample.

python -m eval +experiment=reference_ruler mask=outputs/reference_70pct_seed1/mask.safetensors
python -m eval report outputs/eval/reference_ruler
python -m eval report outputs/eval/reference_ruler think snapkv
python -m eval diff outputs/eval/reference_ruler dense leank
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from leank.cli import again, ending, launch, leave_no_trace, refuse
from leank.data_gen.amount import amount

log = logging.getLogger("eval")


def run(config: dict[str, Any], directory: Path) -> int:
    """Check everything, replay what is missing in `directory`, and write the report.

    config: the resolved configuration.
    directory: of the run; it may hold rows already.
    Returns the number of new rows.
    """
    from leank.eval.inference.models import load_model
    from leank.eval.report import write_report
    from leank.eval.rows.result_row import check_rows
    from leank.eval.rows.results import Results, read
    from leank.eval.run.build import build_job
    from leank.typed import typed
    from leank.wandb_log import LoggerConfig, make_logger

    logging_to = typed(LoggerConfig, {} if config.get("logger") is None else config["logger"], "logger.")
    job, tokenizer = build_job(config)
    shard, shards = job.settings.numbered_shard
    with Results(directory, f"-{shard}-of-{shards}" if shards > 1 else "") as results:
        check_rows(read(directory))  # now, not in hours: the report is computed from the old rows, too
        work = job.missing(results.keys)
        log.info("%s there, %s to do, in %s", amount(len(results.keys), "row"), amount(len(work), "batch"), directory)
        if others := job.others(results.keys):
            log.info(
                "%s of other settings, data or weights among them; such rows stay in tables of their own, and this run "
                "uses none of them", amount(others, "row"),
            )  # fmt: skip
        new = 0
        if work:
            new = job.run(results, load_model(job.model), tokenizer)
    write_report(directory)
    log.info("%s; report: %s", amount(new, "new row"), directory / "report.html")
    # one shard logs nothing: the same command without shard= logs all of them
    if shards == 1 and (logger := make_logger(logging_to, directory, job_type="eval")) is not None:
        from leank.eval.report.wandb_log import log_report

        log_report(logger, config, job.methods, directory)
    return new


def refuse_repeated(overrides: Sequence[str]) -> None:
    """Raise ValueError where method=[...] on the command line names a method twice; Hydra would merge the two.

    overrides: as they were typed; reference/h2o and h2o have the same label.
    """
    for override in overrides:
        key, _, chosen = override.partition("=")
        if key == "method" and chosen.startswith("["):
            labels = [name.strip().rpartition("/")[2] for name in chosen.strip("[]").split(",")]
            for label in labels:
                if labels.count(label) > 1:
                    raise ValueError(f"{override}: {label} is there twice; leave one out, or give it another label")


@hydra.main(version_base="1.3", config_path="pkg://leank.conf.eval", config_name="eval")
def main(config: DictConfig) -> None:
    """Run what the command line says; see the module's docstring."""
    directory, alone = Path(HydraConfig.get().runtime.output_dir), HydraConfig.get().mode == RunMode.RUN

    def kept() -> str:
        """Say what is saved, and how to go on; Hydra's own files alone are not worth keeping."""
        from leank.eval.rows.results import GLOB

        if alone:
            leave_no_trace(directory)
        what = f"the rows in {directory} are kept" if any(directory.glob(GLOB)) else "there are no rows yet"
        return f"{what}; to go on: {again('eval')}"

    with ending("eval", kept):
        plain = OmegaConf.to_container(config, resolve=True)
        refuse_repeated(HydraConfig.get().overrides.task)
        run(plain, directory)  # type: ignore[arg-type]


def report(directory: str, *methods: str) -> None:
    """Compute the report of a run again, from its rows.

    It compares each METHOD with every other by sample; without any, the learned masks if they are few.
    """
    from leank.eval.report import write_report

    write_report(Path(directory), methods)
    print(f"report: {Path(directory) / 'report.html'}")


def diff(directory: str, first: str, second: str) -> None:
    """Compare two methods of a run, sample by sample."""
    from leank.eval.report import write_diff

    if first == second:
        raise ValueError(f"{first} and {second} are the same method; give two of a run")
    path, text = write_diff(Path(directory), first, second)
    print(f"{text}\n\nevery sample: {path}")


COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "report": (report, "DIR [METHOD ...]"), "diff": (diff, "DIR METHOD METHOD"),
}  # fmt: skip


def from_rows(name: str, given: Sequence[str]) -> None:
    """Run one of COMMANDS, or print how it is used. Raises ValueError for arguments that it does not take."""
    command, arguments = COMMANDS[name]
    usage = f"usage: python -m eval {name} {arguments}"
    if {"-h", "--help"} & {*given}:
        print(f"{usage}\n\n{inspect.getdoc(command)}")
        return
    needed = arguments.partition(" [")[0].split()
    if len(given) < len(needed) or (len(given) > len(needed) and "[" not in arguments):
        raise ValueError(usage)
    command(*given)


def command_line() -> None:
    """Run one of COMMANDS if the first argument names it, else let Hydra compose the configuration."""
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        with ending("eval", lambda: f"the rows are as they were; again: {again('eval')}"):
            from_rows(sys.argv[1], sys.argv[2:])
        return
    refuse(sys.argv[1:], "eval")
    usage = ", ".join(f"python -m eval {name} {arguments}" for name, (_, arguments) in COMMANDS.items())
    with ending("eval"):
        launch(main, "eval", f"; beside settings there are {usage}, and --help")


if __name__ == "__main__":
    command_line()
