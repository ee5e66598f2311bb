"""Choices by name: eval/methods/<axis>/<name>.py is the choice `name` on that axis, imported when it is first used."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from leank.eval.methods.axes import Axis, Bits, Channels, PromptPass, Reads, Tokens
from leank.typed import shown, typed

AXES: dict[str, type[Axis]] = {
    "channels": Channels, "tokens": Tokens, "bits": Bits, "reads": Reads, "prefill": PromptPass,
}  # fmt: skip
REGISTRY = {axis: [found.name for found in iter_modules([str(Path(__file__).parent / axis)])] for axis in AXES}


def choice_class(axis: str, name: object, setting: str = "name") -> type[Axis]:
    """Return the dataclass called `name` on one of `AXES`.

    name: one of `REGISTRY[axis]`, or "module:class". The module is imported, so the name is trusted code.
    setting: the dotted key that the name comes from, with which every error begins.
    Raises ValueError for a name that is unknown, cannot be imported, or is no dataclass that subclasses the axis.
    """
    if isinstance(name, str) and name in REGISTRY[axis]:
        return _registered(f"{__package__}.{axis}.{name}", name)
    said, base = f"{setting}={name!r}", AXES[axis]
    if not isinstance(name, str) or ":" not in name:
        raise ValueError(f"{said} is unknown; choose one of {', '.join(REGISTRY[axis])}, or module:class")
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{said} cannot be imported: {error}; give module:class") from error
    if not (is_dataclass(found) and isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"{said} is no choice of {axis}; give a dataclass that subclasses {base.__name__} of {base.__module__}"
        )
    return found


def _registered(module: str, name: str) -> type[Axis]:
    """Return the class of a module that is decorated with @method(name)."""
    for found in vars(import_module(module)).values():
        if isinstance(found, type) and found.__module__ == module and vars(found).get("registered") == name:
            return found
    raise TypeError(f"{module} has no class with @method({name!r})")


def choice(axis: str, config: object, where: str) -> Axis:
    """Return the choice on one of `AXES` that `config`, {"name": ..., its settings}, describes; see `choice_class`.

    where: the dotted key of `config`, with which every error begins.
    Raises ValueError for anything but a mapping, an unknown name, or settings that the choice does not accept.
    """
    if not isinstance(config, Mapping):
        said, name = shown(config), shown(config).strip("'")
        raise ValueError(f"{where}={said} is no choice; give {{name: {name}}}, with its settings if any")
    settings = {key: value for key, value in config.items() if key != "name"}
    return typed(choice_class(axis, config.get("name"), f"{where}.name"), settings, f"{where}.")


def name_of(choice: Axis) -> str:
    """Return the name of a choice in `REGISTRY`, or "module:class" of one from elsewhere."""
    kind = type(choice)
    name = vars(kind).get("registered")
    if any(kind.__module__ == f"{__package__}.{axis}.{name}" for axis in AXES):
        return str(name)
    return f"{kind.__module__}:{kind.__name__}"
