"""The load of the serving benchmark: what it asks, and when a reply counts as a wrong one."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from leank.eval.rows import Results, check_rows, read
from leank.eval.run.build import build_job, composed
from scripts.bench.serving import SURE, Asked, Load, departs, drawn, form, load, loads, parsed, settings
from scripts.bench.serving_kl import Forced, compared
from scripts.bench.serving_rivals import layout_like
from scripts.bench.serving_scores import Served, asked_for, reply_to


def test_requests_arrive_at_the_rate_share_prefixes_and_have_the_lengths_asked_for():
    load = Load(count=400, at_once=8, rate=4, shortest=64, longest=2048, reply=16, cancel=0.25)
    asked, prefixes = drawn(load, 500, seed=1)
    assert (asked, prefixes) == drawn(load, 500, seed=1)
    assert 80 < asked[-1].due < 120  # 100 seconds on average
    assert all(64 <= len(one.prompt) <= 2048 and 2 <= one.tokens <= 16 for one in asked)
    assert sum(len(one.prompt) > 362 for one in asked) in range(160, 241)  # half, as the logarithm is uniform
    assert sum(one.prompt[:32] in prefixes for one in asked) in range(160, 241)
    assert sum(one.leave is not None for one in asked) in range(60, 141)


ASKED = ("model=reference", "method=[dense]", "benchmark=ruler", "benchmark.lengths=[768]",
         "benchmark.tasks=[niah_single_1]", "benchmark.samples=3")  # fmt: skip


def test_replies_of_a_server_are_rows_of_the_replay_and_are_asked_for_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=lambda **given: SimpleNamespace(**given)))
    job, tokenizer = build_job(composed(ASKED))
    ((cell, samples),) = asked_for(job, tokenizer).items()

    def generate(prompts, params, use_tqdm):
        assert {one.max_tokens for one in params} <= {128}
        said = [tokenizer(text)["input_ids"] for text in (samples[0][0].answers[0], "none", samples[2][0].answers[0])]
        ends = ("stop", "stop", "length")
        replies = [SimpleNamespace(token_ids=ids, finish_reason=end) for ids, end in zip(said, ends, strict=True)]
        return [SimpleNamespace(outputs=[reply]) for reply in replies[: len(prompts)]]

    config = SimpleNamespace(try_get_generation_config=lambda: {"eos_token_id": 2})
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=config)), generate=generate
    )
    mask, other = tmp_path / "mask.safetensors", tmp_path / "other"
    other.mkdir()
    for path, text in ((mask, b"one"), (other / "mask.safetensors", b"another")):
        path.write_bytes(text)
    with Results(tmp_path) as results:
        reply_to(llm, job, tokenizer, cell, samples, Served.of(str(mask)), results, 8)
    rows = list(read(tmp_path))
    check_rows(rows)
    assert [row["score"] for row in rows] == [1, 0, 1]
    assert [row["cut"] for row in rows] == [None, None, "limit"]
    assert rows[0]["cache_bytes"]["total"] == 8 * rows[0]["prompt_tokens"]
    assert set(rows[0]["seconds"].values()) == {None}
    with Results(tmp_path) as results:
        llm.generate = lambda prompts, *_, **__: [] if not prompts else pytest.fail("asked again")
        reply_to(llm, job, tokenizer, cell, samples, Served.of(str(mask)), results, 8)
        llm.generate = generate  # of another file of that name
        reply_to(llm, job, tokenizer, cell, samples, Served.of(str(other / "mask.safetensors")), results, 8)
    assert len(list(read(tmp_path))) == 6


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("sampling.temperature=0.6",), "replies are greedy"),
        (("compress=before_question",), "knows no question"),
        (("shard=0/2",), "shard=0/2"),
        (("benchmark=text", "benchmark.lengths=[512]", "benchmark.samples=1"), "no single replies"),
    ],
)
def test_what_replies_of_a_server_would_not_follow_is_refused(given, said):
    own = ASKED if len(given) == 1 else ASKED[:2]
    with pytest.raises(ValueError, match=said):
        asked_for(*build_job(composed([*own, *given])))


@pytest.mark.parametrize("percent", [15, 20, 31])
def test_a_layout_for_another_shape_takes_about_as_many_bytes(percent):
    made = layout_like(percent, (32, 8, 128))
    assert made.keep.shape == (32, 8, 128)
    assert made.middle_bytes == pytest.approx(percent / 100, rel=0.1)
    assert torch.equal(made.keep, layout_like(percent, (32, 8, 128)).keep)
    with pytest.raises(ValueError, match="heads of 80 channels"):
        layout_like(percent, (2, 2, 80))


def test_a_model_says_what_it_is_told_and_its_own_distributions_are_kept():
    own = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    logits, forced = iter(own.split(1)), Forced()
    model = SimpleNamespace(compute_logits=lambda *_: next(logits))
    forced.patch(model)
    assert torch.equal(model.compute_logits(None), own[:1])  # nothing to say
    forced.tokens = [5, 0]
    assert [int(model.compute_logits(None).argmax()) for _ in range(3)] == [5, 0, int(own[3].argmax())]
    assert torch.equal(torch.stack(forced.found), own[1:3].log_softmax(-1))


def test_the_distance_of_two_distributions_is_their_kl():
    stock, own = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5], [0.6, 0.4]]).log()
    figures, kl = compared(own, stock, torch.tensor([0, 1]))
    assert kl.tolist() == pytest.approx([0, 0.2263], abs=1e-4)  # .9 log 1.5 + .1 log .25
    assert (figures["kl"], figures["most"], figures["same"]) == pytest.approx((0.11313, 0.2263, 1), abs=1e-4)
    assert figures["nll"] == pytest.approx(0.8047, abs=1e-4)


def reply(tokens, lead):
    best = [{token: SimpleNamespace(logprob=-0.1), 99: SimpleNamespace(logprob=-0.1 - lead)} for token in tokens]
    return Asked([], len(tokens), reply=tokens, logprobs=best)


def test_a_reply_is_wrong_where_the_model_was_sure():
    wanted = reply([1, 2, 3], 2 * SURE)
    assert departs(wanted, reply([1, 2, 3], 0)) is None
    assert departs(wanted, reply([1, 4, 3], 0)) > SURE
    assert departs(reply([1, 2, 3], SURE / 2), reply([1, 2, 4], 0)) < SURE


def test_each_bound_has_its_own_requests_and_rate_or_all_have_one():
    given = ("offline", "OUT", "--at-once", "8", "64", "--lengths", "128", "512", "--requests", "24", "96")
    found = loads(parsed([*given, "--rate", "2"]))
    assert [(load.at_once, load.count, load.rate) for load in found] == [(8, 24, 2), (64, 96, 2)]
    assert {(load.shortest, load.longest) for load in found} == {(128, 512)}
    assert {load.count for load in loads(parsed(["offline", "OUT", "--at-once", "1", "2", "3"]))} == {200}


def test_stock_takes_a_cache_of_fewer_bits_and_says_so_in_the_names_of_its_files():
    args = parsed(["speed", "OUT", "--stock", "--kv-cache-dtype", "fp8", "--batches", "1x64", "3x32"])
    assert form(args) == "stock_fp8"
    assert settings(args)["kv_cache_dtype"] == "fp8"
    assert settings(args)["max_num_seqs"] >= 3
    assert form(parsed(["speed", "OUT", "--stock"])) == "stock"
    masked = parsed(["speed", "OUT", "--settings", '{"max_num_seqs": 7}'])
    assert form(masked) == "mask"
    assert settings(masked)["kv_cache_dtype"] == "auto"
    assert settings(masked)["max_num_seqs"] == 7


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["speed", "OUT", "--kv-cache-dtype", "fp8"], "add --stock"),
        (["offline", "OUT", "--at-once", "1", "2", "--rate", "1", "2", "3"], "--rate has 3 values"),
        (["load", "URL", "--requests", "1", "2"], "--requests has 2 values"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(capsys, given, said):
    with pytest.raises(SystemExit):
        parsed(given)
    assert said in capsys.readouterr().err


def test_a_server_that_fails_and_goes_away_is_counted_and_ends_no_load():
    web = pytest.importorskip("aiohttp.web")
    asked = 0

    async def models(_):
        return web.json_response({"data": [{"id": "some"}]})

    async def complete(request):
        nonlocal asked
        asked += 1
        if asked > 40:  # from here on it does not answer
            request.transport.abort()
            return web.Response()
        reply = web.StreamResponse()
        await reply.prepare(request)
        broken = {"error": {"code": 500}}
        ended = {"choices": [{"finish_reason": "length"}]}
        await reply.write(b"data: " + json.dumps(broken if asked % 2 else ended).encode() + b"\n\ndata: [DONE]\n\n")
        return reply

    async def measured():
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await load(f"http://127.0.0.1:{port}", 60, seed=0)
        finally:
            await runner.cleanup()

    found = asyncio.run(measured())
    assert found["not answered"] == 20
    assert found["error"] + found["finished by length"] + found["cancelled"] == 40
    assert found["error"] > 10
