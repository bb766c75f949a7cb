"""`gradsurgeon explain` and `gradsurgeon schema`: made from the classes of the actions."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
from commands import call

from gradsurgeon import cli
from gradsurgeon.actions import ACTIONS


class TestExplain:
    def test_without_a_name_it_lists_the_actions(self, tmp_path: pathlib.Path) -> None:
        done = call("explain", cwd=tmp_path)
        assert [line.split()[0] for line in done.stdout.splitlines()] == list(ACTIONS)
        assert "zero      Set a gradient to zero." in done.stdout

    def test_the_page_of_an_action(self, tmp_path: pathlib.Path) -> None:
        done = call("explain", "clamp", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0] == "clamp: Bound every element of a gradient."
        heads = [line for line in lines if line and not line.startswith(" ")][1:]
        assert heads == [
            "What it does",
            "Why use it",
            "Points",
            "Cost",
            "Options",
            "Options of every rule",
            "Examples",
        ]
        assert re.search(
            r"^  at +backward \| step +must be given +The moment", done.stdout, re.MULTILINE
        )
        assert re.search(
            r"^  min +number +- +Lower bound of every element\.$", done.stdout, re.MULTILINE
        )
        assert done.stdout.endswith(
            '  - id: example-3\n    action: clamp\n    params: "*"\n    at: backward\n    max: 1.0\n'
            "    # gradient  [nan, -inf, inf]\n    # becomes   [nan, -inf, 1]\n"
        )
        assert max(map(len, lines)) <= 100

    def test_what_an_observer_records_and_what_trips_a_trap(self, tmp_path: pathlib.Path) -> None:
        norms, trap = (
            call("explain", name, cwd=tmp_path).stdout for name in ("norm-log", "nan-trap")
        )
        assert "    # gradient  [3, 4]\n    # recorded  l2 5\n" in norms
        assert "    # gradient  [1, nan]\n    # trips     yes\n" in trap
        assert "  It takes no `at`: it looks after each backward pass" in trap

    @pytest.mark.parametrize("action", sorted(ACTIONS))
    def test_the_examples_can_be_pasted(
        self, action: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
    ) -> None:
        assert cli.main(["explain", action]) == 0
        examples = capsys.readouterr().out.partition("\nExamples\n")[2]
        assert examples.count("- id: ") == len(ACTIONS[action].EXAMPLES)
        (tmp_path / "pasted.yaml").write_text(f"version: 1\nrules:\n{examples}")
        assert cli.main(["lint", str(tmp_path / "pasted.yaml")]) == 0

    def test_an_unknown_action(self, tmp_path: pathlib.Path) -> None:
        done = call("explain", "nan_trp", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "gradsurgeon: unknown action `nan_trp` (did you mean `nan-trap`?)\n"


class TestSchema:
    @pytest.fixture
    def found(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        assert cli.main(["schema"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def test_the_file(self, found: dict[str, Any]) -> None:
        assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert found["properties"]["version"]["const"] == 1
        assert found["required"] == ["version", "rules"]
        assert found["additionalProperties"] is False
        branches = found["properties"]["rules"]["items"]["oneOf"]
        assert branches == [{"$ref": f"#/$defs/{name}"} for name in ACTIONS]
        assert list(found["$defs"]) == list(ACTIONS)

    @pytest.mark.parametrize("action", sorted(ACTIONS))
    def test_a_branch_knows_what_the_reader_knows(self, found: dict[str, Any], action: str) -> None:
        rule, branch = ACTIONS[action], found["$defs"][action]
        assert branch["title"] == action
        assert branch["additionalProperties"] is False
        assert branch["properties"]["action"]["const"] == action
        keys = set(rule.model_fields) - (set() if rule.takes_at else {"at"})
        assert set(branch["properties"]) == keys
        assert all(info["description"] for info in branch["properties"].values())
        needed = {name for name, info in rule.model_fields.items() if info.is_required()}
        needed |= {"action"} | ({"at"} if rule.needs_at else set())
        assert set(branch["required"]) == needed
        if rule.takes_at:
            assert branch["properties"]["at"]["enum"] == list(rule.points)

    def test_one_bound_at_least(self, found: dict[str, Any]) -> None:
        assert found["$defs"]["clamp"]["anyOf"] == [{"required": ["min"]}, {"required": ["max"]}]
        assert "anyOf" not in found["$defs"]["zero"]

    def test_every_mapping_is_closed_and_nothing_may_be_null(self, found: dict[str, Any]) -> None:
        def walk(value: object) -> None:
            if isinstance(value, dict):
                assert value.get("type") != "null"
                assert ("properties" in value) <= (value.get("additionalProperties") is False)
                for one in value.values():
                    walk(one)
            elif isinstance(value, list):
                for one in value:
                    walk(one)

        walk(found)
        steps = found["$defs"]["zero"]["properties"]["steps"]["properties"]
        assert list(steps) == ["from", "to", "every"]
