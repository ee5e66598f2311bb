"""The dense model's own replies to prompts of the user's: the targets of self-distillation, written once per run.

A prompt is cut in front of its last piece, the chat template's end or the last word. What stands before is the
document that is prefilled, and the rest is the question that every branch begins with (`data_gen.tasks.prompts`).
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from leank.backbone import Backbone
from leank.data_gen import chat
from leank.data_gen.amount import amount
from leank.data_gen.reading import digest
from leank.data_gen.tasks.prompts import LEAST, REPLY, Answered, Message, read, words
from leank.errors import in_one_line
from leank.files import write_text
from leank.typed import BadConfig
from leank_train.fitting import memory_advice
from leank_train.run_folder import Run, inputs
from leank_train.running.progress import Meter
from leank_train.settings import need

VERSION = 1  # of the files; a change of what follows makes new ones
TOGETHER = 2**14  # tokens of prompts that are answered at once, padding included
log = logging.getLogger("leank_train")


def with_replies(current: Run, backbone: Backbone) -> Run:
    """Return the run with prompts that have replies, which its folder keeps; without `data.prompts`, the same run.

    Different prompts count that have data.min_length to data.max_length tokens with a reply of `REPLY` tokens, and
    replies that have a word for every question. All others are left out, and the log says how many.

    Raises BadConfig for several processes, ValueError if fewer than `LEAST` prompts are left.
    """
    data, out = current.config.data, current.out
    if data.prompts is None:
        return current
    need(current.alone, f"data.prompts={data.prompts!r}: one process writes the replies; leave out trainer=ddp and kin")
    given = inputs(current.config, 1)
    model = current.resolved["model"]
    kind = str(backbone.model.dtype)
    known = digest(json.dumps([VERSION, given["prompts"], given["model"], model, kind, data.min_length, data.max_length,
                               data.questions], sort_keys=True))  # fmt: skip
    file = out / f"replies-{known}.jsonl"
    if not file.exists():
        with memory_advice("while the model replies to data.prompts", f"data.max_length={data.max_length}"):
            found = answer(current, backbone, read(data.prompts))
        write_text(file, "".join(json.dumps(one) + "\n" for one in found))
    return replace(current, config=replace(current.config, data=replace(data, prompts=str(file))))


def answer(current: Run, backbone: Backbone, prompts: Sequence[str | list[Message]]) -> list[Answered]:
    """Return the prompts that fit, in their order, with the model's greedy replies; see `with_replies`."""
    data = current.config.data
    cuts = list(dict.fromkeys(cut(backbone, one) for one in prompts))  # none is both trained on and held out
    ids = [backbone.encode_context(a, framed) + backbone.encode_question(b, "", framed) for a, b, framed in cuts]
    fits = [i for i, one in enumerate(ids) if data.min_length <= len(one) + REPLY <= data.max_length]
    replies: dict[int, str] = {}
    if len(fits) >= LEAST:
        with Meter("replies: the dense model answers data.prompts", len(fits), "prompt") as meter:
            for batch in batches(fits, ids):
                replies |= zip(batch, reply(backbone, [ids[i] for i in batch]), strict=True)
                meter.update(len(batch))
    kept = [i for i in fits if not replies or len(words(replies[i])) >= data.questions]
    said = (
        f"{len(kept)} of {amount(len(ids), 'prompt')} have {data.min_length} to {data.max_length} tokens with a reply, "
        f"and a reply of {amount(data.questions, 'word')} or more"
    )
    if len(kept) < LEAST:
        raise ValueError(
            f"data.prompts={data.prompts!r}: {said}; {LEAST} are needed: give more of them, lower data.min_length or "
            "data.questions, or raise data.max_length"
        )
    log.info("data.prompts: %s", said)
    return [{"context": cuts[i][0], "question": cuts[i][1], "reply": replies[i], "framed": cuts[i][2]} for i in kept]


def cut(backbone: Backbone, prompt: str | list[Message]) -> tuple[str, str, bool]:
    """Return a prompt's document and question, and whether they hold the chat template; ValueError if it fails."""
    if not (backbone.before or backbone.after):
        if not isinstance(prompt, str):
            raise BadConfig("data.prompts has messages, and the model no chat template; give lines with a prompt")
        at = max(prompt.rstrip().rfind(" "), prompt.rstrip().rfind("\n"))  # a word or more for the question
        return (prompt[:at], prompt[at:], False) if at > 0 else (prompt[:-1], prompt[-1:], False)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
    try:
        text = chat.rendered(backbone.tokenizer, messages)  # type: ignore[arg-type]  # of TypedDict
    except Exception as error:  # a template is a program
        said = f"{type(error).__name__}: {in_one_line(str(error))[:200]}"
        raise ValueError(f"data.prompts: the chat template refuses a prompt ({said}); leave it out") from error
    end = backbone.after if backbone.after and text.endswith(backbone.after) else text[-1:]
    return text.removesuffix(end), end, True


def batches(fits: Sequence[int], ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield prompts of about the same length, as many as `TOGETHER` admits."""
    batch: list[int] = []
    for i in sorted(fits, key=lambda i: len(ids[i])):
        if batch and (len(batch) + 1) * len(ids[i]) > TOGETHER:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.no_grad()
def reply(backbone: Backbone, prompts: Sequence[Sequence[int]]) -> list[str]:
    """Return the greedy replies to prompts of token ids, of at most `REPLY` tokens; special tokens are left out."""
    model, tokenizer = backbone.model, backbone.tokenizer
    longest = max(map(len, prompts))
    pad = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    ids = torch.tensor([[pad] * (longest - len(one)) + list(one) for one in prompts], device=model.device)
    seen = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=model.device)
    made = model.generate(  # type: ignore[operator]  # transformers wraps it without its types
        input_ids=ids, attention_mask=seen, max_new_tokens=REPLY, do_sample=False, num_beams=1, pad_token_id=pad,
        temperature=None, top_p=None, top_k=None,
    )  # fmt: skip
    return tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)
