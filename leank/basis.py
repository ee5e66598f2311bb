"""A basis of every KV head, in whose coordinates a cache keeps K, so that these have bits of their own, not channels.

With an invertible matrix B, a cache holds k B in place of k, and reads a query as q B^-T. That is dense's attention, as
q B^-T (k B)^T = q k^T; only what is pruned or rounded in these coordinates differs. K has RoPE in it already, so that B
may mix any channels. It need not be orthogonal, but must be far from singular, or 16 bits would round too much.
"""

import torch
from torch import Tensor

MOST = 100.0  # largest condition number of a basis


def check_basis(basis: Tensor) -> None:
    """Raise ValueError unless key_basis is finite float32 [L, H, D, D], and no head's matrix is nearly singular."""
    if basis.dtype != torch.float32 or basis.dim() != 4 or basis.shape[2] != basis.shape[3] or basis.numel() == 0:
        raise ValueError(
            f"key_basis is {basis.dtype} {list(basis.shape)}; give float32 [layers, kv_heads, head_dim, head_dim]"
        )
    if not torch.isfinite(basis).all():
        raise ValueError("key_basis holds NaN or infinite numbers; calibrate again")
    found = torch.linalg.cond(basis.double()).nan_to_num(torch.inf)  # NaN of a matrix of zeros
    if not (found <= MOST).all():
        layer, head = divmod(int(found.flatten().argmax()), found.shape[1])
        raise ValueError(
            f"key_basis has a condition number of {float(found[layer, head]):.3g} in layer {layer}, head {head}, and "
            f"{MOST:g} is the most: 16 bits would round too much; calibrate again"
        )


def of_queries(basis: Tensor) -> Tensor:
    """Return B^-T, in whose columns queries are read, of B [..., D, D]; in B's type, computed in float64."""
    return torch.linalg.inv(basis.double()).mT.to(basis.dtype).contiguous()


def coordinates(x: Tensor, basis: Tensor, center: Tensor | None = None) -> Tensor:
    """Return (x - center) basis in x's dtype, computed in float32 or wider; a KV head may have a group of heads in x.

    x: [B, H G, n, D]; basis: [H, D, D]; center: [H, 1, D], default 0
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    of_heads = x.to(wide).unflatten(1, (len(basis), -1))  # [B, H, G, n, D]
    if center is not None:
        of_heads = of_heads - center.to(wide)[:, None]
    return (of_heads @ basis.to(wide)[:, None]).flatten(1, 2).to(x.dtype)
