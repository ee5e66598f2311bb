"""An evaluation on Weights & Biases, from its rows: scores, tables, figures, changed replies, and the masks it used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leank.eval.methods import Method
from leank.eval.methods.channels.leank import LeanK
from leank.eval.report.groups import changed, frame, group
from leank.eval.report.page import SHOWN, title
from leank.eval.report.plots import FIGURES
from leank.eval.report.summary import summarise_groups
from leank.eval.rows import read
from leank.wandb_log import mask_artifact, model_artifact, use

if TYPE_CHECKING:
    from lightning.pytorch.loggers import WandbLogger

CELL = ("method", "task", "length", "n", "score", "cache_bytes", "kl", "top1", "loss")
OVERALL = ("score", "cache_bytes", "kl", "top1", "loss", "difference")
CHANGED = {"method": "method_second", "task": "task", "length": "length", "sample": "sample",
           "answers": "answers_first", "dense": "prediction_first", "reply": "prediction_second",
           "dense score": "score_first", "score": "score_second"}  # fmt: skip


def log_report(logger: WandbLogger, config: Mapping[str, Any], methods: Sequence[Method], directory: Path) -> None:
    """Log the report of `directory`, as `write_report` has left it, and the learned masks of `methods` as artifacts.

    Rows of other settings make a run of their own. The keys of the second one end in _2, as its files do.
    """
    import wandb

    groups = group(read(directory))
    logger.log_hyperparams(dict(config))
    run = logger.experiment
    use(run, model_artifact(config["model"]["name"]))
    for choice in (method.channels for method in methods):
        if isinstance(choice, LeanK) and isinstance(choice.mask, str):
            use(run, mask_artifact(Path(choice.mask), choice.loaded))
    for number, (part, some) in enumerate(zip(summarise_groups(groups)["runs"], groups, strict=True), 1):
        ending = "" if number == 1 else f"_{number}"
        run.summary.update({f"rows{ending}": part["rows"], f"benchmark{ending}": title(part)})
        for cell in part["overall"]:
            found = {name: cell[name] for name in OVERALL if cell[name] is not None}
            if cell["share_of_dense"] is not None:
                found["cache_share"] = cell["share_of_dense"] / 100
            run.summary.update({f"{name}{ending}/{cell['method']}": value for name, value in found.items()})
        pictures = {f"plots/{name}{ending}": directory / f"{name}{ending}.png" for name in FIGURES}
        run.log({key: wandb.Image(str(path)) for key, path in pictures.items() if path.exists()})
        cells = [[cell[name] for name in CELL] for cell in part["cells"]]
        rows, replies = frame(some), []
        for method in part["methods"] if part["dense"] is not None else ():
            replies += changed(rows, part["dense"], method)[:SHOWN].to_dict("records")
        run.log({
            f"cells{ending}": wandb.Table(columns=list(CELL), data=cells),
            f"changed{ending}": wandb.Table(columns=list(CHANGED), data=[
                [", ".join(map(str, reply[name])) if name == "answers_first" else reply[name]
                 for name in CHANGED.values()] for reply in replies
            ]),
        })  # fmt: skip
    run.finish()
