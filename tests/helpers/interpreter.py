"""Changes of Triton's interpreter, in which tests on a CPU run kernels.

It replaces the functions of triton.language anew at every call of a kernel's function, which takes a third of a test's
time. Once in a launch is enough.
"""

import functools
import inspect
from collections.abc import Callable

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _replaced(function: Callable[..., object]) -> frozenset[str]:
    """The modules in which a kernel's function finds what is replaced."""
    modules = filter(inspect.ismodule, function.__globals__.values())
    return frozenset(module.__name__ for module in modules if module in (tl, tl.core))


def replace_once_a_launch() -> None:
    """Change the interpreter of this process for good; one that is made otherwise stays as it is."""
    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope")):
        return
    patch, done = interpreter._patch_lang, set()

    def once(function: Callable[..., object]) -> interpreter._LangPatchScope:
        modules, launch = _replaced(function), not done
        if modules <= done:
            return interpreter._LangPatchScope()
        scope = patch(function)
        done.update(modules)
        if launch:
            restore = scope.restore

            def end() -> None:
                done.clear()
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = once


def take_numpys_scalars() -> None:
    """Change the interpreter of this process for good: Triton 3.6's calls int() on arrays, which newer NumPy refuses.

    The arrays have the shape [1].
    """
    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
