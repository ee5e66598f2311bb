"""A cache that is used again without reset(): what does not fit what it holds is refused, and is not answered."""

import functools

import pytest
import torch

from leank.eval.cache.layer import CompressedLayer
from tests.helpers.cache_oracle import LAYERS, left_padded, random_keep, tiny_model
from tests.helpers.cache_uses import GREEDY, feed, new_cache
from tests.helpers.refusals import one_line


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("again", ["prompt", "turn", "use_cache", "use_cache without padding"])
def test_ids_that_do_not_fit_what_the_cache_holds_are_refused(again, own):
    """A prompt without reset(), a turn without what came before, and use_cache=False all answered with other tokens."""
    model = tiny_model("llama")
    ids, mask = left_padded([20, 20 if "without" in again else 9], 1)
    cache = new_cache(model, random_keep(3))
    how = (cache.generate, (model,), {}) if own else (model.generate, (), {"past_key_values": cache})
    generate = functools.partial(how[0], *how[1], **how[2], **GREEDY, max_new_tokens=4)
    first = generate(input_ids=ids, attention_mask=mask)
    given = {"prompt": {"input_ids": ids, "attention_mask": mask}, "turn": {"input_ids": first[:, -5:]}}
    wrong = given.get(again, {"input_ids": torch.cat([first, ids], 1), "use_cache": False})
    with pytest.raises((ValueError, RuntimeError)) as error:
        generate(**wrong)
    if own or again != "turn":  # of a turn alone transformers makes no tokens at all
        assert "whole conversation" in str(error.value)
        assert "call cache.reset()" in str(error.value)
        assert one_line(error)
    cache.reset()
    assert torch.equal(generate(input_ids=ids, attention_mask=mask), first)


class Stopped(BaseException):
    """As Ctrl-C raises."""


@pytest.mark.filterwarnings("ignore:a pass of 3 tokens")
@pytest.mark.parametrize("turn", [1, 3])
@pytest.mark.parametrize("where", ["update", "attend"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_pass_that_broke_off_is_not_gone_on_from(layer, where, turn, monkeypatch):
    """Layers that lack tokens answered with other tokens; after reset() the cache is new."""
    model, keep = tiny_model("llama"), random_keep(3)
    ids, more = left_padded([20], 1)[0], left_padded([turn], 2)[0]
    cache = new_cache(model, keep)
    want = feed(model, cache, ids, more)
    cache.reset()
    feed(model, cache, ids)
    with monkeypatch.context() as patch:
        whole = getattr(CompressedLayer, where)

        def stop(self, *args, **kwargs):
            if self is cache.layers[layer]:
                raise Stopped
            return whole(self, *args, **kwargs)

        patch.setattr(CompressedLayer, where, stop)
        with pytest.raises(Stopped):
            feed(model, cache, more)
    if (layer, where) == (0, "update"):  # nothing has come
        assert torch.equal(feed(model, cache, more), want)
        return
    with pytest.raises(RuntimeError, match=r"the last pass broke off, .* call reset\(\)") as error:
        feed(model, cache, more)
    assert one_line(error)
    cache.reset()
    assert torch.equal(feed(model, cache, ids, more), want)
