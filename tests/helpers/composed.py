"""The configurations of `python -m leank_train` and `python -m leank.eval`, as a command line composes them.

Importing this module makes Hydra read each file of this repository's conf once in a process: it takes a third of the
time of composing.
"""

import pickle

from hydra import compose, initialize_config_module
from hydra._internal import config_loader_impl
from hydra._internal.config_repository import CachingConfigRepository
from omegaconf import OmegaConf

from tests import ROOT

OURS = ("pkg://leank.conf", "pkg://conf", "pkg://hydra", "structured://", f"file://{ROOT}/")
_read: dict[object, bytes] = {}


class Kept(CachingConfigRepository):
    """Configurations that are read once, and not for every command line anew; composing changes its copies."""

    def load_config(self, config_path):
        places = tuple((one.provider, one.full_path()) for one in self.get_sources())
        if not all(str(path).startswith(OURS) for _, path in places):  # a test's own files may change
            return super().load_config(config_path)
        if (places, config_path) not in _read:
            _read[places, config_path] = pickle.dumps(super().load_config(config_path))
        return pickle.loads(_read[places, config_path])


config_loader_impl.CachingConfigRepository = Kept


def training(*overrides):
    """conf/train with these overrides, as the command gets it."""
    with initialize_config_module("leank.conf.train", version_base="1.3"):
        return compose("train", list(overrides))


def evaluation(*overrides):
    """conf/eval with these overrides, resolved, in built-in types."""
    with initialize_config_module("leank.conf.eval", version_base="1.3"):
        return OmegaConf.to_container(compose("eval", list(overrides)), resolve=True)
