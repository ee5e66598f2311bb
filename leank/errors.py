"""What an error says: its message in one line or behind a name, and whether memory is used up."""

from collections.abc import Iterator
from contextlib import contextmanager

NO_MEMORY = (
    "can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)  # what PyTorch says on a CPU, and what it and CUDA's libraries say on a GPU  # fmt: skip


def in_one_line(text: str) -> str:
    """Join the lines of a message."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


@contextmanager
def naming(what: object) -> Iterator[None]:
    """Put `what`, such as a setting, before what a ValueError or a FileNotFoundError says."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        kind = ValueError if isinstance(error, ValueError) else FileNotFoundError
        raise kind(f"{what}: {error}") from error


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory, of the CPU or of a GPU, is used up."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
    )
