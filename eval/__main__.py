"""Evaluate methods on a benchmark, compute the report of a run again, or compare two of its methods by sample.

python -m leank.eval +experiment=reference_ruler mask=outputs/reference_70pct_seed1/mask.safetensors
python -m leank.eval report outputs/eval/reference_ruler
python -m leank.eval report outputs/eval/reference_ruler think snapkv
python -m leank.eval diff outputs/eval/reference_ruler dense leank
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leank.cli import again, ending, leave_no_trace
from leank.data_gen.amount import amount
from leank.extras import require

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger("eval")


def run(config: dict[str, Any], directory: Path) -> int:
    """Check everything, replay what is missing in `directory`, and write the report; returns the new rows' number."""
    from leank.eval.inference.models import load_model
    from leank.eval.report import write_report
    from leank.eval.rows import GLOB, Results, check_rows, read
    from leank.eval.run import devices
    from leank.eval.run.build import build_job
    from leank.typed import typed
    from leank.wandb_log import LoggerConfig, make_logger

    logging_to = typed(LoggerConfig, {} if config.get("logger") is None else config["logger"], "logger.")
    job, tokenizer = build_job(config)
    shard, shards = job.settings.numbered_shard
    if any(directory.glob(GLOB)):
        check_rows(read(directory))  # now, not in hours: the report is computed from the old rows, too
    if job.settings.devices > 1:
        new = devices.replay(job, tokenizer, directory)
    else:
        with Results(directory, f"-{shard}-of-{shards}" if shards > 1 else "") as results:
            work, there = job.missing(results.keys), amount(len(results.keys), "row")
            log.info("%s there, %s to do, in %s", there, amount(len(work), "batch"), directory)
            new = job.run(results, load_model(job.model), tokenizer) if work else 0
    write_report(directory)
    log.info("%s; report: %s", amount(new, "new row"), directory / "report.html")
    # one shard logs nothing: the same command without shard= logs all of them
    if shards == 1 and (logger := make_logger(logging_to, directory, job_type="eval")) is not None:
        from leank.eval.report.wandb_log import log_report

        log_report(logger, config, job.methods, directory)
    return new


def refuse_repeated(overrides: Sequence[str]) -> None:
    """Raise ValueError where method=[...] names a label twice, as reference/h2o and h2o do; Hydra would merge them."""
    for override in overrides:
        key, _, chosen = override.partition("=")
        if key == "method" and chosen.startswith("["):
            labels = [name.strip().rpartition("/")[2] for name in chosen.strip("[]").split(",")]
            for label in labels:
                if labels.count(label) > 1:
                    raise ValueError(f"{override}: {label} is there twice; leave one out, or give it another label")


def main(config: DictConfig) -> None:
    """Run what Hydra has composed; see the module's docstring."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    directory, alone = Path(HydraConfig.get().runtime.output_dir), HydraConfig.get().mode == RunMode.RUN

    def kept() -> str:
        """Say what is saved, and how to go on; Hydra's own files alone are not worth keeping."""
        from leank.eval.rows import GLOB

        if alone:
            leave_no_trace(directory)
        what = f"the rows in {directory} are kept" if any(directory.glob(GLOB)) else "there are no rows yet"
        return f"{what}; to go on: {again('leank.eval')}"

    with ending("eval", kept):
        plain = OmegaConf.to_container(config, resolve=True)
        refuse_repeated(HydraConfig.get().overrides.task)
        run(plain, directory)  # type: ignore[arg-type]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the commands that compute from rows alone."""
    made = argparse.ArgumentParser(prog="python -m leank.eval")
    commands = made.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="compute the report of a run again, from its rows")
    diff = commands.add_parser("diff", help="compare two methods of a run, sample by sample")
    for one in (report, diff):
        one.add_argument("directory", type=Path, metavar="DIR", help="of the run")
    report.add_argument(
        "methods", nargs="*", metavar="METHOD",
        help="compared with every other by sample; without any, the learned masks are if they are few",
    )  # fmt: skip
    diff.add_argument("methods", nargs=2, metavar="METHOD")
    return made


def from_rows(given: argparse.Namespace) -> None:
    """Run a command that computes from rows alone."""
    from leank.eval.report import write_diff, write_report

    if given.command == "report":
        write_report(given.directory, given.methods)
        print(f"report: {given.directory / 'report.html'}")
    else:
        path, text = write_diff(given.directory, *given.methods)
        print(f"{text}\n\nevery sample: {path}")


def command_line() -> None:
    """Compute from rows if the first argument says so, else let Hydra compose the configuration."""
    if sys.argv[1:2] in (["report"], ["diff"]):
        given = parser().parse_args()
        with ending("eval", lambda: f"the rows are as they were; again: {again('leank.eval')}"):
            from_rows(given)
        return
    with ending("eval"):
        require("leank.eval", "eval", "hydra")
        import hydra

        from leank.launch import launch

        composed = hydra.main(version_base="1.3", config_path="pkg://leank.conf.eval", config_name="eval")(main)
        launch(composed, "eval", "; beside settings there are the words report and diff, and --help")


if __name__ == "__main__":
    command_line()
