"""What runs of these tests share."""

import pytest

from leank_train.stages import Stage

DRAWN = {"test_run", "test_wandb"}  # modules that look at the plots


@pytest.fixture(scope="module", autouse=True)
def plots_where_looked_at(request):
    """Draw no plots elsewhere: drawing takes more than half of the time of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rsplit(".", 1)[-1] not in DRAWN:
            patch.setattr("leank_train.running.plots.training_plots", lambda *args: {})
        yield


@pytest.fixture
def no_step(monkeypatch):
    """Training must not begin."""
    monkeypatch.setattr(Stage, "training_step", lambda *args: pytest.fail("training has begun"))
