"""Rule files that are wrong all over: the answer is short, says how much more there is, and is there soon."""

from __future__ import annotations

import pytest
from bounds import within
from pairs import slow

from gradsurgeon.cli.review import linter
from gradsurgeon.errors import Problem
from gradsurgeon.language import schema, source

HEAD = "version: 1\nrules:\n"


def problems_of(text: str) -> list[Problem]:
    return list(linter.lint_rules(schema.Inspection(source.parse(text, "rules.yaml"))))


FLOODS = {
    "rules": HEAD + "".join(f'- {{id: a-{i}, actio: zero, param: "*"}}\n' for i in range(12_000)),
    "patterns": HEAD + "- {id: a, action: zero, params: [" + '"{",' * 90_000 + "]}\n",
    "statistics": HEAD + f'- {{id: a, action: norm-log, params: "*", stats: [{"l9," * 90_000}]}}\n',
    "keys": HEAD + "- id: a\n  action: zero\n" + "".join(f"  k{i}: 1\n" for i in range(45_000)),
    "keys of the top level": "version: 1\n" + "".join(f"k{i}: 1\n" for i in range(49_000)),
    "ids": HEAD + '- {id: a, action: zero, params: "*"}\n' * 10_000,
    "hashes": HEAD
    + "- {id: a, actio: zero, k: 1, params: ["
    + '" #x",' * 45_000
    + "]} # gradsurgeon: ignore[x]",
}


@pytest.mark.slow
@pytest.mark.no_cover  # thousands of lines, the same few of ours
@pytest.mark.parametrize("name", ["rules", *slow(*(name for name in FLOODS if name != "rules"))])
def test_the_answer_is_short_and_there_soon(name: str) -> None:
    with within(8):
        problems = problems_of(FLOODS[name])
    assert 1 <= len(problems) <= 110
    assert sum(len(problem.full()) for problem in problems) < 50_000


def test_what_is_left_out_is_counted() -> None:
    rules = (
        '- {id: a, action: zero, params: "*", max: no}\n' * 50 + "- {id: b, action: zero}\n" * 80
    )
    errors = [one for one in problems_of(HEAD + rules) if one.severity == "error"]
    assert len(errors) == 101
    assert (errors[-1].check, errors[-1].severity) == ("too-large", "error")
    assert errors[-1].message == "and 101 more problems, from here on"
    assert errors[-1].hint == "correct these first"
    assert errors[-1].place.line > errors[-2].place.line - 1


def test_one_rule_is_not_looked_at_for_ever() -> None:
    patterns = ", ".join(['"{"'] * 60)
    problems = problems_of(f"{HEAD}- {{id: a, action: zero, params: [{patterns}]}}\n")
    (large,) = [one for one in problems if one.check == "too-large"]
    assert len(problems) == 51
    assert large.message == "over 50 problems in one rule: the rest of it is not checked"


def test_ids_are_words_not_books() -> None:
    (problem,) = problems_of(f'{HEAD}- {{id: {"a" * 101}, action: zero, params: "*"}}\n')
    assert problem.message.endswith("joined by `-`, at most 100 characters")
    assert (problem.place.line, problem.place.col) == (3, 8)
    assert not problems_of(f'{HEAD}- {{id: {"a" * 100}, action: norm-log, params: "*"}}\n')
    long = "9" * 400_000
    for rule in (
        f"tensor: x{long}",
        f"at: x{long}",
        f"where: {{dtype: x{long}}}",
        f"model: [x{long}]",
    ):
        for one in problems_of(f'{HEAD}- {{id: a, action: zero, params: "*", {rule}}}\n'):
            assert len(one.full()) < 1_000
