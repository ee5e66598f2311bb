"""Captured decoding steps on a CPU: what a graph would replay is run by Python instead."""

import torch

from leank.eval.cache.graph import DecodeLoop


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
        self.loop._out.copy_(self.loop._forward(self.loop._tokens))
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
        width = self.model.config.vocab_size if self.head else self.model.config.hidden_size
        self._out = torch.zeros(len(self.positions), width, dtype=self.model.dtype)
        self._graph = Replays(self)

    def begin(self, tokens):
        Fake.begun += 1
        super().begin(tokens)

    def take_back(self):
        Fake.undone += self._begun
        super().take_back()
