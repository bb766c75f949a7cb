"""`gradsurgeon explain` and `gradsurgeon schema`: made from the classes of the actions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import ClassVar

import pytest
from commands import ROOT, WITHOUT_TORCH, call, quiet
from ranks import Json

from gradsurgeon import cli
from gradsurgeon.actions import ACTIONS, TARGETS, check_rule
from gradsurgeon.actions._fields import parse_tensor
from gradsurgeon.cli.review.checks import CHECKS, READING_CHECKS
from gradsurgeon.cli.schema import rule_schema

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

REFERENCE = "".join((ROOT / "rules" / "reference.md").read_text(encoding="utf-8").split())


class TestExplain:
    def test_without_a_name_it_lists_the_actions_and_then_the_checks(self, tmp_path: Path) -> None:
        done = call("explain", cwd=tmp_path, code=WITHOUT_TORCH)
        quiet(done)
        listed = [line.split()[0] for line in done.stdout.splitlines()]
        assert listed == [*ACTIONS, *sorted([*CHECKS, *READING_CHECKS])]
        assert re.search(r"^zero +Set a gradient to zero\.$", done.stdout, re.MULTILINE)
        assert re.search(
            r"^scale-by-zero +A factor of zero does not remove a NaN\.$", done.stdout, re.MULTILINE
        )

    @pytest.mark.parametrize("check", sorted(READING_CHECKS))
    def test_the_page_of_a_check_of_reading(
        self, check: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["explain", check]) == 0
        assert capsys.readouterr().out == f"`{check}` (error)\n\n{READING_CHECKS[check]}\n"

    @pytest.mark.parametrize("name", [*ACTIONS, *CHECKS])
    def test_a_page_is_that_of_the_reference(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["explain", name]) == 0
        page = capsys.readouterr().out
        shown = page.partition("**Options of every rule.**")[0].split("\n\n")
        assert len(shown) > 3
        for part in shown[1:]:
            assert "".join(part.split()) in REFERENCE
        lines = re.findall(r"^(?!\||  ).*", page, re.MULTILINE)
        assert max(map(len, lines)) <= 100
        if name in ACTIONS:
            options = rule_schema(ACTIONS[name])["properties"].keys() - {"action"}
            assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == options


class TestSchema:
    WORDS: ClassVar = {
        "params": {"grad"},
        "modules": {"output", "input", "output.grad", "input.grad"},
        "tensors": {"grad", "value"},
    }

    @pytest.fixture
    def found(self, capsys: pytest.CaptureFixture[str]) -> Json:
        assert cli.main(["schema"]) == 0
        found: Json = json.loads(capsys.readouterr().out)
        return found

    def test_the_tensors_of_each_kind_of_target(self, found: Json) -> None:
        words, path = found["$defs"]["zero"]["properties"]["tensor"]["anyOf"]
        for kind in TARGETS:
            for text in words["enum"]:
                given = {"id": "a", "action": "zero", kind: "*", "tensor": text}
                takes = not check_rule(given)[1]
                assert takes == (text in self.WORDS[kind])
        for text in ("output[0].grad", "input.mask", "output.a[1].b"):
            assert re.search(path["pattern"], text)
            assert not isinstance(parse_tensor("modules", text), str)
        for text in ("outputs", "output[-1]", "output..x", "grad[0]"):
            assert not re.search(path["pattern"], text)

    def test_includes(self, found: Json) -> None:
        names, path = found["properties"]["include"]["items"]["anyOf"]
        assert "gradsurgeon:nan-trap@1" in names["enum"]
        assert [
            entry
            for entry in ("a.yaml", "a/b.yml", "/a.yaml", "C:/a", "a\\b", "gradsurgeon:nan-trap")
            if re.search(path["pattern"], entry)
        ] == ["a.yaml", "a/b.yml"]

    def test_every_mapping_is_closed_and_nothing_may_be_null(self, found: Json) -> None:
        def walk(value: object) -> None:
            if isinstance(value, dict):
                assert value.get("type") != "null"
                keys = value.get("properties", {})
                closed = value.get("additionalProperties") is False
                # What opens nothing needs no closing: it names keys to refuse them.
                assert closed or not any(keys.values())
                for one in value.values():
                    walk(one)
            elif isinstance(value, list):
                for one in value:
                    walk(one)

        walk(found)
        steps = found["$defs"]["zero"]["properties"]["steps"]["properties"]
        assert list(steps) == ["from", "to", "every"]
