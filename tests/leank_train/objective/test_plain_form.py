"""A stage's loss and gradient, for every family that can be trained, against the plain form."""

import pytest

from leank_train.objective import kl
from tests.helpers import plain_form
from tests.helpers.families import build, trained


@pytest.mark.parametrize("name", trained())
def test_a_stage_minimises_the_plain_form(monkeypatch, name):
    """Chunks of three tokens cut the answers."""
    model = build(name)
    monkeypatch.setitem(kl.LOGITS_AT_ONCE, "cpu", 3 * len(model.get_output_embeddings().weight))
    plain_form.compare(model, "paper" if name == "llama" else "official")
