"""What runs over a compressed layer: the kernel where it can, else plain PyTorch; with a GPU a warning says why."""

import functools
import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from leank.eval.cache.attention.batched import Plain
from leank.eval.cache.attention.kernels import HEAD_DIMS
from leank.eval.cache.attention.ranking import Ranking
from leank.eval.cache.attention.softmax import PLAIN, Softmax
from leank.eval.cache.storage.banded import Banded
from leank.eval.cache.storage.codecs import Codec
from leank.eval.cache.storage.middle import Middle
from leank.eval.cache.storage.quantised import Packing
from leank.eval.cache.storage.store import Store

if TYPE_CHECKING:
    from leank.eval.cache.attention.choose import Chosen
    from leank.eval.cache.attention.launch import Kernel


def why_not(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    insist: bool,
    dims: tuple[int, ...] = HEAD_DIMS["choose"],
) -> str | None:
    """Why the kernel cannot run over such a layer, with `group` query heads per KV head; None if it can.

    insist: whether Triton's interpreter, which runs on a CPU and is slow, may take a GPU's place
    dims: head_dims that the kernel has
    """
    interpreted = insist and os.environ.get("TRITON_INTERPRET") == "1"
    dtypes = (torch.float16, torch.float32) if interpreted else (torch.float16, torch.bfloat16)
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not interpreted:
        return f"the cache is on {device.type}, the kernel needs CUDA"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernel needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    if dtype not in dtypes:
        return f"the kernel computes in {' or '.join(map(str, dtypes))}, the cache is {dtype}"
    return why_not_shape(head_dim, group, dims)


def why_not_shape(head_dim: int, group: int, dims: tuple[int, ...] = HEAD_DIMS["choose"]) -> str | None:
    """Why the kernel cannot run over heads of this shape on any GPU, or None if it can; see `why_not`."""
    if head_dim not in dims:
        *most, last = map(str, dims)
        return f"the kernel has head_dim {', '.join(most)} and {last}, the model {head_dim}"
    if group > 16:
        return f"the kernel has at most 16 query heads per KV head, the model {group}"
    return None


def head_dims(middle: Middle) -> tuple[int, ...]:
    """The head_dims that the kernel over such a middle has."""
    if middle.bits is not None:
        return HEAD_DIMS["codes"]
    return HEAD_DIMS["decode" if middle.reads is None else "choose"]


def why_not_middle(middle: Middle) -> str | None:
    """Why only plain PyTorch can run over such a middle, or None."""
    if middle.values is not None and (middle.eviction is not None or middle.reads is not None):
        return "the kernels that evict, or choose what they read, take every channel of V, this method prunes some"
    if middle.eviction is not None and middle.joins is not None:
        return "the kernel evicts where every head takes new tokens, here some do not"
    if middle.reads is not None and middle.bits is not None:
        return "the kernel that reads chosen tokens does not unpack numbers, this method stores them in fewer bits"
    return None if middle.bits is None else why_not_bits(middle.bits)


def why_not_bits(codec: Codec) -> str | None:
    """Why only plain PyTorch can read what a codec stores; None if `readers.READERS` has a reader of it."""
    if isinstance(codec, Packing):
        return None if codec.group >= 32 else f"the kernel reads groups of 32 or 64 numbers, not {codec.group}"
    return None if isinstance(codec, Banded) else f"no kernel reads {codec.holds}"


@functools.cache
def _warn(reason: str) -> None:
    warnings.warn(f"attention over the compressed cache runs in plain PyTorch: {reason}", RuntimeWarning, stacklevel=2)


class Auto:
    """The choice of the kernel, or of plain PyTorch where the kernel cannot run."""

    def __init__(self, insist: bool = False, **kernel_options: Any) -> None:
        """Choose by layer; insist: raise RuntimeError where the kernel cannot run; others: as for `launch.Kernel`."""
        self.insist, self.options = insist, kernel_options
        self.kernel: Kernel | None = None  # made for the first layer that it can run over
        self.chosen: Chosen | None = None  # the same for layers that choose what they read

    def choose(self, store: Store, q: Tensor, softmax: Softmax = PLAIN) -> Plain:
        """The kernel if it can run over the layer, else plain PyTorch, or RuntimeError if this choice insists."""
        group = q.shape[1] // store.ring_k.shape[1]
        reason = (
            why_not(q.device, q.dtype, q.shape[-1], group, self.insist, head_dims(store.middle))
            or softmax.why_not_kernel
            or why_not_middle(store.middle)
        )
        if reason is None and store.reads is not None:
            if isinstance(getattr(store.reads, "ranking", None), Ranking):
                from leank.eval.cache.attention.choose import Chosen

                self.chosen = self.chosen or Chosen(programs=self.options.get("programs", 0))
                return self.chosen
            reason = f"the kernel cannot rank what {type(store.reads).__name__} reads"
        if reason is None:
            from leank.eval.cache.attention.launch import Kernel

            self.kernel = self.kernel or Kernel(**self.options)
            return self.kernel
        if self.insist:
            raise RuntimeError(f'backend="triton" cannot run: {reason}')
        if torch.cuda.is_available():  # without a GPU nobody expects the kernel
            _warn(reason)
        return Plain()

    def tensors(self) -> dict[str, Tensor]:
        """Scratch memory of the kernels, by name."""
        chosen = {} if self.chosen is None else {f"chosen.{n}": t for n, t in self.chosen.tensors().items()}
        return {**(self.kernel.tensors() if self.kernel else {}), **chosen}


BackendChoice: TypeAlias = Plain | Auto  # the layers of a cache share one choice


def choose_backend(name: str, **kernel_options: Any) -> BackendChoice:
    """The choice of that name: "auto" (kernel where possible), "torch" (plain PyTorch) or "triton" (kernel or error).

    kernel_options: as for `launch.Kernel`. Raises ValueError for another name.
    """
    if name == "torch":
        return Plain()
    if name in ("auto", "triton"):
        return Auto(insist=name == "triton", **kernel_options)
    raise ValueError(f'backend must be "auto", "torch" or "triton", got {name!r}')
