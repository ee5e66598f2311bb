"""The configurations of `python -m leank_train` and `python -m leank.eval`, as a command line composes them."""

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf


def training(*overrides):
    """conf/train with these overrides, as the command gets it."""
    with initialize_config_module("leank.conf.train", version_base="1.3"):
        return compose("train", list(overrides))


def evaluation(*overrides):
    """conf/eval with these overrides, resolved, in built-in types."""
    with initialize_config_module("leank.conf.eval", version_base="1.3"):
        return OmegaConf.to_container(compose("eval", list(overrides)), resolve=True)
