"""vLLM's own server with a mask, which starts only if every worker prunes.

    leank-serve /path/to/weights --mask outputs/mine --port 8000 --max-model-len 32768

MASK is a mask.safetensors, a training run's folder, a published .pth, or hf://org/name. Behind it stand the options of
`vllm serve`. On a GPU the attention backend is chosen here. /metrics has leank_block_bytes and leank_dense_block_bytes.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from leank.cli import ending
from leank.errors import in_one_line

if TYPE_CHECKING:
    from leank.eval.serving.guard import Report
    from leank.eval.serving.settings import ServerSettings


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        "leank-serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model")
    parser.add_argument("--mask", required=True)
    parser.add_argument(
        "--sink", help="tokens kept whole; by default that of the mask's training, 64 for a layout of bits"
    )
    parser.add_argument("--window", help="the same, 256 for a layout of bits")
    given, options = parser.parse_known_args()
    with ending("leank-serve", lambda: "no request is kept"):
        if find_spec("vllm") is None:
            raise ValueError("vLLM is not installed here; docs/use/serving.md says how")
        from leank.eval.cache.storage.segment import PAGE  # seconds
        from leank.eval.serving.settings import NAMES, ServerSettings, check_version
        from leank.mask import ChannelMask

        check_version()
        own = {name: value for name in NAMES if (value := getattr(given, name)) is not None}
        settings = ServerSettings.find({"leank": own})
        assert settings is not None
        os.environ.update(settings.export())
        if ChannelMask.load(settings.mask).precision is not None and not sets(options, "--block-size"):
            options += ["--block-size", str(PAGE)]  # vLLM's own is 16 on a GPU, less than a page of codes
        try:
            serve(["--model", given.model, *options], settings)
        except RuntimeError as error:
            sys.exit(f"leank-serve: {_cause(error)}")


def _cause(error: RuntimeError) -> str:
    """What a user can do about a RuntimeError; vLLM's own of an engine that did not start says no more than that."""
    said = in_one_line(str(error))
    if not said.startswith("Engine core initialization failed"):
        return said
    return (
        f"the engine did not start, and the first error in the log above says why ({said}); if it lacks memory, take "
        "a smaller --max-model-len or --max-num-seqs, a larger --gpu-memory-utilization (on a CPU "
        "VLLM_CPU_KVCACHE_SPACE), or more ranks"
    )


def sets(options: list[str], name: str) -> bool:
    """Whether options of `vllm serve` give a value to the one of this name, or a file does that they may name."""
    return any(option.replace("_", "-").split("=")[0] in (name, "--config") for option in options)


def serve(options: list[str], settings: ServerSettings) -> None:
    """Run vLLM's server until it is stopped.

    options: of `vllm serve`.

    Raises RuntimeError if a worker does not prune or ends by itself, ValueError for what cannot be served.
    """
    import uvloop
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from leank.eval.serving.guard import WORKER

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.common.startup import cli_env_setup
    except ModuleNotFoundError:  # before 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    if current_platform.is_cuda():
        refuse_unregistered()
        options = [*options, "--attention-backend", "CUSTOM"]
    args = make_arg_parser(FlexibleArgumentParser("leank-serve")).parse_args(options)
    if args.worker_extension_cls:
        raise ValueError(
            f"--worker-extension-cls {args.worker_extension_cls} would take the place of {WORKER}, which tells whether "
            "a worker prunes; drop it"
        )
    args.worker_extension_cls = WORKER
    validate_parsed_serve_args(args)
    if args.headless or getattr(args, "grpc", False) or (args.api_server_count or 1) > 1:
        raise ValueError("it is one HTTP server; drop --headless, --grpc and --api-server-count")
    uvloop.run(_serve(args, settings))


def refuse_unregistered() -> None:
    """Raise RuntimeError unless this process's vLLM has the backend of this package, which the plug-in registers.

    `refuse_dense` asks the workers; on a GPU they would not start without the backend, and vLLM would not say why.
    """
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from leank.eval.serving.guard import CURE
    from leank.eval.serving.plugin import BACKEND

    load_general_plugins()
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden() or custom.get_path() != BACKEND:
        raise RuntimeError(f"vLLM has no attention backend for the mask, because the plug-in is not loaded; {CURE}")


async def _serve(args: argparse.Namespace, settings: ServerSettings) -> None:
    from vllm.entrypoints.launchers.api_server.entry import build_and_serve, build_async_engine_client
    from vllm.entrypoints.launchers.launcher import setup_server

    from leank.eval.serving.guard import refuse_dense

    signal.signal(signal.SIGTERM, _interrupt)  # until vLLM's server has handlers of its own
    address, socket = setup_server(args, reuse_port=False)
    try:
        async with build_async_engine_client(args) as client:
            model = client.vllm_config.model_config
            _tell(*refuse_dense(await _reports(client), settings, model), settings.mask)
            asked = _stops(client)
            stopped = await build_and_serve(client, address, socket, args)
            died = client.errored and not asked
        await stopped
        if died:  # vLLM ends as if somebody had stopped it
            raise RuntimeError(
                "the process of the engine has ended by itself, so no request is answered any more; was it killed, or "
                "out of memory? The log above says more"
            )
    finally:
        socket.close()


async def _reports(client: Any) -> list[Report]:
    """What every worker of every engine says; with data parallelism, `collective_rpc` has the first engine's alone."""
    if (every := getattr(client.engine_core, "call_utility_all_async", None)) is not None:
        of_engines = await every("collective_rpc", "leank_report", None, (), None)
        return [report for of_engine in of_engines for report in of_engine]
    if client.vllm_config.parallel_config.data_parallel_size > 1:
        raise ValueError("this vLLM cannot ask every engine of --data-parallel-size; take 1, or vLLM 0.32 or later")
    found: list[Report] = await client.collective_rpc("leank_report")
    return found


def _stops(client: Any) -> list[object]:
    """A list that is no longer empty once vLLM has been told to stop its engine, as by SIGTERM."""
    asked: list[object] = []
    shutdown = client.shutdown

    @functools.wraps(shutdown)
    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(True)
        return shutdown(*args, **kwargs)

    client.shutdown = noted
    return asked


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _tell(block_bytes: int, dense: int, mask: str) -> None:
    """Put the bytes of a block of tokens among the server's metrics."""
    from prometheus_client import Gauge

    Gauge("leank_block_bytes", "Bytes of a block of tokens under the mask.", ["mask"]).labels(mask).set(block_bytes)
    Gauge("leank_dense_block_bytes", "Bytes of a block of tokens of the dense model.").set(dense)


if __name__ == "__main__":
    main()
