"""Tokenizers of three kinds, made on the spot: what the data generators must be exact with."""

from functools import lru_cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from leank.data_gen import haystack
from leank.shipped import resolve

KINDS = ("reference", "gpt4", "sentencepiece")
# words with one character before them, numbers by three, and line ends that join the punctuation before them
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@lru_cache
def tokenizer(kind: str) -> Any:
    """One of `KINDS`: the reference model's, a byte-level BPE split like GPT-4's, a Unigram model on "▁" words."""
    if kind == "reference":
        return AutoTokenizer.from_pretrained(resolve("reference"))
    text = [*haystack.sentences(None, "train")[:3000], *(haystack.NOISE_LINE + "\n" for _ in range(50))]
    if kind == "gpt4":
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_GPT4), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        bpe.train_from_iterator(
            text, trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False)
        )
        return PreTrainedTokenizerFast(tokenizer_object=bpe)
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.NFKC()
    unigram.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    unigram.decoder = decoders.Metaspace(prepend_scheme="always")
    letters = [chr(c) for c in range(32, 127)] + ["\n"]
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|assistant|>"]
    unigram.train_from_iterator(
        text,
        trainers.UnigramTrainer(
            vocab_size=4000, initial_alphabet=letters, special_tokens=special, unk_token="<unk>", n_sub_iterations=1,
            show_progress=False,
        ),
    )  # fmt: skip
    unigram.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", unigram.token_to_id("<s>")), ("</s>", unigram.token_to_id("</s>"))],
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=unigram, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = _CHAT
    return fast
