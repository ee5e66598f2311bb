"""Self-distillation: the dense model's greedy replies to prompts of the user's, written once, and trained on."""

import json
from pathlib import Path

import pytest
import torch

from leank import backbone as backbones
from leank.backbone import Backbone
from leank.data_gen import chat, haystack
from leank.data_gen.tasks.prompts import LEAST, REPLY
from leank.typed import BadConfig
from leank_train import replies
from leank_train.recipes import check
from leank_train.run_folder import claimed
from leank_train.running import parallel
from leank_train.settings import plain
from leank_train.train import run
from tests.helpers.refusals import says
from tests.helpers.text_tokenizers import tokenizer
from tests.helpers.tiny_run import save_model, settings

SHORT = ("stage1.steps=1", "stage2.steps=1", "data.max_length=420")
OWN = ("++data.tasks.prompts=1", "++data.tasks.multikey=0")
MESSAGES = [{"role": "user", "content": "Who came?"}, {"role": "assistant", "content": "Ann did."},
            {"role": "user", "content": "And who left?"}]  # fmt: skip


def prompts(path: Path, count: int = 12, word: str = "red") -> Path:
    """Prompts of some 200 to 290 tokens."""
    texts = [" ".join(f"A {word} house {i + j} stands by a river." for j in range(18 + i % 6)) for i in range(count)]
    path.write_text("".join(json.dumps({"prompt": f"{text} What stands there?"}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Backbone:
    return backbones.load(str(save_model(tmp_path_factory.mktemp("tiny") / "model")), "float32")


@torch.no_grad()
def greedy(model: torch.nn.Module, ids: list[int], stop: int) -> list[int]:
    """The slow form: the whole sequence is read again for each token."""
    found: list[int] = []
    while len(found) < REPLY and (not found or found[-1] != stop):
        found.append(int(model(torch.tensor([ids + found])).logits[0, -1].argmax()))
    return found


def test_replies_of_a_padded_batch_are_those_of_single_prompts_token_by_token(tiny):
    ids = [tiny.tokenizer(f"A house stands by {'a river and ' * n}a mill.")["input_ids"] for n in (1, 9, 4)]
    expected = [tiny.tokenizer.decode(greedy(tiny.model, one, 2), skip_special_tokens=True) for one in ids]
    assert replies.reply(tiny, ids) == expected


def test_batches_hold_every_prompt_once_and_keep_to_their_size(monkeypatch):
    monkeypatch.setattr(replies, "TOGETHER", 100)
    ids = [[0] * n for n in (30, 5, 60, 5, 99, 1, 40, 120)]
    found = list(replies.batches(range(8), ids))
    assert sorted(i for batch in found for i in batch) == [*range(8)]
    assert all(len(batch) == 1 or len(batch) * max(len(ids[i]) for i in batch) <= 100 for batch in found)


def test_a_prompt_is_cut_where_its_tokens_are_those_of_the_whole(tiny):
    chats = tokenizer("sentencepiece")
    framed = Backbone(tiny.model, chats, "tiny", *chat.template(chats))
    for given in ("Who came to the house?", [dict(one) for one in MESSAGES]):
        context, question, is_framed = replies.cut(framed, given)
        assert is_framed
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        whole = chats(chat.rendered(chats, messages), add_special_tokens=False)["input_ids"]
        assert framed.encode_context(context, True) + framed.encode_question(question, "", True) == whole
    context, question, is_framed = replies.cut(tiny, "Who came to the house?\n")
    assert (context, question, is_framed) == ("Who came to the", " house?\n", False)
    assert (
        tiny.encode_context(context) + tiny.encode(question) == tiny.tokenizer("Who came to the house?\n")["input_ids"]
    )
    assert replies.cut(tiny, "Who") == ("Wh", "o", False)


def test_a_run_trains_on_replies_that_are_written_once(model_folder, tmp_path, monkeypatch):
    own = prompts(tmp_path / "own.jsonl")
    own.write_text(2 * own.read_text())  # logs hold the same prompt twice
    config = settings(model_folder, *SHORT, *OWN, f"data.prompts={own}")
    metrics = run(config, tmp_path / "run")
    assert 0 < metrics["verdict"]["kl"]["leank"]["tasks"] < 20
    (kept,) = (tmp_path / "run").glob("replies-*.jsonl")
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert LEAST <= len(lines) <= 12
    assert all(line["reply"].strip() and line["context"] and line["question"] for line in lines)

    monkeypatch.setattr(replies, "reply", lambda *given: pytest.fail("the replies are there"))
    (tmp_path / "run/checkpoints/stage2/done.ckpt").unlink()
    assert run(config, tmp_path / "run")["verdict"] == metrics["verdict"]
    prompts(own, word="blue")
    with pytest.raises(BadConfig, match=r"was begun with prompts=\w{16}, and this run has prompts=\w{16}"):
        run(config, tmp_path / "run")


def test_what_cannot_be_answered_is_said_before_training(model_folder, tmp_path, no_step, monkeypatch):
    own = prompts(tmp_path / "own.jsonl")

    def refused(*parts, changed=()):
        says(
            lambda: run(settings(model_folder, *SHORT, *OWN, f"data.prompts={own}", *changed), tmp_path / "run"), *parts
        )
        assert not (tmp_path / "run/checkpoints").exists()

    refused(
        r"data\.prompts='.*own\.jsonl': \d of 12 prompts have 415 to 420 tokens with a reply", "10 are needed: give",
        changed=["data.min_length=415"],
    )  # fmt: skip
    own.write_text(own.read_text() + json.dumps({"messages": MESSAGES}) + "\n")
    refused(r"data\.prompts has messages, and the model no chat template; give lines with a prompt")
    prompts(own)
    monkeypatch.setattr(replies, "reply", lambda backbone, batch: ["one"] * len(batch))
    refused(r"0 of 12 prompts have .*and a reply of 2 words or more; 10 are needed", r"data\.questions")


def test_several_processes_do_not_write_replies(model_folder, tiny, tmp_path, monkeypatch):
    config = settings(model_folder, *SHORT, *OWN, f"data.prompts={prompts(tmp_path / 'own.jsonl')}")
    monkeypatch.setattr(parallel, "role", lambda config: (True, 2))
    with claimed(check(config), plain(config), tmp_path / "run") as current:
        says(
            lambda: replies.with_replies(current, tiny), r"data\.prompts=.*: one process writes the replies; leave out"
        )


def test_a_text_of_the_users_is_trained_on_and_a_short_one_refused(model_folder, tmp_path, no_step):
    own = tmp_path / "own.txt"
    for content, said in (
        (
            "".join(f"A red house {i} stands here.\n" for i in range(30)),
            r"data\.text='.*' has \d+ tokens .* data\.max_length=420; give a longer text",
        ),
        (
            "Two words. " * 40 + "x" * 10**6,
            r"data\.text: essays='.*' holds a word of 1,000,000 letters, 'x{20}'\.\.\.; put",
        ),
        ("\n", r"data\.text: essays='.*own\.txt' \(split='train'\) holds no sentences"),
    ):
        own.write_text(content)
        for cached in (haystack.sentences, haystack._read, haystack.known_by):
            cached.cache_clear()  # as in a new process
        says(
            lambda: run(settings(model_folder, *SHORT, "++data.tasks.text=1", f"data.text={own}"), tmp_path / "run"),
            said,
        )
