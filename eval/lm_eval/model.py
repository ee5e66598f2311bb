"""A model with a compressed cache as lm-evaluation-harness sees it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from leank.eval.benchmarks.base import Row, cut_at_stop
from leank.eval.inference.models import load_model
from leank.eval.inference.prefill import extend
from leank.eval.inference.prompts import Prompt
from leank.eval.run.build import build_methods, build_model, composed, warn_of_spans
from leank.eval.run.replay import Compression, Replay, Warnings

Scored = tuple[float, bool]
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
GREEDY = (*LENGTHS, "until", "do_sample", "temperature", "top_p", "top_k", "min_p", "seed")  # the last have no effect


def check_greedy(options: Mapping[str, Any]) -> None:
    """Raise ValueError for generation_kwargs of a task that ask for other replies than those of greedy decoding."""
    hot, sample = options.get("temperature"), options.get("do_sample")
    if (float(hot or 0) > 0) if sample is None else sample and (hot is None or float(hot) > 0):
        raise ValueError(f"generation_kwargs={options} asks for sampling; decoding here is greedy: do_sample=false")
    for name, value in options.items():
        if name not in GREEDY and value not in (None, 0, 1):  # those switch nothing on, or no more than usual
            raise ValueError(
                f"generation_kwargs has {name}={value!r}, which greedy decoding does not heed; leave it out"
            )


@register_model("leank")
class CompressedLM(TemplateLM):
    """A model whose prompts are compressed by one method before it answers.

    generate_until decodes greedily, as the replay does; the first token comes from the dense prefill. loglikelihood
    prefills and compresses the context without its last token. Then that token and the continuation are read through
    the cache, one at a time, so that even a continuation of one token depends on the method. A text without a context
    (perplexity) is read that way from its first token on.
    """

    def __init__(
        self, method: str = "dense", batch_size: int | str = 1, max_batch_size: int | None = None,
        device: str | None = None, max_gen_toks: int = 256, **settings: object,
    ) -> None:  # fmt: skip
        """Load the model and check the settings. Raises ValueError or FileNotFoundError as python -m leank.eval does.

        method: one name of conf/method; settings: of conf/eval/eval.yaml, by their dotted names
        batch_size: prompts that are decoded together; "auto" means 1. max_batch_size: lm_eval's, not used
        device: where the model is put; None leaves it to `model.device`
        max_gen_toks: tokens of a reply where the task names none
        """
        super().__init__()
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 1  # "auto": one at a time
        overrides = [f"method=[{method}]", *(f"{name}={value}" for name, value in settings.items())]
        if device and (torch.cuda.is_available() or not device.startswith("cuda")):  # lm_eval asks for cuda:0 anywhere
            overrides.append(f"++model.device={device}")
        config = composed(overrides)
        model, self.settings, model_config, self.tokenizer = build_model(config)
        if self.settings.match is not None:
            raise ValueError(
                f"match={self.settings.match} needs all prompts beforehand, which lm_eval does not give; set what the"
                " method keeps by its own setting"
            )
        if self.settings.fidelity:
            raise ValueError(f"fidelity={self.settings.fidelity} is not in lm_eval's results; use python -m leank.eval")
        if self.settings.sampling.temperature:
            raise ValueError(
                f"sampling.temperature={self.settings.sampling.temperature} is not taken by lm_eval's model, whose "
                "replies are greedy; use python -m leank.eval"
            )
        methods = build_methods(config, model_config, self.tokenizer)
        if len(methods) != 1:
            raise ValueError(f"method={method} stands for {len(methods)} methods, and lm_eval takes one at a time")
        (self.method,) = methods
        warn_of_spans(methods)
        self.model = load_model(model)
        self.replay = Replay(self.model, self.tokenizer, self.settings)
        self.replay.calibrate([self.method], model.chat)
        self.warnings = Warnings()
        self._device = self.model.device
        self.max_length = model_config.get_text_config(decoder=True).max_position_embeddings
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without a context: BOS, or the end of text where there is no BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm_eval caches requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's chat template for lm_eval's log, or an empty text without --apply_chat_template."""
        return self.tokenizer.get_chat_template() if chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the text that the model reads."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Return a text's ids without the tokenizer's end-of-text, and without a second BOS before a template's own."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]
        ended = add_special_tokens and self.tokenizer("a")["input_ids"][-1] == self.tokenizer.eos_token_id
        return ids[:-1] if ended else ids

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the replies; a prompt that is too long loses its start, as in lm_eval."""
        asked = [self._request(number, *request.args) for number, request in enumerate(requests)]
        order = sorted(range(len(asked)), key=lambda i: len(asked[i][0].ids), reverse=True)
        replies = [""] * len(asked)
        for start in range(0, len(order), self.batch_size):
            some = order[start : start + self.batch_size]
            prompts, rows = zip(*(asked[i] for i in some), strict=True)
            ((_, answers),) = self.replay.answers(prompts, rows, [self.method])
            for i, row, answer in zip(some, rows, answers, strict=True):
                self.warnings.note(self.method, "lm_eval", len(asked[i][0].ids), answer.compressed, answer.dense_only,
                                   answer.non_finite, answer.saturated)  # fmt: skip
                replies[i] = cut_at_stop(answer.text, row.stop)
                self.cache_hook.add_partial("generate_until", requests[i].args, replies[i])
        return replies

    def _request(self, number: int, context: str, options: dict[str, Any]) -> tuple[Prompt, Row]:
        check_greedy(options)
        until = options.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(until)
        given = (options[name] for name in LENGTHS if options.get(name) is not None)
        reply = int(next(given, self.max_gen_toks))
        if reply >= self.max_length:
            raise ValueError(
                f"max_gen_toks={reply} leaves no prompt: the model has {self.max_length} positions; lower it"
            )
        ids = self.tok_encode(context)[-(self.max_length - reply) :]
        return Prompt(ids, len(ids) - 1), Row("lm_eval", str(number), context, "", (), reply, "", stop=stop)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[Scored]:  # fmt: skip
        """Return each continuation's sum of log probabilities, and whether greedy decoding would give it.

        Neighbouring continuations of one context, as in multiple choice, share its prefill.
        """
        scored: list[Scored] = []
        most = self.max_length  # a pair that is too long loses its start, but for one token of context
        fitted = [(a[-max(1, most + 1 - len(b)) :], b[-most:], pair) for pair, a, b in requests]
        for context, group in groupby(fitted, key=lambda request: request[0]):
            some = list(group)
            for (_, _, pair), result in zip(some, self._score(context, [c for _, c, _ in some]), strict=True):
                scored.append(result)
                self.cache_hook.add_partial("loglikelihood", pair, result)
        return scored

    @torch.no_grad()
    def _score(self, context: list[int], continuations: Sequence[list[int]]) -> Iterator[Scored]:
        head, last = (context[:-1], context[-1]) if len(context) > 1 else (context, None)
        room, device = 1 + max(map(len, continuations)), self.model.device
        method, ids = self.method, torch.tensor([head], device=device)
        prompt = method.run_prefill(self.model, ids, None, room, self.settings.prefill_chunk)
        for continuation in continuations:
            cache, logits = method.cache(self.model, prompt), prompt.logits
            compression = Compression(method, cache, prompt)
            saturated = next(iter(compression.saturated() or ()), None)
            total, greedy, broken = 0.0, True, None
            for step, (token, wanted) in enumerate(zip([last, *continuation[:-1]], continuation, strict=True)):
                if token is not None:
                    logits = extend(self.model, cache, torch.tensor([[token]], device=device), None)
                total += float(logits[0].float().log_softmax(-1)[wanted])
                greedy = greedy and int(logits[0].argmax()) == wanted
                if broken is None and not bool(logits[0].amax().isfinite()):
                    broken = step
            ((_, compressed),) = compression.found([len(continuation) - (last is None)])
            less = compressed if method.axes else None
            self.warnings.note(method, "lm_eval", len(context), less, False, broken, saturated)
            yield total, greedy

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each whole text, read in windows of all of the model's positions."""
        totals = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False), prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length, context_len=1,
            )  # fmt: skip
            pieces = [(("", ""), *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(pieces)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals
