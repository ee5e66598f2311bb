"""Settings of the replay."""

from dataclasses import dataclass
from typing import Annotated

from leank.eval.inference.prompts import SPECIALS
from leank.typed import BadConfig, Checked, Count, OneOf, Positive

COMPRESS = ("after_question", "before_question")


@dataclass(frozen=True)
class Settings(Checked):
    """Settings of the replay."""

    # "after_question" compresses the whole prompt, "before_question" only what stands before the question
    compress: Annotated[str, OneOf(*COMPRESS)] = "after_question"
    batch_size: Positive = 1  # samples of one task and length that are decoded together
    prefill_chunk: Positive | None = None  # prompt tokens per prefill call; None reads the prompt in one call
    # max_new_tokens, min_new_tokens: bounds of a reply that replace the benchmark's; None keeps the benchmark's
    max_new_tokens: Positive | None = None
    min_new_tokens: Count | None = None
    # tokens of dense's reply at which every method's next-token distribution is compared with dense's, see
    # eval.run.fidelity; 0 compares none
    fidelity: Count = 0
    # share of dense bytes, or label of a method, that every method is brought to; see eval.run.build
    match: float | str | None = None
    # "i/n" does every n-th batch, beginning with batch i (0 is the first), for several GPUs or a Slurm array
    shard: str = "0/1"
    # how special tokens in a sample's own text are read, see eval.inference.prompts.encode
    specials: Annotated[str, OneOf(*SPECIALS)] = "text"

    @property
    def numbered_shard(self) -> tuple[int, int]:
        """Number of this shard and number of shards. Raises ValueError if there is no such shard."""
        number, _, count = self.shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise ValueError(f"shard={self.shard!r} is no shard; the first of four is shard=0/4, the last shard=3/4")
        return int(number), int(count)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.numbered_shard
        if self.min_new_tokens and self.max_new_tokens and self.min_new_tokens > self.max_new_tokens:
            raise BadConfig(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
