"""The lm-evaluation-harness adapter, held against plain transformers."""

import json
from types import SimpleNamespace

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import DynamicCache

from leank.eval.cache import compressed_cache
from leank.eval.cache.hook import ATTENTION
from leank.eval.lm_eval.model import LENGTHS, CompressedLM
from leank.mask import ChannelMask
from tests.helpers.text_tokenizers import tokenizer

SIZES = {"cache.sink": 4, "cache.window": 8, "cache.flush": 4}
TEXT = "The river runs through the old town. " * 6
CHOICES = [" It is wide and deep.", " Nobody lives there any more."]


def request(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def mask(tmp_path_factory):
    """A mask of the reference model's shape that changes what it says."""
    path = tmp_path_factory.mktemp("mask") / "mask.safetensors"
    keep = torch.rand(7, 4, 64, generator=torch.Generator().manual_seed(0)) < 0.4
    ChannelMask(keep).save(path)
    return path


@pytest.fixture(scope="module")
def models(mask):
    return {
        "dense": CompressedLM(**{"model.dtype": "float32"}),
        "leank": CompressedLM("leank", mask=str(mask), **SIZES, **{"model.dtype": "float32"}),
    }


def test_a_name_that_stands_for_several_methods_is_refused():
    with pytest.raises(ValueError, match=r"method=dense,think stands for 2 methods, and lm_eval takes one at a time"):
        CompressedLM("dense,think")


def test_sampling_is_refused():
    with pytest.raises(ValueError, match=r"sampling.temperature=0.6 is not taken by lm_eval's model.*leank.eval$"):
        CompressedLM(**{"sampling.temperature": 0.6})


def test_dense_scores_are_those_of_one_forward_pass(models):
    lm = models["dense"]
    found = lm.loglikelihood([request(TEXT, choice) for choice in CHOICES])
    for choice, (score, greedy) in zip(CHOICES, found, strict=True):
        context, continuation = lm._encode_pair(TEXT, choice)
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            logits = lm.model(ids, use_cache=False).logits[0, len(context) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(continuation)
        assert score == pytest.approx(float(logits.gather(1, wanted[:, None]).sum()), abs=1e-3)
        assert greedy == bool((logits.argmax(1) == wanted).all())


def test_compressed_scores_are_those_of_decoding_with_the_cache(models, mask):
    lm, keep = models["leank"], ChannelMask.load(mask)
    found = lm.loglikelihood([request(TEXT, choice) for choice in CHOICES])
    for choice, (score, _) in zip(CHOICES, found, strict=True):
        context, continuation = lm._encode_pair(TEXT, choice)
        cache = compressed_cache(lm.model, keep, 4, 8, 4, "torch")
        total = 0.0
        with torch.no_grad():
            lm.model(torch.tensor([context[:-1]]), past_key_values=cache)
            for token, wanted in zip([context[-1], *continuation], continuation, strict=False):
                logits = lm.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
                total += float(logits.log_softmax(-1)[wanted])
        assert score == pytest.approx(total, abs=1e-3)
    assert found != models["dense"].loglikelihood([request(TEXT, choice) for choice in CHOICES])


@pytest.mark.parametrize("name", ["h2o", "snapkv", "asl"])
def test_choices_that_share_a_prefill_score_as_if_alone(name):
    """Methods that want column sums, or the last queries, or that change the prefill."""
    lm = CompressedLM(name, **SIZES, **{"model.dtype": "float32"})
    together = lm.loglikelihood([request(TEXT * 3, choice) for choice in CHOICES])
    alone = [lm.loglikelihood([request(TEXT * 3, choice)])[0] for choice in CHOICES]
    assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], rel=1e-5)
    assert [greedy for _, greedy in together] == [greedy for _, greedy in alone]


def test_no_end_of_text_stands_before_what_is_still_to_come(models, monkeypatch):
    lm = models["dense"]
    ending = tokenizer("sentencepiece")
    monkeypatch.setattr(lm, "tokenizer", ending)
    text = ending("A cat sat.")["input_ids"]
    assert text[-1] == ending.eos_token_id
    assert lm.tok_encode("A cat sat.") == text[:-1]
    assert lm.tok_encode("A cat sat.</s>") == text  # its own one stays
    context, choice = lm._encode_pair("A cat", " sat.")
    assert context + choice == text[:-1]


def test_rolling_scores_read_the_whole_text(models):
    lm = models["dense"]
    (found,) = lm.loglikelihood_rolling([request(TEXT)])
    ids = lm.tok_encode(TEXT, add_special_tokens=False)
    with torch.no_grad():
        logits = lm.model(torch.tensor([[lm.prefix_token_id, *ids[:-1]]]), use_cache=False).logits[0].log_softmax(-1)
    assert found == pytest.approx(float(logits.gather(1, torch.tensor(ids)[:, None]).sum()), abs=1e-2)
    assert models["leank"].loglikelihood_rolling([request(TEXT)])[0] != pytest.approx(found, abs=1e-2)


def test_replies_are_those_of_generate(models, mask):
    options = {"max_gen_toks": 12, "until": []}
    for name, lm in models.items():
        lm.batch_size = 2
        replies = lm.generate_until([request(TEXT, options), request(TEXT[:60], options)])
        for text, reply in zip((TEXT, TEXT[:60]), replies, strict=True):
            ids = torch.tensor([lm.tok_encode(text)])
            cache = DynamicCache(config=lm.model.config)
            if name == "leank":
                cache = compressed_cache(lm.model, ChannelMask.load(mask), 4, 8, 4, "torch")
            lm.model.set_attn_implementation(ATTENTION)
            out = lm.model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=12, do_sample=False
            )
            assert reply == lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_stop_strings_long_prompts_and_bad_options(models):
    lm = models["dense"]
    (whole,) = lm.generate_until([request(TEXT, {"max_gen_toks": 12})])
    middle = whole[3:6]
    (cut,) = lm.generate_until([request(TEXT, {"max_gen_toks": 12, "until": middle})])
    assert cut == whole[: whole.index(middle)]
    prompt, _ = lm._request(0, TEXT * 400, {"max_gen_toks": 100})
    assert prompt.ids == lm.tok_encode(TEXT * 400)[-(8192 - 100) :]
    for name in LENGTHS:
        assert lm._request(0, TEXT, {name: 12, "temperature": 0.0, "num_beams": 1})[1].max_new_tokens == 12
    assert lm._request(0, TEXT, {"do_sample": False, "temperature": 1, "max_tokens": None})[1].max_new_tokens == 256
    for sampling in ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}, {"do_sample": True}):
        with pytest.raises(ValueError, match=r"asks for sampling; decoding here is greedy: do_sample=false"):
            lm.generate_until([request(TEXT, sampling)])
    for name, value in {"num_beams": 4, "repetition_penalty": 1.2, "min_new_tokens": 9}.items():
        with pytest.raises(ValueError, match=f"{name}={value}, which greedy decoding does not heed"):
            lm.generate_until([request(TEXT, {name: value})])
    with pytest.raises(ValueError, match="max_gen_toks=9000 leaves no prompt"):
        lm.generate_until([request(TEXT, {"max_gen_toks": 9000})])


def test_the_harness_runs_tasks_of_local_data(tmp_path, mask, models, monkeypatch):
    """The registered model on a multiple-choice and a generation task, each a YAML, with a JSONL file."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lines = [{"question": TEXT + "Where?", "choices": ["town", "sea"], "label": i % 2, "answer": "x"} for i in range(2)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = (
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        "test_split: test\ndoc_to_text: '{{question}}'\n"
    )
    (tmp_path / "choice.yaml").write_text(
        f"task: tiny_choice\noutput_type: multiple_choice\n{common}doc_to_choice: '{{{{choices}}}}'\n"
        "doc_to_target: label\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "reply.yaml").write_text(
        f"task: tiny_reply\noutput_type: generate_until\n{common}doc_to_target: answer\n"
        "generation_kwargs: {until: ['.'], max_gen_toks: 6, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    found = simple_evaluate(
        "leank", {"method": "leank", "mask": str(mask), **SIZES}, tasks=["tiny_choice", "tiny_reply"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    scores = found["results"]
    assert scores["tiny_choice"]["acc,none"] == 0.5  # two equal questions with different labels
    assert scores["tiny_reply"]["exact_match,none"] == 0
    (reply,) = {sample["resps"][0][0] for sample in found["samples"]["tiny_reply"]}
    (alone,) = models["leank"].generate_until(
        [request(lines[0]["question"], {"until": ["."], "max_gen_toks": 6, "do_sample": False})]
    )
    assert reply == alone
