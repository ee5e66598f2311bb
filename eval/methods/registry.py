"""Classes by name: the choices on every axis of a method, each imported when it is first used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Generic, TypeVar

from leank.eval.methods.axes import Axis, Bits, Channels, PromptPass, Reads, Tokens
from leank.typed import shown, typed

T = TypeVar("T")


class Registry(Mapping[str, str], Generic[T]):
    """A mapping name -> "module:class" that imports the class on demand.

    kind: str: what one of them is, for messages, such as "choice of channels".
    base: class: what all of them subclass.
    targets: mapping: name -> "module:class".
    others: bool, default True: whether `load` also takes the "module:class" of a class without a name here.
    """

    def __init__(self, kind: str, base: type[T], targets: Mapping[str, str], others: bool = True) -> None:
        self.kind, self.base, self.others = kind, base, others
        self._targets = dict(targets)

    def __getitem__(self, name: str) -> str:
        return self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def load(self, name: object, setting: str = "name") -> type[T]:
        """The dataclass called `name`.

        name: str: a name of this registry, or "module:class". The module is imported, so the name is trusted code.
        setting: str: the dotted key that the name comes from, with which every error begins.

        Raises ValueError for a name that is unknown, cannot be imported, or is no dataclass that subclasses `base`.
        """
        said, also = f"{setting}={name!r}", ", or module:class" if self.others else ""
        if not isinstance(name, str) or (name not in self and not (self.others and ":" in name)):
            raise ValueError(f"{said} is unknown; choose one of {', '.join(self)}{also}")
        module, _, attribute = self.get(name, name).partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{said} cannot be imported: {error}; give module:class") from error
        if not (is_dataclass(found) and isinstance(found, type) and issubclass(found, self.base)):
            raise ValueError(
                f"{said} is no {self.kind}; give a dataclass that subclasses {self.base.__name__} of "
                f"{self.base.__module__}"
            )
        return found

    def name_of(self, known: type) -> str | None:
        """The name of a class, the inverse of `load`; None for a class without one."""
        target = f"{known.__module__}:{known.__name__}"
        return next((name for name, one in self.items() if one == target), None)


REGISTRY: dict[str, Registry[Axis]] = {
    "channels": Registry("choice of channels", Channels, {
        "leank": "leank.eval.methods.channels.leank:LeanK",
        "by_length": "leank.eval.methods.channels.by_length:ByLength",
        "double_sparsity_channels": "leank.eval.methods.channels.double_sparsity_channels:DoubleSparsityChannels",
        "iap": "leank.eval.methods.channels.iap:IAP",
        "leank_budget": "leank.eval.methods.channels.leank_budget:LeanKBudget",
        "lowest_frequencies": "leank.eval.methods.channels.lowest_frequencies:LowestFrequencies",
        "magnitude": "leank.eval.methods.channels.magnitude:Magnitude",
        "pair_energy": "leank.eval.methods.channels.pair_energy:PairEnergy",
        "random": "leank.eval.methods.channels.random:Random",
        "static_norm": "leank.eval.methods.channels.static_norm:StaticNorm",
        "think": "leank.eval.methods.channels.think:ThinK",
    }),
    "tokens": Registry("choice of tokens", Tokens, {
        "adakv": "leank.eval.methods.tokens.adakv:AdaKV",
        "duo_attention": "leank.eval.methods.tokens.duo_attention:DuoAttention",
        "expected_attention": "leank.eval.methods.tokens.expected_attention:ExpectedAttention",
        "h2o": "leank.eval.methods.tokens.h2o:H2O",
        "keydiff": "leank.eval.methods.tokens.keydiff:KeyDiff",
        "lethe": "leank.eval.methods.tokens.lethe:Lethe",
        "pyramidkv": "leank.eval.methods.tokens.pyramidkv:PyramidKV",
        "rkv": "leank.eval.methods.tokens.rkv:RKV",
        "snapkv": "leank.eval.methods.tokens.snapkv:SnapKV",
        "streaming_llm": "leank.eval.methods.tokens.streaming_llm:StreamingLLM",
        "tova": "leank.eval.methods.tokens.tova:TOVA",
    }),
    "bits": Registry("choice of bits", Bits, {
        "kivi": "leank.eval.methods.bits.kivi:KIVI",
        "turboquant": "leank.eval.methods.bits.turboquant:TurboQuant",
        "pca": "leank.eval.methods.bits.pca:PCA",
        "spark": "leank.eval.methods.bits.spark:SparK",
    }),
    "reads": Registry("choice of reads", Reads, {
        "double_sparsity": "leank.eval.methods.reads.double_sparsity:DoubleSparsity",
        "quest": "leank.eval.methods.reads.quest:Quest",
    }),
    "prefill": Registry("choice of prefill", PromptPass, {
        "asl": "leank.eval.methods.prefill.asl:ASL",
        "fastkv": "leank.eval.methods.prefill.fastkv:FastKV",
        "gemfilter": "leank.eval.methods.prefill.gemfilter:GemFilter",
        "pyramid_infer": "leank.eval.methods.prefill.pyramid_infer:PyramidInfer",
    }),
}  # fmt: skip
AXES = tuple(REGISTRY)


def choice(axis: str, config: object, where: str) -> Axis:
    """The choice on one axis that `config` describes.

    axis: one of `AXES`.
    config: {"name": ..., its settings}. The name is one of REGISTRY, or "module:class" of a choice that is not there;
      that module is imported, so a configuration with such a name is trusted code.
    where: the dotted key of `config`, with which every error begins.

    Raises ValueError for anything but a mapping, an unknown name, or settings that the choice does not accept.
    """
    if not isinstance(config, Mapping):
        said, name = shown(config), shown(config).strip("'")
        raise ValueError(f"{where}={said} is no choice; give {{name: {name}}}, with its settings if any")
    settings = {key: value for key, value in config.items() if key != "name"}
    return typed(REGISTRY[axis].load(config.get("name"), f"{where}.name"), settings, f"{where}.")


def name_of(choice: Axis) -> str:
    """The registered name of a choice, or "module:class" of one without a name."""
    kind = type(choice)
    names = (registry.name_of(kind) for registry in REGISTRY.values())
    return next(filter(None, names), f"{kind.__module__}:{kind.__name__}")
