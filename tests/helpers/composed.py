"""The configuration of `python -m eval`, as a command line composes it."""

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf


def evaluation(*overrides):
    """conf/eval with these overrides, resolved, in built-in types."""
    with initialize_config_module("conf.eval", version_base="1.3"):
        return OmegaConf.to_container(compose("eval", list(overrides)), resolve=True)
