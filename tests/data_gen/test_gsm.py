"""GSM-Infinite's form: every problem has one answer, which follows from its text alone."""

import dataclasses
import re
from collections import Counter

import pytest

from leank.data_gen.gsm.infinite import MODES, TEMPLATES, nth, realistic
from leank.data_gen.gsm.symbolic import symbolic
from leank.data_gen.tokens import TokenCounter
from leank.eval.benchmarks.gsm_infinite import realistic_row, symbolic_row
from tests.helpers.gsm_solver import read, solve
from tests.helpers.text_tokenizers import tokenizer


@pytest.mark.parametrize("d", [2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_problem_is_solvable_from_its_text(template, mode, d):
    for op in range(2, 31):
        for index in range(2):
            made = realistic(op, d, template, mode, seed=1, index=index)
            answers, edges = solve(made.problem, made.question)
            assert answers == [made.answer], made
            assert edges == op, made
            assert 0 < made.answer < 10_000
            assert made.solution.endswith(f"Answer: {made.answer}.")


# tokens that official samples of a nominal length have, least and most
OFFICIAL_TOKENS = {8000: (900, 4900), 16_000: (6000, 10_000), 32_000: (20_000, 25_000)}


@pytest.mark.parametrize("length", OFFICIAL_TOKENS)
@pytest.mark.parametrize("mode", MODES)
def test_filler_never_feeds_the_problem(mode, length):
    counter = TokenCounter(tokenizer("gpt4"))
    for index in range(3):
        made = realistic(6, 3, TEMPLATES[index], mode, 0, index, length, counter)
        assert solve(made.problem, made.question) == ([made.answer], 6)
        tokens = counter.count(made.problem, remember=False)
        least, most = OFFICIAL_TOKENS[length]
        assert 0.9 * least < tokens < 1.4 * most  # the test's tokenizer takes a fifth more than cl100k
        text, _ = read(made.problem, made.question)
        assert len(text.defined) > length / 400


# mean statements a problem of 40 official ones (20 a mode) without filler, by (d, op): counted, not copied
OFFICIAL_STATEMENTS = {
    (2, 2): 3.9, (2, 4): 5.6, (2, 6): 9.0, (2, 8): 7.5, (2, 12): 5.4, (2, 16): 6.5, (2, 20): 8.7,
    (3, 2): 16.8, (3, 4): 10.3, (3, 6): 14.5, (3, 8): 12.8, (3, 12): 17.1, (3, 16): 18.1, (3, 20): 21.0,
}  # fmt: skip


@pytest.mark.parametrize("d", [2, 3])
def test_problems_are_about_as_long_as_the_official_ones(d):
    means = {op: [] for of, op in OFFICIAL_STATEMENTS if of == d}
    for op, found in means.items():
        found += [p.problem.count(". ") + 1 for p in (nth(d, 0, op, i) for i in range(40))]
        assert min(found) >= 2
    ratio = {op: sum(found) / len(found) / OFFICIAL_STATEMENTS[d, op] for op, found in means.items()}
    assert all(0.6 < r < 1.7 for r in ratio.values()), ratio
    assert 0.85 < sum(ratio.values()) / len(ratio) < 1.2, ratio


def test_names_run_out():
    counter = TokenCounter(tokenizer("gpt4"))
    with pytest.raises(ValueError, match=r"all names are taken after \d+ quantities; lower op or length"):
        realistic(4, 2, TEMPLATES[0], MODES[0], 0, 0, 200_000, counter)


def test_hard_problems_have_averages_and_medium_ones_have_not():
    medium, hard = ([realistic(10, d, TEMPLATES[0], MODES[0], 0, i).problem for i in range(20)] for d in (2, 3))
    assert not any("average" in p for p in medium)
    assert all("average" in p for p in hard)


def test_statements_come_in_no_order():
    """The first statement is as often a definition as a distractor; answers and questions vary."""
    made = [realistic(8, 3, TEMPLATES[0], MODES[0], 0, i) for i in range(60)]
    assert len({m.answer for m in made}) > 15
    asked = Counter(
        re.search(r"What is the (\w+) number", m.question.replace("the number", "the plain number"))[1] for m in made
    )
    assert set(asked) == {"total", "average", "plain"}


def test_the_mix_of_templates_and_modes():
    made = [nth(2, 0, op, i) for op in (2, 4) for i in range(40)]
    assert len(made) == 80
    share = Counter((m.template, m.mode) for m in made)
    for mode in MODES:
        assert [share[t, mode] for t in ("crazy_zootopia", "teachers_in_school", "movie_festival_awards")] == [32, 4, 4]
    assert len({m.problem for m in made}) == 80


@pytest.mark.parametrize("length", [0, 8000, 32_000])
@pytest.mark.parametrize("op", [1, 2, 8, 30])
def test_symbolic_answers_follow_from_the_text(op, length):
    for index in range(3):
        made = symbolic(op, 0, index, length)
        assert made.n == op + int(length * 828 / 9668)
        statements = made.problem.rstrip(".").split(". ")
        defined = {}
        for s in statements:
            name, parent, step, number = re.fullmatch(r"assign (V\d{6}) = (?:(V\d{6})(?: ([+-]) 1)?|(\d+))", s).groups()
            assert name not in defined
            defined[name] = (parent, {None: 0, "+": 1, "-": -1}[step], number)
        derived = {name: int(number) for name, (_, _, number) in defined.items() if number}
        assert len(derived) == 1
        for _ in range(op):
            for name, (parent, step, _) in defined.items():
                if parent in derived:
                    derived[name] = derived[parent] + step
        assert len(derived) == op
        assert min(derived.values()) >= 0
        names = set(defined) | {parent for parent, _, _ in defined.values() if parent}
        assert len(names) == made.n
        value = int(re.search(r"equal to (\d+)\?", made.question)[1])
        assert sorted(made.answer_list) == sorted(name for name, v in derived.items() if v == value) != []


def test_eval_reads_both():
    row = realistic_row(dataclasses.asdict(realistic(4, 2, TEMPLATES[2], MODES[1], 0, 0)))
    assert row.context.startswith("Problem: ")
    assert row.meta["op"] == 4
    unknown = dataclasses.asdict(realistic(4, 2, TEMPLATES[2], MODES[1], 0, 0)) | {"d": None, "length": None}
    assert not {"d", "length"} & {*realistic_row(unknown).meta}
    row = symbolic_row(dataclasses.asdict(symbolic(4, 0, 0)))
    assert row.answers
