"""Run lm_eval's own command line on the model "leank"; see the package's docstring."""

import sys
from importlib import import_module

from leank.cli import ending
from leank.launch import launch


def main() -> None:
    """Register the model and hand over to lm_eval."""
    from lm_eval.__main__ import cli_evaluate

    if not {"-h", "--help"} & {*sys.argv}:
        import_module("leank.eval.lm_eval.model")  # seconds
    if "--tasks" in sys.argv and "--model" not in sys.argv:
        sys.argv += ["--model", "leank"]
    with ending("lm_eval"):
        launch(cli_evaluate, "lm_eval")


if __name__ == "__main__":
    main()
