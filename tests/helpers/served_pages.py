"""A server's pages that hold rows of random tokens under a random mask, on a GPU where there is one."""

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def a_mask(seed, layers=2, heads=3, dim=64):
    """[L, H, D] bool: random shares of the channels; a whole head, and some that keep none."""
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(layers, heads, dim, generator=generator) < torch.rand(layers, heads, 1, generator=generator)
    keep[torch.rand(layers, heads, generator=generator) < 0.3] = False
    keep[0, 0], keep[0, 1] = True, False  # a whole head and an empty one
    return keep


def served(layout, lengths, seed, spare=0, layers=2, heads=3):
    """(pages, kept table, rest table) of rows of random tokens, all other memory NaN.

    spare: tokens by which rows may be taken to be shorter.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = layout.kept, layout.rest
    longest = max(lengths)
    widths = [-(-longest // group.block) for group in groups]
    blocks = len(lengths) * sum(widths) + 1
    free = iter((torch.randperm(blocks - 1, generator=generator) + 1).tolist())
    pages = torch.full((blocks, layout.page_columns), torch.nan, dtype=DTYPE, device=DEVICE)
    k, v = torch.randn(2, layers, len(lengths), longest, heads, layout.head_dim, generator=generator).to(DEVICE, DTYPE)
    tables = [torch.zeros(len(lengths), width, dtype=torch.int32) for width in widths]
    for row, length in enumerate(lengths):
        position = torch.arange(length)
        whole = (position < layout.sink) | (position >= max(layout.sink, length - 1 - spare - layout.window))
        for group, table, stored in zip(groups, tables, (position, position[whole]), strict=True):
            for block in (stored // group.block).unique().tolist():
                table[row, block] = next(free)
            slots = table[row, stored // group.block].long() * group.block + stored % group.block
            for layer in range(layers):
                values = (x[layer, row, stored.to(DEVICE)] for x in (k, v))
                group.write(pages, layer, slots.to(DEVICE), *values)
    return pages, *(table.to(DEVICE) for table in tables)
