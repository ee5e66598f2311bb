"""Hydra configurations: train and eval hold what one command has, shared what both have.

A package, so that an installed copy finds them.
"""

import re
import shutil
from importlib.resources import files
from importlib.util import find_spec

COMMANDS = {"train": "leank_train", "eval": "eval"}
MULTIRUN = {"-m", "--multirun"}
SHOWING = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info"}  # options that start nothing


def of_other_command(arguments: list[str], own: str) -> str | None:
    """Say so where an argument names an experiment of the other command; own: "train" or "eval"."""
    for argument in arguments:
        found = re.fullmatch(r"\+{0,2}experiment=\[?([\w,/]+)\]?", argument)
        for name in found.group(1).split(",") if found else []:
            homes = [
                root for root in COMMANDS if files("leank.conf").joinpath(root, "experiment", f"{name}.yaml").is_file()
            ]
            if homes and own not in homes:
                command = COMMANDS[homes[0]]
                return f"experiment={name} belongs to another command: python -m {command} +experiment={name}"
    return None


def of_several_experiments(arguments: list[str]) -> str | None:
    """Say so where a sweep goes over experiments: their runs would have one folder, whose name leaves them out."""
    for argument in arguments:
        if MULTIRUN & {*arguments} and re.fullmatch(r"\+{0,2}experiment=[\w/]+(,[\w/]+)+", argument):
            return f"{argument}: a sweep has one experiment; start one for each, with its own hydra.sweep.dir"
    return None


def without_slurm(arguments: list[str], own: str) -> str | None:
    """Say what is missing where an argument asks for a launcher of Slurm; own: "train" or "eval"."""
    asked = [a for a in arguments if re.fullmatch(r"\+{0,2}hydra/launcher=(slurm\w*|submitit_slurm)", a)]
    if not asked:
        return None
    if own == "eval" and not asked[-1].endswith("=submitit_slurm"):
        return (
            f"{asked[-1]}: an evaluation is no sweep of jobs; give its arguments to sbatch --array=0-7 "
            "scripts/cluster/eval.sbatch (docs/cluster.md)"
        )
    if not _is_installed("hydra_plugins.hydra_submitit_launcher"):
        return f"{asked[-1]} needs the package hydra-submitit-launcher; pip install -c constraints.txt -e '.[slurm]'"
    if SHOWING & {*arguments}:
        return None
    lacking = [program for program in ("sbatch", "srun") if shutil.which(program) is None]
    if lacking:
        return (
            f"{asked[-1]} needs {' and '.join(lacking)}, which this machine does not have; start the command on a "
            "login node of a Slurm cluster, or leave the launcher out to run here"
        )
    if not MULTIRUN & {*arguments}:
        return f"{asked[-1]} makes a job of each member of a sweep, and without -m there is none; add -m"
    return None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package around it
        return False


def set_twice(arguments: list[str]) -> str | None:
    """Say so where arguments set one value of the group `pruning` under both of its names; the old one is `mask`."""
    given: dict[tuple[str, str], str] = {}
    for argument in arguments:
        found = re.fullmatch(r"\+{0,2}(mask|pruning)\.(\w+)=(.*)", argument, re.DOTALL)
        if found:
            given[found[1], found[2]] = found[3]
    for (group, key), value in given.items():
        if group == "mask" and given.get(("pruning", key), value) != value:
            new = given["pruning", key]
            return f"mask.{key}={value} and pruning.{key}={new} are one setting, which is called pruning now; give one"
    return None
