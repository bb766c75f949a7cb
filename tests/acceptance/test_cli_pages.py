"""`gradsurgeon explain` and `gradsurgeon schema`: made from the classes of the actions."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import WITHOUT_TORCH, call

from gradsurgeon import cli
from gradsurgeon.actions import ACTIONS, TARGETS, LossRule, check_rule
from gradsurgeon.actions._fields import parse_tensor
from gradsurgeon.cli.review.checks import CHECKS, READING_CHECKS

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

HEADING = re.compile(r"^\*\*(.*)\.\*\*", re.MULTILINE)


class TestExplain:
    def test_without_a_name_it_lists_the_actions_and_then_the_checks(self, tmp_path: Path) -> None:
        done = call("explain", cwd=tmp_path, code=WITHOUT_TORCH)
        assert (done.returncode, done.stderr) == (0, "")
        listed = [line.split()[0] for line in done.stdout.splitlines()]
        assert listed == [*ACTIONS, *sorted([*CHECKS, *READING_CHECKS])]
        assert re.search(r"^zero +Set a gradient to zero\.$", done.stdout, re.MULTILINE)
        assert re.search(
            r"^scale-by-zero +A factor of zero does not remove a NaN\.$", done.stdout, re.MULTILINE
        )

    def test_the_page_of_a_check(self, tmp_path: Path) -> None:
        done = call("explain", "scale-by-zero", cwd=tmp_path, code=WITHOUT_TORCH)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[:3] == [
            "`scale-by-zero` (warning)",
            "",
            "A factor of zero does not remove a NaN.",
        ]
        assert "\nUse `zero`, which overwrites every element with zero.\n" in done.stdout
        rule = '  - {id: no-bias, action: scale, params: "*.bias", factor: 0}\n'
        assert f"\nFound:\n\n```yaml\nversion: 1\nrules:\n{rule}" in done.stdout
        assert max(map(len, lines)) <= 100

    @pytest.mark.parametrize("check", sorted(READING_CHECKS))
    def test_the_page_of_a_check_of_reading(
        self, check: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["explain", check]) == 0
        assert capsys.readouterr().out == f"`{check}` (error)\n\n{READING_CHECKS[check]}\n"

    def test_an_unknown_check(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["explain", "scale-by-zer"]) == 2
        said = capsys.readouterr().err
        assert (
            said
            == "gradsurgeon: unknown action or check `scale-by-zer` (did you mean `scale-by-zero`?)\n"
        )
        assert cli.main(["explain", "qqqq"]) == 2
        assert "unknown action or check `qqqq` (known: " in capsys.readouterr().err

    def test_the_page_of_an_action(self, tmp_path: Path) -> None:
        done = call("explain", "clamp", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[:3] == ["`clamp`", "", "Bound every element of a gradient."]
        heads = ["What it does", "Why use it", "Points", "Cost", "Options of every rule"]
        assert HEADING.findall(done.stdout) == heads
        assert "| `at` | backward \\| step | needed with params | The moment" in done.stdout
        assert "| `min` | number | - | Lower bound of every element. |" in lines
        assert (
            '  - id: example-3\n    action: clamp\n    params: "*"\n    at: backward\n    max: 1.0\n'
            "    # gradient: [nan, -inf, inf]\n    # becomes: [nan, -inf, 1]\n```\n"
        ) in done.stdout
        assert max(len(line) for line in lines if not line.startswith("|")) <= 100

    @pytest.mark.parametrize("action", sorted(ACTIONS))
    def test_what_has_to_be_given_comes_first(
        self, action: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["explain", action]) == 0
        own = capsys.readouterr().out.partition("**Options of every rule.**")[0]
        rows = [line.split(" | ") for line in own.splitlines() if line.startswith("| `")]
        # The keys of a mapping have lines of their own below it.
        must = ["must be given" in row for row in rows if "` in `" not in row[0]]
        assert must == sorted(must, reverse=True)
        assert any(must) or action not in ("spike-trap", "scale", "clip-norm")

    def test_what_an_observer_records_and_what_trips_a_trap(self, tmp_path: Path) -> None:
        norms, trap = (
            call("explain", name, cwd=tmp_path).stdout for name in ("norm-log", "nan-trap")
        )
        assert "    # gradient: [3, 4]\n    # recorded: l2 5\n" in norms
        assert "    # gradient: [1, nan]\n    # trips: yes\n" in trap
        assert " It has no `at`: it acts at a moment of its own" in trap

    @pytest.mark.parametrize("action", sorted(ACTIONS))
    def test_the_examples_can_be_pasted(
        self, action: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert cli.main(["explain", action]) == 0
        examples = capsys.readouterr().out.partition("```yaml\n")[2].partition("```")[0]
        rule = ACTIONS[action]
        # What is not to be seen on one gradient is shown once per kind of target.
        assert examples.count("- id: ") == len(rule.EXAMPLES or rule.targets)
        (tmp_path / "pasted.yaml").write_text(examples)
        assert cli.main(["lint", str(tmp_path / "pasted.yaml")]) == 0

    def test_an_unknown_action(self, tmp_path: Path) -> None:
        done = call("explain", "nan_trp", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr
            == "gradsurgeon: unknown action or check `nan_trp` (did you mean `nan-trap`?)\n"
        )


class TestSchema:
    WORDS: ClassVar = {
        "params": {"grad"},
        "modules": {"output", "input", "output.grad", "input.grad"},
        "tensors": {"grad", "value"},
    }

    @pytest.fixture
    def found(self, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        assert cli.main(["schema"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    def test_the_file(self, found: dict[str, Any]) -> None:
        assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
        assert found["properties"]["version"]["const"] == 1
        assert found["required"] == ["version"]
        assert found["anyOf"] == [{"required": ["rules"]}, {"required": ["include"]}]
        assert set(found["properties"]) == {"version", "requires", "include", "rules"}
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
        left_out = set(branch["properties"]) ^ set(rule.model_fields)
        assert set(branch["properties"]) <= set(rule.model_fields)
        at = set() if rule.takes_at else {"at"}
        assert left_out == (set(TARGETS) - set(rule.targets)) | at
        assert all(info["description"] for info in branch["properties"].values())
        needed = {name for name, info in rule.model_fields.items() if info.is_required()}
        only = rule.targets if len(rule.targets) == 1 else ()
        assert set(branch["required"]) == needed | {"action", *only}
        # One kind of target: at least one of them, and none beside the other.
        some = [{"anyOf": [{"required": [kind]} for kind in rule.targets]}]
        assert branch.get("allOf", []) == ([] if only else some)
        apart = branch.get("dependentSchemas", {})
        pairs = {(one, two) for one, refused in apart.items() for two in refused["properties"]}
        assert pairs == set(itertools.combinations(rule.targets, 2))
        assert all(two is False for one in apart.values() for two in one["properties"].values())
        needs = branch.get("dependentRequired", {})
        assert needs.get("modules") == (None if only else ["tensor"])
        of_params = ["at"] * rule.needs_at + ["losses"] * issubclass(rule, LossRule)
        assert needs.get("params", []) == of_params
        if rule.takes_at:
            assert branch["properties"]["at"]["enum"] == list(rule.points)

    def test_the_tensors_of_each_kind_of_target(self, found: dict[str, Any]) -> None:
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

    def test_includes(self, found: dict[str, Any]) -> None:
        names, path = found["properties"]["include"]["items"]["anyOf"]
        assert "gradsurgeon:nan-trap@1" in names["enum"]
        assert [
            entry
            for entry in ("a.yaml", "a/b.yml", "/a.yaml", "C:/a", "a\\b", "gradsurgeon:nan-trap")
            if re.search(path["pattern"], entry)
        ] == ["a.yaml", "a/b.yml"]

    def test_one_bound_at_least(self, found: dict[str, Any]) -> None:
        assert found["$defs"]["clamp"]["anyOf"] == [{"required": ["min"]}, {"required": ["max"]}]
        assert "anyOf" not in found["$defs"]["zero"]

    def test_every_mapping_is_closed_and_nothing_may_be_null(self, found: dict[str, Any]) -> None:
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
