"""The entry point of the plug-in: vLLM calls `register` in each of its processes.

Without a mask it changes nothing. With one, the configuration of the server is checked before any weights load, and the
backend of this package takes the place of vLLM's own.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from leank.eval.serving.guard import WORKER
from leank.eval.serving.settings import ServerSettings, check_config, check_version

BACKEND = "leank.eval.serving.backend.PrunedBackend"
_exported: dict[str, tuple[str | None, str]] = {}  # variable -> what the user gave, what the last engine exported


def register() -> None:
    """Read the settings wherever vLLM makes a configuration, and register the backend if they name a mask."""
    from vllm.engine.arg_utils import EngineArgs

    if not hasattr(EngineArgs.create_engine_config, "leank"):
        EngineArgs.create_engine_config = _checked(EngineArgs.create_engine_config)
    if ServerSettings.find(None) is not None:
        try:
            check_version()
        except ValueError:  # vLLM would drop the plug-in in silence; the configuration is refused instead
            return
        use_backend()


def use_backend() -> None:
    """Let vLLM choose the backend and the manager of this package."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from leank.eval.serving.manager import RestManager, RestSpec

    for backend in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):  # the latter on a GPU
        register_backend(backend, BACKEND)
    register_all_kvcache_specs(None)  # vLLM registers its own only while the registry is empty
    KVCacheSpecRegistry.register(RestSpec, RestManager)


def _take_back() -> None:
    """Let the environment say again what the user gave: an engine must not be told the settings of the one before."""
    for name, (given, exported) in _exported.items():
        if os.environ.get(name) == exported:
            os.environ.pop(name)
            os.environ.update({} if given is None else {name: given})


def _checked(create: Callable[..., Any]) -> Callable[..., Any]:
    """EngineArgs.create_engine_config with the plug-in's settings read before it and checked after it."""

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _take_back()
        settings = ServerSettings.find(self.additional_config)
        if settings is None:
            if _exported:  # the backend that its layers would get is that of a mask
                raise ValueError("an engine of this process has a mask: start one without in a process of its own")
            return create(self, *args, **kwargs)
        check_version()
        _exported.update({name: (os.environ.get(name), value) for name, value in settings.export().items()})
        os.environ.update(settings.export())  # for the processes that vLLM starts
        use_backend()
        self.worker_extension_cls = self.worker_extension_cls or WORKER
        config = create(self, *args, **kwargs)
        check_config(config, settings)
        config.model_config.model_arch_config.rswa_window = settings.window  # vLLM then tells the lengths of prompts
        return config

    create_engine_config.leank = True  # type: ignore[attr-defined]
    return create_engine_config
