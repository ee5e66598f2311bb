"""Settings that training runs of all recipes share, and their fingerprint.

Each group of the configuration is a class with its own checks. `check_outside` has those that depend on files and on
the model, of which no weights are loaded. The classes of stages, processes, model and logger stand where they are used.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, MinLen
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedConfig

from leank import backbone as backbones
from leank.backbone import Backbone, ModelConfig
from leank.data_gen import haystack
from leank.data_gen.tasks import Mixture, prompts, task
from leank.errors import naming
from leank.rotary import layer_ropes
from leank.shape import DecoderShape, check_config, sliding_window
from leank.typed import BadConfig, Checked, Count, Positive, Samples, Seed
from leank.wandb_log import LoggerConfig
from leank_train.running.parallel import TrainerConfig
from leank_train.stages import PruningConfig, StageConfig

NOT_IN_HASH = (
    "trainer", "logger", "validation", "resume", "workers", "name", "checkpoint_every", "requeues", "extra_ratios",
)  # fmt: skip
log = logging.getLogger("leank_train")


def need(fine: bool, message: str) -> None:
    """Raise BadConfig with the message unless all is fine."""
    if not fine:
        raise BadConfig(message)


@dataclass(frozen=True)
class DataConfig(Checked):
    """Training documents."""

    tasks: Mapping[str, Annotated[float, Ge(0)]]  # name of a task (data_gen.tasks) -> its share
    min_length: Positive  # min_length, max_length: tokens of document, question and answer; lengths are drawn uniformly
    max_length: Positive
    questions: Positive = 4  # questions per document; they share its prefill
    documents: Annotated[int, Ge(1), Le(4096)] = 1  # documents per step and rank
    calibration: Annotated[int, Ge(1), Le(4096)] = 16  # documents behind the closed form, and behind the mean keys
    essays: str | None = None  # text of the haystacks, see data_gen.haystack; None is the text shipped with the package
    text: str | None = None  # a text of the user's own, which the tasks text and quote read in place of the essays
    prompts: str | None = None  # JSONL of the user's own prompts, for the task prompts (`leank_train.replies`)

    def __post_init__(self) -> None:
        super().__post_init__()
        need(
            self.min_length <= self.max_length,
            f"min_length={self.min_length} is above data.max_length={self.max_length}; exchange them",
        )
        need(
            any(share > 0 for share in self.tasks.values()),
            f"tasks={dict(self.tasks)} has no task to draw: give shares from 0 on, at least one above 0",
        )
        drawn = {name for name, share in self.tasks.items() if share > 0}
        need(
            self.text is None or bool(drawn & {"text", "quote"}),
            f"text={self.text!r} has no effect: neither the task text nor quote has a share; take data=mixed or "
            "data=own_text, or add +data.tasks.text=1",
        )
        need(
            self.prompts is None or "prompts" in drawn,
            f"prompts={self.prompts!r} has no effect: the task prompts has no share; take data=own_prompts, or add "
            "+data.tasks.prompts=1",
        )
        need(
            self.prompts is not None or "prompts" not in drawn,
            f"tasks.prompts={self.tasks.get('prompts')} reads prompts of yours: set data.prompts=PATH of a JSONL file",
        )


@dataclass(frozen=True)
class ValidationConfig(Checked):
    """Validation at the end of a run."""

    samples: Annotated[int, Ge(0), Le(1_000_000)] = 8  # samples per task and length; 0 skips validation
    lengths: Sequence[Positive] = ()  # tokens of the samples
    tasks: Annotated[Sequence[str], MinLen(1)] | None = None  # names of tasks; None means RULER's eight NIAH tasks
    batch: Positive = 1  # documents that are prefilled and decoded together
    max_new_tokens: Positive | None = None  # tokens of a reply; None means the task's own
    calibration: Samples = 8  # samples for the static norm mask
    heldout: Annotated[int, Ge(0), Le(4096)] = 4  # documents of the tasks, and of text, for the verdict; 0: none

    def __post_init__(self) -> None:
        super().__post_init__()
        need(not self.samples or bool(self.lengths), "lengths is empty: give lengths, or set validation.samples=0")
        for key, values in (("lengths", self.lengths), ("tasks", self.tasks or ())):
            need(
                len({*values}) == len(values),
                f"{key}={list(values)} names one twice, whose samples would count twice; leave it out",
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig(Checked):
    """What any training run is told, conf/train/train.yaml; a recipe (`leank_train.recipes`) adds what it learns."""

    model: ModelConfig
    data: DataConfig
    pruning: PruningConfig
    stage1: StageConfig
    trainer: TrainerConfig
    validation: ValidationConfig
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    name: str = "leank"  # part of the run directory's name, and the W&B group
    seed: Seed = 1  # of data and initialisation
    resume: bool = True  # whether to go on with what the run directory holds
    checkpoint_every: Positive = 50  # steps between checkpoints
    workers: Annotated[int, Ge(0), Le(1024)] = 1  # processes that make data
    requeues: Count = 50  # how often a Slurm job may put itself back into the queue

    def __post_init__(self) -> None:
        super().__post_init__()
        pruning, data, validation = self.pruning, self.data, self.validation
        shortest = {"data.min_length": data.min_length}
        if validation.samples:
            shortest["validation.lengths"] = min(validation.lengths)
        for key, value in shortest.items():
            need(
                pruning.sink + pruning.window < value,
                f"pruning.sink + pruning.window = {pruning.sink + pruning.window} tokens leave no middle in contexts "
                f"of {key}={value}; lower pruning.window={pruning.window} or raise {key}",
            )
        need(
            not (self.trainer.shard_weights and validation.samples),
            f"validation.samples={validation.samples}: validation runs in one process, which has only its share of "
            "the weights where trainer.shard_weights=true; set validation.samples=0, and use "
            "python -m leank.eval on the mask",
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(group.steps for group in vars(self).values() if isinstance(group, StageConfig))

    def check_shape(self, shape: DecoderShape) -> None:
        """Raise ValueError for a model in whose heads this recipe cannot prune what it is told to."""
        dim, align = shape.head_dim, self.pruning.align
        need(dim % align == 0, f"pruning.align={align} does not divide head_dim={dim}; use a divisor such as 16")

    def mixture(self, backbone: Backbone, stage: str = "stage1", per_length: int = 1) -> Mixture:
        """Return the documents of "stage1" or "stage2"; `per_length` neighbours share a length, as in a step."""
        data = self.data
        return Mixture(
            dict(data.tasks), backbone.tokenizer, data.min_length, data.max_length,
            seed=self.seed * 2 + (stage == "stage2"), questions=data.questions, per_length=per_length,
            essays=data.essays, split="train", reserve=backbone.reserve, text=data.text, prompts=data.prompts,
        )  # fmt: skip


def plain(given: DictConfig | Mapping[str, object]) -> dict[str, object]:
    """Resolve a configuration into built-in types."""
    found: object = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else dict(given)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def check_outside(config: RunConfig) -> None:
    """Raise ValueError or FileNotFoundError for tasks, files or a model that settings name and do not fit."""
    data, validation, name = config.data, config.validation, config.model.name
    for where, names in (("data", data.tasks), ("validation", (validation.tasks or []) if validation.samples else [])):
        for one in names:
            with naming(f"{where}.tasks"):
                task(one)
    if data.essays is not None:
        haystack.sentences(data.essays, "train")
    if data.text is not None:
        with naming("data.text"):
            haystack.sentences(data.text, "train")
    if data.prompts is not None:
        prompts.read(data.prompts)
    model = backbones.load_config(name, config.model.overrides)
    kind = f"model.name={name} ({model.model_type})"
    with naming(f"model.name={name}"):
        shape = check_config(model)
    longest = {"data.max_length": data.max_length}
    if validation.samples:
        longest["validation.lengths"] = max(validation.lengths)
    check_positions(model, kind, longest)
    for rope in layer_ropes(model):
        check_rope(config, rope, kind)
    config.check_shape(shape)


def check_positions(model: PreTrainedConfig, kind: str, longest: dict[str, int]) -> None:
    """Raise BadConfig for sequences that are longer than the model's positions or its sliding window."""
    limit = getattr(model, "max_position_embeddings", None)
    window = sliding_window(model)
    for key, value in longest.items():
        need(
            limit is None or value <= limit,
            f"{key}={value} is beyond the {limit} positions of {kind}; lower it, or extend the model with "
            "model.overrides (see conf/train/experiment/qwen_70pct_yarn.yaml)",
        )
        need(
            window is None or value <= window,
            f"{key}={value} is beyond the sliding_window={window} of {kind}, and such layers have no middle to prune; "
            "lower it, or choose a model without sliding_window",
        )


def check_rope(config: RunConfig, rope: Mapping[str, object], kind: str) -> None:
    """Raise BadConfig for rotary positions that the trainer or validation cannot use."""
    need(
        config.trainer.sequence_parallel == 1 or rope.get("rope_type") not in ("dynamic", "longrope"),
        f"trainer.sequence_parallel={config.trainer.sequence_parallel}: the RoPE of {kind} (rope_type="
        f"{rope.get('rope_type')}) depends on the longest position that a process has; set it to 1",
    )
    partial = rope.get("partial_rotary_factor", 1.0)
    need(
        partial == 1.0 or not config.validation.samples,
        f"validation.samples={config.validation.samples}: {kind} rotates only part of a head "
        f"(partial_rotary_factor={partial}), so there is no lowest-frequency mask to compare with; "
        "set validation.samples=0",
    )


def fingerprint(given: DictConfig | Mapping[str, object]) -> str:
    """Return twelve hexadecimal digits that change with every setting that changes the mask."""
    kept = {key: value for key, value in plain(given).items() if key not in NOT_IN_HASH}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]
