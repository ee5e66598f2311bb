"""The load of the serving benchmark: what it asks, and when a reply counts as a wrong one."""

from types import SimpleNamespace

from scripts.bench.serving import SURE, Asked, Load, departs, drawn


def test_requests_arrive_at_the_rate_share_prefixes_and_have_the_lengths_asked_for():
    load = Load(count=400, at_once=8, rate=4, shortest=64, longest=2048, reply=16, cancel=0.25)
    asked, prefixes = drawn(load, 500, seed=1)
    assert (asked, prefixes) == drawn(load, 500, seed=1)
    assert 80 < asked[-1].due < 120  # 100 seconds on average
    assert all(64 <= len(one.prompt) <= 2048 and 2 <= one.tokens <= 16 for one in asked)
    assert sum(len(one.prompt) > 362 for one in asked) in range(160, 241)  # half, as the logarithm is uniform
    assert sum(one.prompt[:32] in prefixes for one in asked) in range(160, 241)
    assert sum(one.leave is not None for one in asked) in range(60, 141)


def reply(tokens, lead):
    best = [{token: SimpleNamespace(logprob=-0.1), 99: SimpleNamespace(logprob=-0.1 - lead)} for token in tokens]
    return Asked([], len(tokens), reply=tokens, logprobs=best)


def test_a_reply_is_wrong_where_the_model_was_sure():
    wanted = reply([1, 2, 3], 2 * SURE)
    assert departs(wanted, reply([1, 2, 3], 0)) is None
    assert departs(wanted, reply([1, 4, 3], 0)) > SURE
    assert departs(reply([1, 2, 3], SURE / 2), reply([1, 2, 4], 0)) < SURE
