"""Classes and functions that register themselves by a decorator, found by importing every file of their folder."""

import importlib
import pkgutil


def import_all(package: str) -> None:
    """Import every module of a package, so that its decorators have run. package: its dotted name."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")
