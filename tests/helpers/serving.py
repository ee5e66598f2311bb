"""Pages and block tables as a server would fill them, without a server."""

from itertools import pairwise

import torch

from leank.eval.serving import attention
from leank.eval.serving.rest import RestBlocks


class Server:
    """Pages of one layer, and a block table per request; pages start as NaN, and are NaN again once they are freed."""

    def __init__(self, layout, seed, dtype=torch.float64, device="cpu", pages=300):
        self.generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.rest = RestBlocks(layout.rest.block, layout.hit, layout.sink, layout.window, grain=layout.grain)
        self.pages = torch.full((pages, layout.page_columns), torch.nan, dtype=dtype, device=device)
        self.free = (torch.randperm(pages - 1, generator=self.generator) + 1).tolist()
        self.tables = {}

    def grow(self, name, end):
        kept, rest = self.tables.setdefault(name, ([], []))
        kept += [self.free.pop() for _ in range(-(-end // self.layout.kept.block) - len(kept))]
        rest += [self.free.pop() if real else 0 for real in self.rest.new(len(rest), end)]

    def plan(self, requests):
        """The step that computes new positions: (name, prompt, k, v, q of the new positions, end) each; and k, v, q."""
        for name, _, k, _, _, end in requests:
            self.grow(name, end)
            rest = self.tables[name][1]
            for page in range(self.rest.sink_pages, self.rest.first_in_window(end - len(k))):
                if rest[page]:  # a server frees what left the window: it may be overwritten
                    self.pages[rest[page]] = torch.nan
                    rest[page] = 0
        tables = [[self.tables[name][group] for name, *_ in requests] for group in (0, 1)]
        device = self.pages.device
        tables = [torch.tensor([t + [0] * (max(map(len, ts)) - len(t)) for t in ts], device=device) for ts in tables]
        starts = [0, *torch.tensor([len(k) for _, _, k, *_ in requests]).cumsum(0).tolist()]
        step = attention.Step(self.layout, starts, [r[5] for r in requests], [r[1] for r in requests], *tables)
        return step, *(torch.cat([r[i] for r in requests]) for i in (2, 3, 4))

    def step(self, requests, scaling):
        """Compute new positions, as for `plan`; returns their outputs."""
        step, k, v, q = self.plan(requests)
        attention.write(step, 0, self.pages, k, v)
        out = torch.full_like(q, torch.nan)
        attention.attend(step, 0, self.pages, q, k, v, scaling, out)
        return [out[a:b] for a, b in pairwise(step.starts)]
