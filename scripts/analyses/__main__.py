"""Measure what a figure of a paper shows, and draw it: OUT/rows.csv and OUT/figure.png.

python -m scripts.analyses kept_by_pair OUT mask=PATH model=null
python -m scripts.analyses staticity OUT length=1024 'lengths=[512,1024]' model=llama31_8b

key=value is a setting of the analysis where it has one of that name (its docstring lists them), and else of
python -m leank.eval, which names the model and the mask; those of +experiment=papers/here are the default.
model=null loads no model, for analyses of a mask alone.
"""

import argparse
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, cast

from leank.cli import ending
from scripts.analyses import NAMES, analysis_of

NO_MODEL = "model=null"


def run(name: str, out: Path, given: Sequence[str]) -> int:
    """Measure and draw one analysis into `out`, and return the rows of its table.

    given: its settings, and overrides of python -m leank.eval
    """
    # seconds to import
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError

    from leank.eval.inference.models import ModelConfig
    from leank.eval.report.style import png
    from leank.files import write_bytes, write_text
    from leank.typed import typed
    from scripts.analyses.source import Source
    from scripts.analyses.table import draw

    measure, panels = analysis_of(name)
    own = list(signature(measure).parameters)[1:]
    settings = OmegaConf.to_container(OmegaConf.from_dotlist([one for one in given if one.partition("=")[0] in own]))
    overrides = [one for one in given if one.partition("=")[0] not in own and one != NO_MODEL]
    try:
        with initialize_config_module("leank.conf.eval", version_base="1.3"):
            composed = compose("eval", ["+experiment=papers/here", *overrides])
            config = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(overrides)}: {str(error).splitlines()[0]}") from None
    model = None if NO_MODEL in given else typed(ModelConfig, config["model"], "model.")
    try:
        table = measure(Source.load(model, config["mask"]), **cast(dict[str, Any], settings))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}") from None
    write_text(out / "rows.csv", table.to_csv(index=False))
    write_bytes(out / "figure.png", png(draw(table, panels)))
    return len(table)


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.analyses", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(NAMES), metavar="NAME", help=", ".join(sorted(NAMES)))
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of rows.csv and figure.png")
    parser.add_argument("given", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    if wrong := [one for one in arguments.given if "=" not in one]:
        sys.exit(f"scripts.analyses: {wrong[0]} is no key=value")
    with ending("scripts.analyses"):
        rows = run(arguments.name, arguments.out, arguments.given)
        print(f"{rows} rows: {arguments.out / 'rows.csv'}")


if __name__ == "__main__":
    main()
