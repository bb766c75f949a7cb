"""How problems are written: what holds a place, what is escaped, what stays the same over edits."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from gradsurgeon.cli.review import formats, lint
from gradsurgeon.cli.review.checks import READING_CHECKS
from gradsurgeon.errors import Place, Problem, Severity

ROOT = Path(__file__).parent.parent.parent
CASES = ROOT / "tests" / "cases" / "schema" / "bad"


def problem(
    message: str = "wrong",
    *,
    severity: Severity = "error",
    file: str = "rules.yaml",
    line: int = 3,
    text: str = "  factor: x",
    col: int = 11,
) -> Problem:
    return Problem(Place(file, line, col, text), "bad-value", message, "write 1", severity)


def all_cases() -> list[Problem]:
    return [one for case in sorted(CASES.glob("*.yaml")) for one in lint(str(case))]


def sarif(problems: list[Problem], root: Path = ROOT) -> Any:
    return json.loads(formats.write(problems, "sarif", root=root))


@pytest.mark.parametrize("form", ["full", "concise"])
def test_colour_adds_codes_and_nothing_else(form: str) -> None:
    problems = [problem(), problem(severity="warning")]
    plain = formats.write(problems, form)
    colour = formats.write(problems, form, colour=True)
    assert "\033[1;31merror:\033[0m" in colour
    assert "\033[1;33mwarning:\033[0m" in colour
    assert re.sub(r"\033\[[0-9;]*m", "", colour) == plain


class TestGitHub:
    def test_an_annotation_holds_place_check_message_and_remedy(self) -> None:
        assert formats.write([problem()], "github", root=Path.cwd()) == (
            "::error file=rules.yaml,line=3,col=11,endColumn=12,title=bad-value::wrong (write 1)\n"
        )

    def test_what_would_end_a_command_is_escaped(self) -> None:
        hostile = "50% \r\n::warning::x\n\033[2J ::set-output name=a::b"
        name = "a,title=b::c%\n::error::d.yaml"
        text = formats.write([problem(hostile, file=name)], "github")
        assert text.count("\n") == 1
        (line,) = text.splitlines()
        properties, _, message = line.removeprefix("::error ").partition("::")
        assert message == ("50%25 %0A::warning::x%0A\\x1b[2J ::set-output name=a::b (write 1)")
        assert properties == (
            "file=a%2Ctitle=b%3A%3Ac%25%0A%3A%3Aerror%3A%3Ad.yaml"
            ",line=3,col=11,endColumn=12,title=bad-value"
        )


class TestSarif:
    def test_every_problem_is_a_result_at_its_place(self) -> None:
        problems = all_cases()
        (run,) = sarif(problems)["runs"]
        assert run["columnKind"] == "unicodeCodePoints"
        rules = run["tool"]["driver"]["rules"]
        assert len(run["results"]) == len(problems) > 250
        for result, one in zip(run["results"], problems, strict=True):
            assert result["ruleId"] == one.check
            assert one.check in {rule["id"] for rule in rules}
            assert result["level"] == one.severity
            (where,) = result["locations"]
            location = where["physicalLocation"]
            assert ROOT / unquote(location["artifactLocation"]["uri"]) == ROOT / (one.place.file)
            region = location["region"]
            assert (region["startLine"], region["startColumn"]) == (one.place.line, one.place.col)
            assert region["endColumn"] > region["startColumn"] >= 1

    def test_every_check_has_a_description(self) -> None:
        rules = sarif([])["runs"][0]["tool"]["driver"]["rules"]
        assert [rule["id"] for rule in rules] == list(formats.all_checks())
        assert {one.check for one in all_cases()} <= set(READING_CHECKS)
        for rule in rules:
            assert len(rule["shortDescription"]["text"]) > 10
            assert rule["help"]["text"].endswith(f"gradsurgeon explain {rule['id']}")

    def test_the_catalogue_holds_what_the_code_reports_and_no_more(self) -> None:
        code = "".join(
            path.read_text(encoding="utf-8")
            for part in (
                "language/schema",
                "language/planning",
                "language",
                "actions",
                "common",
                ".",
            )
            for path in (ROOT / "gradsurgeon" / part).glob("*.py")
        )
        quoted = set(re.findall('"([a-z0-9.]+(?:-[a-z0-9.]+)+)"', code)) | {"bad-value", "expect"}
        assert set(READING_CHECKS) <= quoted

    @pytest.mark.parametrize(
        "name",
        ["a b.yaml", "50%.yaml", "漢#?.yaml", "x:y.yaml", "gradsurgeon:clip@1", "\udcff.yaml"],
    )
    def test_uris_are_relative_and_encoded(self, name: str, tmp_path: Path) -> None:
        result = sarif([problem(file=str(tmp_path / name))], tmp_path)["runs"][0]["results"][0]
        uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        assert re.fullmatch("[A-Za-z0-9._~/%-]+", uri)
        parts = urlsplit(uri)
        assert (parts.scheme, parts.query, parts.fragment) == ("", "", "")
        assert unquote(uri, errors="surrogateescape") == name

    def test_a_file_elsewhere_has_an_absolute_uri(self, tmp_path: Path) -> None:
        result = sarif([problem(file="/else where/r.yaml")], tmp_path)["runs"][0]["results"][0]
        artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
        assert artifact == {"uri": "file:///else%20where/r.yaml"}

    def test_messages_hold_no_placeholder_and_no_link(self) -> None:
        result = sarif([problem("{0} [click](http://evil)")])["runs"][0]["results"][0]
        assert result["message"]["text"] == "{{0}} [click\\](http://evil) (write 1)"


# The schema as OASIS published it with the standard, and with its errata. Not copied to here: the
# source distribution of sarif-pydantic, which `.ci/run` downloads, holds the first as it is.
OFFICIAL = {
    "6352a05f9d03f181b8d9c71a46bdacc4fcff9d8ade5364858b425ba0c0994ed7": "2.1.0",
    "c3b4bb2d6093897483348925aaa73af03b3e3f4bd4ca38cef26dcb4212a2682e": "2.1.0 errata 01",
}
NASTY = [
    "a b.yaml",
    "50%.yaml",
    "漢#?.yaml",
    "x:y.yaml",
    "-.yaml",
    "{0} [a](b).yaml",
    "\udcff.yaml",
]


@pytest.fixture(scope="module")
def check() -> Validator:
    raw = Path(os.environ["SARIF_SCHEMA"]).read_bytes()
    assert hashlib.sha256(raw).hexdigest() in OFFICIAL, "this is not what OASIS published"
    schema = json.loads(raw)
    kind = validator_for(schema)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


@pytest.mark.skipif(
    "SARIF_SCHEMA" not in os.environ,
    reason="SARIF_SCHEMA names no sarif-schema-2.1.0.json of OASIS; `.ci/run` downloads one",
)
class TestSarifSchema:
    @pytest.mark.parametrize("kind", ["schema", "lint"])
    @pytest.mark.parametrize("group", ["bad", "good"])
    def test_the_logs_of_all_cases_meet_it(self, check: Validator, kind: str, group: str) -> None:
        cases = sorted((CASES.parent.parent / kind / group).glob("*.yaml"))
        assert len(cases) > 5
        together = []
        for case in cases:
            problems = lint(str(case))
            together += problems
            assert not list(check.iter_errors(sarif(problems))), case.name
        assert together or group == "good"
        log = sarif(together)
        assert not list(check.iter_errors(log))
        assert len(log["runs"][0]["results"]) == len(together)

    def test_so_do_names_and_places_that_are_odd(self, check: Validator, tmp_path: Path) -> None:
        files = [tmp_path / name for name in NASTY]
        for file in files:
            file.write_text("version: 1\nrules: [{id: '漢{0}\\e'}]\n", encoding="utf-8")
        files += [tmp_path / "absent.yaml", tmp_path]
        problems = [one for file in files for one in lint(str(file))]
        assert {one.place.file for one in problems} == {str(file) for file in files}
        assert {"unreadable-file", "missing-key"} <= {one.check for one in problems}
        problems += [problem(file="/else where/r.yaml"), problem(file="<python>", line=0)]
        assert not list(check.iter_errors(sarif(problems, tmp_path)))
