"""What many tests of evaluation share."""

import pytest


@pytest.fixture(scope="session")
def tokenizer():
    """The reference model's."""
    from leank.eval.inference.models import ModelConfig, load_config

    return load_config(ModelConfig())[1]
