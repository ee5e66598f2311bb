"""The frozen decoder that a mask is learned for: the shipped reference model, a folder, or a Hugging Face name."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from leank.data_gen.chat import template as chat_template
from leank.data_gen.chat import template_tokens
from leank.errors import in_one_line, naming, out_of_memory
from leank.shape import DecoderShape, check_decoder, kv_shape
from leank.shipped import resolve
from leank.typed import BadConfig, Checked, OneOf, refuse_unknown, shown

MOST_LAYERS = 4096  # no model has more, and transformers would build them for hours
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ModelConfig(Checked):
    """Settings of the model, conf/shared/model.

    name: one of `NAMED`, a folder, or a hub name.
    dtype: type of the weights; "auto" is bfloat16 on a GPU and float32 on a CPU.
    chat: whether the chat template wraps prompts; None means that it does if the tokenizer has one.
    overrides: values that replace those of the model's own config, such as YaRN's rope_parameters.
    """

    name: str = "reference"
    dtype: Annotated[str, OneOf(*DTYPES)] = "auto"
    chat: bool | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Backbone:
    """A frozen model and its tokenizer; before, after: the chat template around a prompt, empty for a base model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    before: str = ""
    after: str = ""

    @property
    def shape(self) -> DecoderShape:
        """The shape [L, H, D] of alpha and of a mask."""
        return kv_shape(self.model.config)

    def encode_context(self, text: str, framed: bool = False) -> list[int]:
        """Tokenise a document, together with what stands before it in a prompt; framed: that is in the text already."""
        if framed:
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = self.tokenizer(self.before + text, add_special_tokens=not self.before)["input_ids"]
        eos = self.tokenizer.eos_token_id
        return ids[:-1] if not self.before and ids and ids[-1] == eos else ids  # some tokenizers end every text with it

    def encode_question(self, question: str, answer_prefix: str, framed: bool = False) -> list[int]:
        """Tokenise what follows the document: the question, the assistant's header, the start of the reply.

        framed: whether the question holds the header already.
        """
        return self.encode(question + ("" if framed else self.after) + answer_prefix)

    def encode(self, text: str) -> list[int]:
        """Tokenise a piece in the middle of a prompt: SentencePiece would put a blank before it if it stood alone."""
        line, after, alone = self.tokenizer(["\n", f"\n{text}", text], add_special_tokens=False)["input_ids"]
        return after[len(line) :] if after[: len(line)] == line else alone

    @property
    def reserve(self) -> int:
        """Tokens of a document's length to leave for the chat template and for the seams between the pieces."""
        return template_tokens(self.tokenizer) + 2 if self.before or self.after else 0


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Return the end-of-text ids that generate() uses: the generation config's, else the tokenizer's."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Name the model in an error of transformers, whose kinds have nothing in common, and say what to do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BadConfig) or out_of_memory(error):
            raise
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(
            f"model.name={name!r} cannot be loaded ({said_by(error)}). Set model.name to a folder with config.json, "
            "*.safetensors and the tokenizer files, copied again if they are damaged, or log in to the hub for gated "
            "weights"
        ) from error


def _refuse_other_files(name: str) -> None:
    """Raise BadConfig, saying how to make a model of it, for a path without config.json.

    Raises FileNotFoundError for one that is not there and cannot be a name of the hub.
    """
    path = Path(name).expanduser()
    said, given = f"model.name={name!r}", str(path)
    ggufs = [path] if path.suffix == ".gguf" and path.is_file() else sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() or not (path.exists() or ggufs):
        if not path.exists() and (name[:1] in ("/", ".", "~") or name.count("/") > 1 or path.suffix == ".gguf"):
            raise FileNotFoundError(
                f"{said}: there is no such file or folder; give a folder with config.json, *.safetensors and the "
                "tokenizer files, or org/name"
            )
        return
    if ggufs:
        where = f"from_pretrained({str(ggufs[0].parent)!r}, gguf_file={ggufs[0].name!r}).save_pretrained('converted')"
        raise BadConfig(
            f"{said} is a GGUF file; convert it with transformers (pip install gguf accelerate): "
            f"AutoModelForCausalLM.{where}; AutoTokenizer.{where}"
        )
    if (path / "adapter_config.json").is_file():
        raise BadConfig(
            f"{said} is an adapter and no model; merge it: peft.AutoPeftModelForCausalLM.from_pretrained({given!r})"
            ".merge_and_unload().save_pretrained('merged'), and save the base model's tokenizer there"
        )
    what = "is a file" if path.is_file() else "has no config.json"
    raise BadConfig(f"{said} {what}; give a folder with config.json, *.safetensors and the tokenizer files")


def load_config(name: str, overrides: Mapping[str, object] | None = None) -> PreTrainedConfig:
    """Load the model's config, without weights; name, overrides: see `ModelConfig`.

    Raises FileNotFoundError without one, ValueError for a damaged one, a file that is none, or a wrong override.
    """
    folder = resolve(name)
    _refuse_other_files(folder)
    with _loading(name):
        config = AutoConfig.from_pretrained(folder)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            more = config.get_text_config(decoder=True) is not config and not config.is_encoder_decoder
            cure = "takes more than text: commands load language models alone, compressed_cache() a model in memory"
            cure = cure if more else "is no decoder of transformers: choose one such as Llama"
            raise BadConfig(f"model.name={name!r} ({config.model_type}) {cure}")
        refuse_unknown(overrides or {}, [*config.to_dict(), *config.attribute_map], "model.overrides.")
        for key, value in (overrides or {}).items():
            if key == "rope_parameters":
                value = _changed_rope(getattr(config, key, None) or {}, value, f"model.overrides.{key}")
            setattr(config, key, value)
        if (wrong := next(_wrong(config), None)) is not None:
            raise BadConfig(f"model.name={name!r}: {wrong}; copy its config.json again, or mend model.overrides")
    return config


def _wrong(config: PreTrainedConfig) -> Iterator[str]:
    """Yield what is wrong with settings that transformers takes."""
    text = config.get_text_config(decoder=True)
    layers, window = getattr(text, "num_hidden_layers", 1), getattr(text, "sliding_window", None)
    if not 1 <= layers <= MOST_LAYERS:
        yield f"num_hidden_layers={layers} of its config is not in 1 to {MOST_LAYERS}"
    sliding = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    if (sliding or window is not None) and not (isinstance(window, int) and window >= sliding):  # Qwen2-MoE has 0
        yield f"sliding_window={shown(window)} of its config is no number of tokens"
    if not isinstance(config.output_hidden_states, bool | None):
        yield f"output_hidden_states={shown(config.output_hidden_states)} of its config is neither true nor false"
    groups: list[tuple[str, object]] = [("", config.to_dict())]
    for where, group in groups:
        if isinstance(group, Mapping):
            groups += [(f"{where}.{key}" if where else key, value) for key, value in group.items()]
        elif isinstance(group, float) and not math.isfinite(group):  # in lists infinity is a bound, as of a time step
            yield f"{where}={group} of its config is not finite"


def said_by(error: Exception) -> str:
    """Return the kind of an error of transformers, and what it says, in one line."""
    return f"{type(error).__name__}: {in_one_line(str(error))[:200]}"


def _changed_rope(before: Mapping[str, object], given: object, where: str) -> dict[str, object]:
    """Return parameters of RoPE, of which some are given anew; a model may have them for each type of its layers."""
    if not isinstance(given, Mapping):
        raise BadConfig(f"{where}={given!r} must be a mapping, e.g. {{rope_type: yarn, factor: 4}}")
    layers = {key: value for key, value in before.items() if isinstance(value, Mapping)}
    refuse_unknown(given, list(layers) or [*RopeParameters.__annotations__, *before], f"{where}.")
    if layers:
        new = {key: _changed_rope(layers[key], value, f"{where}.{key}") for key, value in given.items()}
        return {**before, **new}
    found = {**before, **given}
    kind = found.get("rope_type", "default")
    if kind not in (kinds := ["default", *ROPE_INIT_FUNCTIONS]):
        raise BadConfig(f"{where}.rope_type={shown(kind)} must be one of {', '.join(kinds)}")
    idle = [key for key in given if key not in ("rope_type", "rope_theta", "partial_rotary_factor")]
    if kind == "default" and idle:
        raise BadConfig(f"{where}.{idle[0]} has no effect with rope_type=default; give a rope_type, too, such as yarn")
    return found


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; raise FileNotFoundError if there is none, ValueError for a damaged one."""
    with _loading(name):
        found = AutoTokenizer.from_pretrained(resolve(name))
        found("a")  # a wrong model_max_length shows here
    return found


def torch_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Return the type of weights that one of `DTYPES` means on a device. Raises BadConfig for another."""
    if dtype not in DTYPES:
        raise BadConfig(f"dtype={shown(dtype)} is unknown; choose from {', '.join(DTYPES)}")
    return getattr(torch, ("bfloat16" if device.type == "cuda" else "float32") if dtype == "auto" else dtype)


def usable_device(device: str | torch.device, setting: str = "device") -> torch.device:
    """Return a device that holds tensors here. Raises BadConfig, with the name of the setting, for another."""
    try:
        found = torch.device(device)
        if found.type == "cuda":  # asked without making a context there, so that processes can still be forked
            there = (found.index or 0) < torch.cuda.device_count()
        else:
            there = not torch.empty(1, device=found).is_meta  # tensors on meta hold no numbers
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):
        there = False
    if not there:
        raise BadConfig(
            f"{setting}={shown(str(device))} is no device of this machine, which has {torch.cuda.device_count()} of "
            "CUDA; give cpu, cuda or cuda:1"
        )
    return found


def load(
    name: str,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    chat: bool | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Backbone:
    """Load and freeze a decoder; name, dtype, chat, overrides: see `ModelConfig`.

    device: where the weights go. Raises FileNotFoundError if weights or tokenizer are missing, ValueError for a device
    that is not here, for a model that cannot be pruned, or whose files do not hold every weight.
    """
    device = usable_device(device)
    kind = torch_dtype(dtype, device)
    config = load_config(name, overrides)
    tokenizer = load_tokenizer(name)  # before the weights, which take longer
    found = _with_tokenizer(_weights(name, config, kind), tokenizer, name, chat)
    found.model.to(device)  # type: ignore[arg-type]  # transformers wraps Module.to without its types
    found.model.eval().requires_grad_(False)
    return found


def outline(name: str, chat: bool | None = None, overrides: Mapping[str, object] | None = None) -> Backbone:
    """Return what `load` does without weights: on the meta device, for checks. Raises what `load` raises."""
    return _with_tokenizer(without_weights(name, load_config(name, overrides)), load_tokenizer(name), name, chat)


def without_weights(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model on the meta device. Raises ValueError for a config that no decoder of transformers takes."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of a class of transformers, which may do anything with a value
        said = f"model.name={name!r} has a config that no decoder of transformers takes ({said_by(error)})"
        raise ValueError(f"{said}; choose a decoder such as Llama, or copy it again") from error


def _with_tokenizer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, chat: bool | None
) -> Backbone:  # fmt: skip
    known, rows = tokenizer.vocab_size, len(model.get_input_embeddings().weight)  # type: ignore[arg-type]  # a tensor
    if known > rows:
        raise ValueError(
            f"model.name={name!r} has embeddings of {rows} tokens, and its tokenizer knows {known}: it is another "
            "model's; copy the right tokenizer files"
        )
    with naming(f"model.name={name!r} cannot be used"):
        check_decoder(model)
    wrap = tokenizer.chat_template is not None if chat is None else chat
    before, after = chat_template(tokenizer) if wrap else ("", "")
    return Backbone(model, tokenizer, name, before, after)


def _weights(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    with _loading(name):
        loaded: object = AutoModelForCausalLM.from_pretrained(
            resolve(name), config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    assert isinstance(loaded, tuple)  # transformers types it as the model alone
    model, report = loaded
    made_up = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if made_up:  # transformers fills them with random numbers, and says so in a warning
        raise ValueError(
            f"model.name={name!r} has no weights of the right shape for {len(made_up)} of its tensors, such as "
            f"{min(made_up)}; copy the folder again, or leave out the model.overrides that change its shape"
        )
    return model
