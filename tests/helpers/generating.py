"""What tests of generate() share: prompts, steps that are replayed on a CPU, and what is left in a cache."""

import torch

from leank.eval.cache import compressed_cache
from leank.eval.cache.graph import DecodeLoop


def prompts(vocabulary=50, device="cpu", length=40):
    """Three rows, the first padded on the left."""
    ids = torch.randint(5, vocabulary, (3, length), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


def random_mask(config):
    shape = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return torch.equal(first.sequences, second.sequences) and all(
        torch.equal(a, b) for name in ("scores", "logits") for a, b in zip(first[name], second[name], strict=True)
    )


class Replays:
    """In a graph's place on a CPU: a step without a mask that is counted where a GPU would count it, and nowhere else.

    What a graph's stream does beside the question whether all rows have ended, is done before it here.
    """

    def __init__(self, loop):
        self.loop = loop

    def replay(self):
        layers = self.loop.cache.layers
        for layer in layers:
            layer.record_past = True  # nothing leaves the window
        self.loop._logits.copy_(self.loop._forward(self.loop._tokens))
        for layer in layers:
            layer.record_past = False
            layer._columns -= 1
            layer.store.seen -= 1


class Fake(DecodeLoop):
    """A loop whose captured steps run on a CPU."""

    captures, begun, undone = 0, 0, 0

    def capture(self):
        Fake.captures += 1
        self._tokens = torch.zeros_like(self.positions)
        self._logits = torch.zeros(len(self.positions), self.model.config.vocab_size, dtype=self.model.dtype)
        self._graph = Replays(self)

    def begin(self, tokens):
        Fake.begun += 1
        super().begin(tokens)

    def take_back(self):
        Fake.undone += self._begun
        super().take_back()


def held(cache):
    """All that a cache holds, as far as anybody may read it."""
    found = [cache.get_seq_length()]
    for layer in cache.layers:
        store = layer.store
        assert store.seen.tolist() == store.seen_dev.tolist()
        assert store.start.tolist() == store.start_dev.tolist()
        for row, (start, seen) in enumerate(zip(store.start.tolist(), store.seen.tolist(), strict=True)):
            slots = torch.arange(start, seen) % store.ring_k.shape[2]
            found += [start, seen, *(ring[row, :, slots].tolist() for ring in (store.ring_k, store.ring_v))]
            for head in range(store.ring_k.shape[1]):
                for part in (store.prompt, store.tail):
                    found += [tensor.tolist() for tensor in part.read(row, head)]
    return found


def compare_ends(model, sizes, options, steps, plain, replayed):
    """Rows that end at `steps` give the same from both, leave the same caches, and a later turn goes on alike.

    plain, replayed: run(cache, options) -> what generate() returns
    """
    copies, length = options.get("num_return_sequences", 1), options["input_ids"].shape[1]

    def run(how, cache, **more):
        torch.manual_seed(1)
        return how(cache, {**options, **more})

    caches = [compressed_cache(model, random_mask(model.config), *sizes) for _ in range(3)]
    free = run(plain, caches[0], min_new_tokens=options["max_new_tokens"])
    free = (free if isinstance(free, torch.Tensor) else free.sequences)[:, length:]
    ends = [int(tokens[steps[row // copies]]) for row, tokens in enumerate(free)]
    want, got = (run(how, cache, eos_token_id=ends) for how, cache in zip((plain, replayed), caches[1:], strict=True))
    assert same(want, got)
    assert held(caches[1]) == held(caches[2])
    ids = got if isinstance(got, torch.Tensor) else got.sequences
    assert length < ids.shape[1] < length + options["max_new_tokens"]
    more = torch.cat([ids, torch.full((len(ids), 3), 9).to(ids)], 1)
    mask = torch.cat([options["attention_mask"].repeat_interleave(copies, 0), torch.ones_like(more[:, length:])], 1)
    turn = {"input_ids": more, "attention_mask": mask, "do_sample": False, "num_return_sequences": 1}
    turns = (run(how, cache, **turn) for how, cache in zip((plain, replayed), caches[1:], strict=True))
    assert same(*turns)
    assert held(caches[1]) == held(caches[2])
