"""What runs of these tests share."""

import pytest

from leank_train.stages import Stage


@pytest.fixture
def no_step(monkeypatch):
    """Training must not begin."""
    monkeypatch.setattr(Stage, "training_step", lambda *args: pytest.fail("training has begun"))
