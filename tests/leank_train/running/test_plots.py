"""What the pictures of a run compute before they draw."""

import numpy as np
import pytest

from leank_train.running.plots import _powers_of_ten, _smooth


@pytest.mark.parametrize("steps", [1, 29, 60, 95])
def test_a_loss_is_smoothed_over_the_last_thirtieth_of_the_steps(steps):
    losses = np.random.default_rng(0).random(steps)
    width = max(1, steps // 30)
    wanted = [losses[max(0, step + 1 - width) : step + 1].mean() for step in range(steps)]
    np.testing.assert_allclose(_smooth(losses), wanted)


def test_a_colour_bar_of_counts_ends_at_the_highest():
    ticks, labels = _powers_of_ten(np.log10(1 + 2_000))
    assert labels == ["0", "1", "10", "100", "1,000"]
    np.testing.assert_allclose(ticks, np.log10([1, 2, 11, 101, 1001]))
