"""Hydra configurations: train and eval hold what one command has, shared what both have.

A package, so that an installed copy finds them.
"""

import re
from importlib.resources import files

COMMANDS = {"train": "leank_train", "eval": "eval"}


def of_other_command(arguments: list[str], own: str) -> str | None:
    """Say so where an argument names an experiment of the other command; own: "train" or "eval"."""
    for argument in arguments:
        found = re.fullmatch(r"\+{0,2}experiment=\[?([\w,/]+)\]?", argument)
        for name in found.group(1).split(",") if found else []:
            homes = [root for root in COMMANDS if files("conf").joinpath(root, "experiment", f"{name}.yaml").is_file()]
            if homes and own not in homes:
                command = COMMANDS[homes[0]]
                return f"experiment={name} belongs to another command: python -m {command} +experiment={name}"
    return None


def of_several_experiments(arguments: list[str]) -> str | None:
    """Say so where a sweep goes over experiments: their runs would have one folder, whose name leaves them out."""
    for argument in arguments:
        if {"-m", "--multirun"} & {*arguments} and re.fullmatch(r"\+{0,2}experiment=[\w/]+(,[\w/]+)+", argument):
            return f"{argument}: a sweep has one experiment; start one for each, with its own hydra.sweep.dir"
    return None


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
