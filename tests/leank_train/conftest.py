"""Runs of these tests draw no plots: drawing takes more than half of the time of a tiny run."""

import pytest

DRAWN = {"test_run", "test_wandb"}  # modules that look at the plots


@pytest.fixture(scope="module", autouse=True)
def plots_where_looked_at(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.rsplit(".", 1)[-1] not in DRAWN:
            patch.setattr("leank_train.running.plots.training_plots", lambda *args: {})
        yield
