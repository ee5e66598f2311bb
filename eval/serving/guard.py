"""A check of a running engine from outside the plug-in: what every worker says of its attention and of its pages.

vLLM drops a plug-in that it cannot load with one line in its log, and then serves the dense model. So the question is
not put to the plug-in but to vLLM's own state, in each process that runs a part of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from leank.eval.serving.coded import page_layout
from leank.eval.serving.layers import Layers
from leank.eval.serving.layout import heads_of
from leank.eval.serving.settings import ServerSettings
from leank.mask import ChannelMask

WORKER = "leank.eval.serving.guard.Worker"
KEPT, REST = "leank.1000000.kept", "leank.1000001.rest"  # what holds the pages; vLLM sorts by the number in a name
PRUNED = "leank.eval.serving.backend.PrunedAttention"
DENSE = "this server serves the dense model"
CURE = (
    "look for 'Failed to load plugin' in its log, install leank where vLLM is installed, and let VLLM_PLUGINS name "
    "leank if it is set"
)
Report = Mapping[str, Any]


class Worker:
    """What vLLM adds to its workers by `worker_extension_cls`; a worker that cannot import it does not start."""

    def leank_report(self) -> Report:
        """Return the attention of this worker's layers that see the whole context, by class, and what its cache is.

        That is the bytes and tokens of a block, its rank of tensor parallelism, and the channels of K that it keeps.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        layers = self.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
        kinds = [
            type(layer.impl)
            for layer in layers.values()
            if hasattr(layer, "impl") and getattr(layer, "sliding_window", None) is None
        ]
        cache = self.model_runner.kv_cache_config  # type: ignore[attr-defined]
        groups = cache.kv_cache_groups
        held = max(tensor.size for tensor in cache.kv_cache_tensors)  # each names the whole memory, which they share
        return {
            "attention": dict(Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)),
            "block_bytes": held // cache.num_blocks,
            "block": max((group.kv_cache_spec.block_size for group in groups if KEPT in group.layer_names), default=0),
            "rank": get_tensor_model_parallel_rank(),
            "ranks": self.vllm_config.parallel_config.tensor_parallel_size,  # type: ignore[attr-defined]
            "channels": layers[KEPT].layout.channels if KEPT in layers else 0,
        }


def refuse_dense(reports: Sequence[Report], settings: ServerSettings, model: Any) -> tuple[int, int]:
    """Raise RuntimeError unless every layer of full attention, of every worker, attends over pages of the mask.

    reports: one of each worker.
    settings: of the server.
    model: vLLM's model_config.

    Returns the bytes of a block of tokens of these layers under the mask, and of the dense model, in one rank.
    """
    mask, dtype, layers = ChannelMask.load(settings.mask), model.dtype, Layers.of(model.hf_text_config)
    if not reports:
        raise RuntimeError(f"{DENSE}, or cannot say: no worker has answered")
    for number, report in enumerate(reports):
        others = report["attention"].keys() - {PRUNED}
        if others or not report["attention"]:
            raise RuntimeError(
                f"{DENSE}: worker {number} attends with {', '.join(sorted(others)) or 'nothing'}; {CURE}"
            )
        if (count := report["attention"][PRUNED]) != len(layers.full):
            raise RuntimeError(
                f"worker {number} attends over pages of the mask in {count} layers, and the model has "
                f"{len(layers.full)} of full attention"
            )
        block, held, rank, ranks = (report[name] for name in ("block", "block_bytes", "rank", "ranks"))
        layout = page_layout(mask, block, settings.sink, settings.window, dtype, rank=rank, ranks=ranks, layers=layers)
        wanted = layout.page_columns * dtype.itemsize
        if held != wanted:
            raise RuntimeError(f"worker {number} holds blocks of {held:,} bytes, and those of the mask have {wanted:,}")
        if report["channels"] != layout.channels:
            raise RuntimeError(
                f"worker {number} of rank {rank} keeps {report['channels']:,} channels, and its heads of the mask "
                f"{layout.channels:,}"
            )
    if missing := set(range(ranks)) - {report["rank"] for report in reports}:
        raise RuntimeError(f"{DENSE}, or cannot say: rank {min(missing)} of {ranks} has not answered")
    heads = layers.mask(mask).keep[:, heads_of(mask.keep.shape[1], 0, ranks)]
    return held, 2 * heads.numel() * block * dtype.itemsize


def check(llm: Any) -> None:
    """Raise RuntimeError unless every layer of full attention, of every worker of a vllm.LLM, has pages of a mask.

    Call it where a model must be pruned, because vLLM goes on without a plug-in that it cannot load.

    llm: the vllm.LLM, after its start.
    """
    config = llm.llm_engine.vllm_config
    settings, extension = ServerSettings.find(config.additional_config), config.parallel_config.worker_extension_cls
    if settings is None:
        raise RuntimeError(
            f"{DENSE}: no mask was given; set LEANK_MASK, or additional_config={{'leank': {{'mask': PATH}}}}"
        )
    if extension != WORKER:
        why = (
            f"worker_extension_cls is {extension}: leave it out" if extension else f"the plug-in is not loaded; {CURE}"
        )
        raise RuntimeError(f"{DENSE}, or cannot say: {why}")
    refuse_dense(llm.collective_rpc("leank_report"), settings, config.model_config)
