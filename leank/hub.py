"""Masks on the Hugging Face hub: `hf://org/name` is read wherever a mask's path is, and a folder of a mask is shared.

    ChannelMask.from_pretrained("org/llama31-70pct", revision="v1")     # or mask=hf://org/llama31-70pct@v1
    mask.push_to_hub("org/llama31-70pct", private=True)
    model.generate(**inputs, custom_generate="org/llama31-70pct", trust_remote_code=True)

A repository holds mask.safetensors, a card (README.md) made of the mask's metadata, and custom_generate/generate.py,
which decodes from a cache that the mask prunes. Only that last call runs code from the hub; reading a mask runs none.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from leank.errors import in_one_line
from leank.files import write_text

PREFIX = "hf://"
FILE = "mask.safetensors"
GENERATE = '''"""generate() from a K cache that keeps the channels of this repository's mask."""

MASK = {source!r}


def generate(model, mask=MASK, sink=None, window=None, **kwargs):
    """Decode under the mask. leank.compressed_cache explains mask, sink and window; the rest is model.generate()'s."""
    from leank import compressed_cache

    if mask is None:
        raise ValueError("mask=None would prune nothing; give mask=PATH, such as the folder of this file's mask")
    return compressed_cache(model, mask, sink, window).generate(model, **kwargs)
'''


def named(model: object) -> dict[str, str | None]:
    """Return what a card says of a mask's model: "model", its name without the folders of a path, and "base".

    base: "org/name" on the hub, None for a folder and for a model that has a name here alone.
    """
    if not isinstance(model, str):
        return {"model": None, "base": None}
    parts = model.replace("\\", "/").rstrip("/").split("/")
    path = model[:1] in ("/", ".", "~") or len(parts) > 2 or "\\" in model or Path(model).is_dir()
    return {"model": parts[-1] if path else model, "base": model if len(parts) == 2 and not path else None}


def download(name: str, revision: str | None = None) -> Path:
    """Return the local copy of a mask on the hub; it is fetched if it is not in the hub's cache.

    name: "org/name", with or without "hf://", and "@revision" at its end.
    revision: branch, tag or commit; the default branch if nothing names one.
    Raises FileNotFoundError that says why there is none.
    """
    from huggingface_hub import hf_hub_download  # after --help: a second to import

    repo, _, named = name.removeprefix(PREFIX).partition("@")
    try:
        return Path(hf_hub_download(repo, FILE, revision=revision or named or None, library_name="leank"))
    except Exception as error:  # of the hub's client, or of its HTTP library, which changes between its versions
        raise FileNotFoundError(
            f"mask={PREFIX}{repo}: the hub gave no {FILE} ({in_one_line(str(error))[:200]}); check name, revision and "
            "network, or log in with `hf auth login`"
        ) from error


def write_folder(folder: Path, metadata: Mapping[str, object], facts: Mapping[str, object], source: str | None) -> None:
    """Write what stands beside a mask in its repository: the card and custom_generate/.

    metadata, facts: of the mask, for the card.
    source: what generate.py reads the mask from, as `compressed_cache` takes it; None lets its caller give it.
    Raises ValueError for a source that no repository can have as its name: the card has code with it.
    """
    from huggingface_hub.utils import validate_repo_id
    from jinja2 import Environment

    if source is not None:
        validate_repo_id(source.removeprefix(PREFIX))
    template = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=True).from_string(
        files("leank").joinpath("card.md.jinja").read_text(encoding="utf-8")
    )
    name = (source or "hf://ORG/NAME").removeprefix(PREFIX)
    write_text(folder / "README.md", template.render(**facts, metadata=metadata, name=name) + "\n")
    (folder / "custom_generate").mkdir(exist_ok=True)
    write_text(folder / "custom_generate" / "generate.py", GENERATE.format(source=source))
    write_text(folder / "custom_generate" / "requirements.txt", "leank\n")


def upload(folder: Path, repo: str, private: bool | None, message: str, revision: str | None) -> str:
    """Put a folder into a repository, made if needed; returns the commit's address. Raises ValueError with why."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="leank")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, revision=revision)
    except Exception as error:  # of the hub's client, or of its HTTP library, which changes between its versions
        said = in_one_line(str(error))[:200]
        raise ValueError(
            f"the hub does not take {repo} ({said}); check name and network, and log in: hf auth login"
        ) from error
    return str(done.commit_url)
