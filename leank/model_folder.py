"""A folder with a model: a digest of its contents. No weights are loaded."""

import hashlib
from pathlib import Path

# what changes answers: weights, the model's and the generation's config, tokenizer and chat template
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
TEXTS = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges*", "*.model", "*.tiktoken", "*chat_template*", "additional_chat_templates/*"),
)
WHOLE = 64 << 20  # bytes; a file of at most this size is read to its end
BLOCKS, BLOCK = 256, 4096  # number and bytes of the blocks that are read of a larger file, from its start to its end


def folder_digest(folder: Path) -> str:
    """Sixteen hexadecimal digits of SHA-256 over the files that answers depend on, by name, size and contents.

    A file of more than 64 MiB, such as a shard of large weights, counts by its size, its safetensors header and 256
    blocks of 4 KiB at even distances. Every training changes some of those, and 140 GB take a second or two. A change
    of a few numbers between the blocks goes unseen.
    """
    whole = hashlib.sha256()
    for name, file in _files(folder):
        whole.update(f"{name}\0{file.stat().st_size}\0{_digest(file)}\n".encode())
    return whole.hexdigest()[:16]


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Name and path of every file that answers depend on, in order."""
    found = {file for pattern in (*WEIGHTS, *TEXTS) for file in folder.glob(pattern) if file.is_file()}
    return sorted((file.relative_to(folder).as_posix(), file) for file in found)


def _digest(file: Path) -> str:
    """SHA-256 of all bytes of a small file, or of some bytes of a large one."""
    size, found = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as content:
        if size <= WHOLE:
            return hashlib.file_digest(content, "sha256").hexdigest()
        if file.suffix == ".safetensors":
            found.update(content.read(min(8 + int.from_bytes(content.read(8), "little"), WHOLE)))
        for number in range(BLOCKS):
            content.seek((size - BLOCK) * number // (BLOCKS - 1))
            found.update(content.read(BLOCK))
    return found.hexdigest()
