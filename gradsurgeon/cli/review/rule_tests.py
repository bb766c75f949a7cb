"""Tests of rules, ``NAME.test.yaml`` beside a rule file: read, with every problem at its place, and run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from operator import eq, ge, gt, le, lt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, Field

from gradsurgeon.actions import (
    FROM_LIST,
    Flaw,
    LossRule,
    Options,
    described,
    flawed,
    read_options,
    written,
)
from gradsurgeon.cli.review import on_run
from gradsurgeon.common._libraries import is_installed
from gradsurgeon.errors import ManifestError, Place, Problem, RecordError, RuleFileError
from gradsurgeon.language import packs, schema, source
from gradsurgeon.language.planning import Manifest, MatchedRules, Matcher, manifest_file
from gradsurgeon.language.schema import RuleSet, problem_of

if TYPE_CHECKING:
    from gradsurgeon.report.evidence.told import Told

SUFFIX = ".test.yaml"
_Content = TypeVar("_Content")
_NO_TORCH = "it needs torch, which is not installed here"
# A share may have decimals, and a count has none.
_COMPARISON = re.compile(r"(<=|>=|==|<|>|)\s*([0-9]+(?:\.[0-9]+(?=\s*%))?)\s*(%?)")
_COMPARISONS = {">=": ge, "<=": le, "==": eq, ">": gt, "<": lt}
_FORMS = ({"matches"}, {"gradient", "expect"}, {"on", "acts"})
_TEST = "- {rule: my-rule, matches: 24}"


def _comparison(value: object) -> object:
    if _COMPARISON.fullmatch(str(value)) is None:
        message = f"`acts` must be a count, a share in %, or a comparison with one, found {described(value)}"
        raise flawed(Flaw("", message, 'such as `acts: 0`, `acts: "< 5%"` or `acts: ">= 3"`'))
    return value


_Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=True)], ...], FROM_LIST, Field(min_length=1)
]
_GIVEN = Field(examples=["[3.0, -5.0]"])


class RuleTest(Options):
    """One expectation on one rule."""

    rule: Annotated[str, Field(description="The id of a rule.")]
    # How many parameters or modules the rule matches.
    matches: Annotated[int, Field(ge=0)] | None = None
    # One gradient that passes through the rule, and what the optimizer gets of it.
    gradient: Annotated[_Numbers | None, _GIVEN] = None
    expect: Annotated[_Numbers | None, _GIVEN] = None
    # A recorded run, or an export of its norms, and in how many of its updates the rule would have acted.
    on: str | None = None
    acts: Annotated[Any, AfterValidator(_comparison)] = None

    def flaws(self) -> Iterator[Flaw]:
        if self.model_fields_set - {"rule"} not in _FORMS:
            message = (
                "a test says one thing: `matches`, `gradient` with `expect`, or `on` with `acts`"
            )
            yield Flaw("", message, "write one test for each")
        elif len(self.expect or ()) != len(self.gradient or ()):
            message = "`expect` and `gradient` differ in the number of elements"
            yield Flaw("expect", message, "give one for each element")

    @property
    def name(self) -> str:
        says = self.model_dump(exclude_unset=True, exclude={"rule"})
        return f"{self.rule} {written(says)}"


class _TestFile(Options):
    version: Annotated[Literal[1], Field(description="Version of the format, 1.")]
    # Each is read by itself.
    tests: Annotated[
        tuple[Any, ...], FROM_LIST, Field(min_length=1, description="The tests.", examples=[_TEST])
    ]
    rules: Annotated[str | None, Field(description="The rule file.")] = None
    params: Annotated[str | None, Field(description="The names that `matches` counts.")] = None


class Result(NamedTuple):
    """How one test ended, and why it did not pass."""

    name: str
    place: Place
    outcome: Literal["passed", "failed", "not run"]
    reason: str


def run(path: str) -> Iterator[Result]:
    """Run each test of a file, or raise `RuleFileError` with all problems of the file and its rules."""
    document = source.read(path)
    # An empty file lacks the keys of tests, not of rules.
    problems = [problem for problem in document.problems if problem.check != "empty-file"]
    if problems and document.data is None:
        raise RuleFileError(problems)
    data = document.data if isinstance(document.data, dict) else {}
    _, flaws = read_options(_TestFile, data)
    problems += [problem_of(document, (), flaw) for flaw in flaws]
    beside = Path(document.file).name.removesuffix(SUFFIX) + ".yaml"
    rules = _file(document, ("rules",), data.get("rules", beside), _rules, problems)
    manifest = _file(document, ("params",), data.get("params"), manifest_file.read, problems)
    run_at = cache(on_run.run_at)
    tests = []
    entries = data.get("tests")
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        at: source.Path = ("tests", index)
        if not isinstance(entry, dict):
            message = f"entry {index + 1} of `tests` must be a mapping, found {described(entry)}"
            problems.append(
                Problem(document.place(at), "wrong-type", message, f"such as `{_TEST}`")
            )
            continue
        test, flaws = read_options(RuleTest, entry)
        problems += [problem_of(document, at, flaw) for flaw in flaws]
        _file(document, (*at, "on"), entry.get("on"), run_at, problems)
        tests += [test] if test else []
    if problems or rules is None:
        raise RuleFileError(schema.tidy(problems))
    folder = Path(document.file).parent

    @cache  # several tests may ask of one run
    def told_on(entry: str) -> dict[str, Told]:
        norms = run_at(str(folder / entry))
        assert norms is not None  # noqa: S101 # a path was given
        return on_run.tried(MatchedRules(rules, Matcher(manifest or norms.manifest)), norms)

    for index, test in enumerate(tests):
        name = f"{index + 1}: {test.name}"
        place = document.place(("tests", index))
        if test.gradient is not None and not is_installed("torch"):
            yield Result(name, place, "not run", _NO_TORCH)
            continue
        failure = _failure(test, rules, manifest, told_on)
        yield Result(name, place, "failed" if failure else "passed", failure)


def _rules(path: str) -> RuleSet:
    return schema.validate(source.read(path))


def _file(
    document: source.Document,
    at: source.Path,
    entry: object,
    read_file: Callable[[str], _Content | None],
    problems: list[Problem],
) -> _Content | None:
    """Return what is in a file in the folder of the tests, or below; nothing if none is named."""
    if not isinstance(entry, str):
        return None
    folder = Path(document.file).parent
    try:
        packs.inside(entry, folder)
        return read_file(str(folder / entry))
    except packs.IncludeError as error:
        problems.append(Problem(document.place(at), "bad-include", error.message, error.hint))
    except (RuleFileError, ManifestError) as error:
        problems += error.problems
    except RecordError as error:
        problems.append(Problem(document.place(at), "unreadable-file", str(error)))
    return None


def _failure(
    test: RuleTest,
    rules: RuleSet,
    manifest: Manifest | None,
    told_on: Callable[[str], dict[str, Told]],
) -> str:
    """Return why a test fails, empty if it passes."""
    by_id = {rule.id: rule for rule in rules.rules}
    rule = by_id.get(test.rule)
    if rule is None:
        return f"{rules.file} has no such rule; its rules: {', '.join(by_id)[:200]}"
    if test.on is not None:
        return _failure_on_run(test, told_on(test.on).get(rule.id))
    if test.gradient is not None and test.expect is not None:
        if rule.target != "params" or not rule.ref.grad or isinstance(rule, LossRule):
            return "it does not act on the gradient of a parameter: use `on`"
        from gradsurgeon.cli.review import one_gradient  # noqa: PLC0415 # needs torch

        return one_gradient.failure(rule, test.gradient, test.expect)
    if manifest is None:
        return "`matches` needs the names of the model: add `params: params.json`, above `tests`"
    number = len(Matcher(manifest).match(rule).names)
    return "" if number == test.matches else f"it matches {number:,}, not {test.matches:,}"


def _failure_on_run(test: RuleTest, told: Told | None) -> str:
    if told is None:
        return "it changes nothing and stops nothing, so it never acts"
    if told.missing:
        return f"not told by these records: {told.missing}"
    ((sign, number, percent),) = _COMPARISON.findall(str(test.acts))
    value = 100 * told.share if percent else told.acts
    if _COMPARISONS[sign or "=="](value, float(number)):
        return ""
    return f"it would have acted in {told.acts:,} of {told.steps:,} recorded steps"
