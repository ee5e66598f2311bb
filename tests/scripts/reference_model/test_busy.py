"""How busy KV heads are: a removed head sees sink and window alone, and samples in a batch are scored as alone."""

import csv
import random
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.reference_model.batches import TrainingRow
from scripts.reference_model.busy import NAME, Probe, greedy, main, measure, no_heads, prefill, score, text_losses
from scripts.reference_model.evaluation import right_tokens
from tests.helpers.text_tokenizers import tokenizer

SINK, WINDOW = 4, 16


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=1024, initializer_range=0.4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation=NAME).eval()


def row(length: int, answer: int, seed: int) -> TrainingRow:
    rng = random.Random(seed)
    return TrainingRow([1, *rng.choices(range(3, 4096), k=length - 1)], list(range(length - answer - 1, length - 1)))


ROWS = [row(200, 5, 1), row(160, 9, 2), row(90, 3, 3)]


@torch.no_grad()
def by_hand(model, row: TrainingRow, removed: torch.Tensor) -> float:
    """The mean log-likelihood of the answer from one pass over the whole row, with a mask for every head."""
    n = len(row.ids)
    cut = max(1, row.supervised[0] - 63)
    at, keys = torch.arange(n)[:, None], torch.arange(n)[None]
    seen = (keys <= at)[None]
    near = seen & ((at < cut) | (keys < SINK) | (keys > at - WINDOW))
    logits = model(torch.tensor([row.ids]), use_cache=False, seen=seen, near=near, removed=removed).logits[0]
    found = logits.log_softmax(-1)[row.supervised, [row.ids[p + 1] for p in row.supervised]]
    return float(found.mean())


@pytest.mark.parametrize("heads", [[], [(0, 1)], [(0, 0), (1, 1)], [(0, 0), (0, 1), (1, 0), (1, 1)]])
def test_a_batch_is_scored_as_its_rows_by_hand(model, heads):
    removed = no_heads(model)
    for at in heads:
        removed[at] = True
    with torch.no_grad():
        right, likelihoods = score(model, prefill(model, ROWS), removed, SINK, WINDOW)
    assert right.shape == (3,)
    assert likelihoods.tolist() == pytest.approx([by_hand(model, row, removed) for row in ROWS], abs=1e-4)


def test_without_removed_heads_the_model_is_the_plain_one(model):
    plain = LlamaForCausalLM(deepcopy(model.config)).eval()
    plain.load_state_dict(model.state_dict())
    plain.set_attn_implementation("sdpa")
    ids = torch.tensor([ROWS[0].ids])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_every_token_of_the_answer_counts(model):
    """An answer that the model itself gives is right, and wrong with one other token."""
    ids = list(ROWS[0].ids)
    at = range(180, 190)
    with torch.no_grad():
        for p in at:
            ids[p + 1] = int(model(torch.tensor([ids[: p + 1]])).logits[0, -1].argmax())
        changed = [*ids[:190], 3 if ids[190] != 3 else 4, *ids[191:]]
        right, _ = score(
            model, prefill(model, [TrainingRow(ids, [*at]), TrainingRow(changed, [*at])]), no_heads(model), SINK, WINDOW
        )
    assert right.tolist() == [True, False]


def test_answers_without_an_order_are_right_in_any():
    """Rows of labels 5 6 7 and 8 9: any label that is left is right, one of another row or one that is over is not."""
    labels, rows = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 0, 0, 2, 2])
    predicted = torch.tensor([7, 5, 7, 9, 8])
    assert right_tokens(predicted, labels, rows, unordered=True).tolist() == [True, False, True, True, False]
    assert right_tokens(predicted, labels, rows, unordered=False).tolist() == [False, False, True, False, False]


def test_heads_go_one_by_one_least_harmful_first(model):
    with torch.no_grad():
        probes: dict[str, Probe] = {"a": prefill(model, ROWS[:2]), "b": prefill(model, ROWS[2:])}
    rounds = greedy(model, probes, SINK, WINDOW, most=10)
    assert rounds[0][0] == ""
    assert sorted(head for head, _ in rounds[1:]) == ["0.0", "0.1", "1.0", "1.1"]
    alone = {}
    for layer, head in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        removed = no_heads(model)
        removed[layer, head] = True
        alone[f"{layer}.{head}"] = measure(model, probes, removed, SINK, WINDOW)
    assert rounds[1][0] == max(alone, key=lambda head: (alone[head].mean, alone[head].log_likelihood))
    assert len(greedy(model, probes, SINK, WINDOW, most=1)) == 2


def test_text_loses_nothing_while_the_window_holds_it(model):
    stream = np.random.default_rng(0).integers(3, 4096, 300).astype(np.uint16)
    found = text_losses(model, stream, 128, 9, SINK, WINDOW)
    assert [(r["from"], r["to"]) for r in found] == [(a, a + 8) for a in range(0, 128, 8)]
    gains = [r["sink_and_window"] - r["whole"] for r in found]
    assert gains[:2] == pytest.approx([0, 0], abs=1e-4)
    assert max(abs(gain) for gain in gains[4:]) > 1e-3
    with pytest.raises(ValueError, match="100 tokens, and one row takes 128"):
        text_losses(model, stream[:100], 128, 9, SINK, WINDOW)


def test_command_line(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    tokenizer("reference").save_pretrained(tmp_path / "model")
    np.save(tmp_path / "test.npy", np.arange(300, dtype=np.uint16))
    main([
        str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--text", str(tmp_path), "--text-length", "128",
        "--length", "384", "--samples", "2", "--device", "cpu", "--most", "1",
    ])  # fmt: skip
    with (tmp_path / "out/busy.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [r["removed"] for r in records] == ["0", "1"]
    assert "niah_multivalue" in records[0]
    assert (tmp_path / "out/busy.png").stat().st_size > 1000
    assert len((tmp_path / "out/text.csv").read_text().splitlines()) == 17
