"""`gradsurgeon diff`: what it prints, what it exits with, and what it says where it cannot compare.

``cases/review/expected.*`` hold its whole output on the two rule files there, so that a change of
wording shows in them. To write them again, run this file as a script and read what has changed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from commands import WITHOUT_TORCH, call, git, quiet, refused

pytestmark = [pytest.mark.cover_children, pytest.mark.slow]

CASES = Path(__file__).parent.parent / "cases" / "review"
FORMS = {"text": "txt", "markdown": "md", "json": "json"}
SIDES = ("old.yaml", "new.yaml", "--params", "params.json")

# Keys in order, and of what type their values are; of lists the type of each item.
SCOPE = {"id": str, "action": str, "target": str}
ONE = {**SCOPE, "params": [str], "modules": [str], "elements": int}
FIELD = {"name": str, "before": object, "after": object}
BOTH = {
    **SCOPE,
    "fields": [FIELD],
    "params_before": [str],
    "params_after": [str],
    "elements_before": int,
    "elements_after": int,
}
CHAIN = {"name": str, "before": [str], "after": [str]}
DOCUMENTED = {
    "version": int,
    "added": [ONE],
    "removed": [ONE],
    "changed": [BOTH],
    "order_changed": bool,
    "params": [CHAIN],
    "tensors": [CHAIN],
    "lost_protection": [str],
    "lost_trap": [str],
    "covered": {"before": int, "after": int},
    "model": {"params": int, "elements": int},
    "warnings": [{"kind": str, "rule": str, "detail": str}],
    "in_effect": bool,
}


def check(found: Any, form: Any, path: str = "") -> None:
    """Compare a value with its documented form."""
    if isinstance(form, dict):
        assert list(found) == list(form), path
        for key, inner in form.items():
            check(found[key], inner, f"{path}.{key}")
    elif isinstance(form, list):
        assert type(found) is list, path
        for item in found:
            check(item, form[0], f"{path}[]")
    elif form is not object:
        assert type(found) is form, path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for name in ("old.yaml", "new.yaml", "params.json"):
        (tmp_path / name).write_bytes((CASES / name).read_bytes())
    return tmp_path


class TestOutput:
    @pytest.mark.parametrize("form", FORMS)
    def test_of_the_worked_example(self, form: str) -> None:
        done = call("diff", *SIDES, "--format", form, cwd=CASES, code=WITHOUT_TORCH)
        quiet(done)
        assert done.stdout == (CASES / f"expected.{FORMS[form]}").read_text(encoding="utf-8")

    def test_text_is_what_it_prints_unasked(self) -> None:
        expected = (CASES / "expected.txt").read_text(encoding="utf-8")
        assert call("diff", *SIDES, cwd=CASES).stdout == expected

    def test_the_documented_json(self, here: Path) -> None:
        """Tools go by these keys and types: a change here breaks them."""
        text = (here / "new.yaml").read_text()
        # Another order, and a rule on modules, so that few lists are empty.
        text = text.replace("then: skip-step", "then: raise")
        text += "  - {id: out, action: zero, modules: embed, tensor: output}\n"
        head, *rules = re.split(r"(?m)^(?=  - )", text)
        (here / "new.yaml").write_text("".join([head, *rules[::-1]]))
        done = call("diff", *SIDES, "--format", "json", cwd=here)
        found = json.loads(done.stdout)
        check(found, DOCUMENTED)
        assert found["version"] == 1
        # What lost all protection is not named twice.
        assert [key for key, value in found.items() if value == []] == ["lost_trap"]
        assert found["order_changed"]
        assert found["model"] == {"params": 51, "elements": 51_649_024}
        # As section 12 of the design has them, to which others were added since.
        first = {"version", "added", "removed", "changed", "order_changed", "params"}
        assert first <= set(found)
        assert {"id", "fields", "params_before", "params_after"} <= set(found["changed"][0])


REWRITTEN = """# the same, written by somebody else
rules:
  - {params: ['*'], id: "trap", action: nan-trap, then: raise}   # then is the default
  - max: 1
    min: -1
    at: step
    params: layers.*.attn.*.weight
    action: clamp
    id: bounded-attention
  - {id: slow-embedding, action: scale, params: "embed.weight", factor: 1.0e-1}
  - {id: norms, params: "layers.*", action: norm-log}
version: 1
"""


class TestExitCodes:
    def test_a_difference_is_no_failure_unless_asked(self, here: Path) -> None:
        assert call("diff", *SIDES, cwd=here).returncode == 0
        assert call("diff", *SIDES, "--exit-code", cwd=here).returncode == 1

    def test_another_writing_is_no_difference(self, here: Path) -> None:
        (here / "new.yaml").write_text(REWRITTEN)
        done = call("diff", *SIDES, "--exit-code", cwd=here)
        quiet(done)
        assert done.stdout.splitlines()[1:] == ["no difference in effect"]

    def test_every_problem_of_a_side(self, here: Path) -> None:
        (here / "old.yaml").write_text(
            'version: 1\nrules:\n  - {id: a, action: zer, params: "*"}\n  - {id: b, action: zero}\n'
        )
        done = call("diff", *SIDES, "--exit-code", cwd=here)
        refused(done)
        for place in ("old.yaml:3:21: error", "old.yaml:4:"):
            assert place in done.stderr

    @pytest.mark.parametrize(
        ("old", "new"), [("gone.yaml", "new.yaml"), ("old.yaml", "gone.yaml"), ("gone.yaml",) * 2]
    )
    def test_a_file_that_is_not_there(self, here: Path, old: str, new: str) -> None:
        done = call("diff", old, new, "--params", "params.json", cwd=here)
        refused(done)
        assert done.stderr.count("gone.yaml:1:1: error: cannot read the file") == 1

    def test_names_that_are_not_there(self, here: Path) -> None:
        done = call("diff", "old.yaml", "new.yaml", "--params", "gone.json", cwd=here)
        refused(done)
        assert "gone.json: error: cannot read the file" in done.stderr

    def test_a_model_is_not_built_for_wrong_rules(self, here: Path) -> None:
        (here / "net.py").write_text("raise SystemExit('built')\n")
        done = call("diff", "gone.yaml", "new.yaml", "--model", "net:Net", cwd=here)
        assert done.returncode == 2
        assert "built" not in done.stderr


def part(rule: str, pattern: str, *includes: str) -> str:
    listed = f"include: {json.dumps(includes)}\n" if includes else ""
    return f'version: 1\n{listed}rules:\n  - {{id: {rule}, action: zero, params: "{pattern}"}}\n'


@pytest.fixture
def repository(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository whose working tree is not what was committed."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(here.parent))
    (here / "part.yaml").write_text(part("part", "layers.*"))
    (here / "rules.yaml").write_text(part("own", "embed.*", "part.yaml"))
    for command in (("init", "-q", "-b", "main"), ("add", "-A"), ("commit", "-q", "-m", "x")):
        git(here, *command)
    (here / "part.yaml").write_text(part("part", "layers.0.*"))
    (here / "rules.yaml").write_text(part("own", "head.*", "part.yaml"))
    return here


class TestCommits:
    def diff(self, here: Path, old: str, new: str, *more: str) -> Any:
        arguments = ("diff", old, new, "--params", "params.json", "--format", "json", *more)
        done = call(*arguments, cwd=here, code=WITHOUT_TORCH)
        assert done.stderr == ""
        return json.loads(done.stdout)

    def test_the_side_of_a_commit_sees_that_commit_alone(self, repository: Path) -> None:
        found = self.diff(repository, "HEAD:rules.yaml", "rules.yaml")
        changed = {one["id"]: one for one in found["changed"]}
        assert changed["own"]["params_before"] == ["embed.weight"]
        assert changed["own"]["params_after"] == ["head.weight"]
        counts = [len(changed["part"][f"params_{side}"]) for side in ("before", "after")]
        assert counts == [48, 8]

    def test_a_commit_against_itself(self, repository: Path) -> None:
        sides = ("HEAD:rules.yaml", "main:rules.yaml")
        assert not self.diff(repository, *sides, "--exit-code")["in_effect"]

    @pytest.mark.parametrize(
        ("old", "reason"),
        [
            ("no-such-branch:rules.yaml", "no-such-branch"),
            ("HEAD:later.yaml", "but not in 'HEAD'"),
            ("HEAD:", "bad file"),
        ],
    )
    def test_what_no_commit_has(self, repository: Path, old: str, reason: str) -> None:
        (repository / "later.yaml").write_text(part("own", "embed.*"))
        done = call("diff", old, "later.yaml", "--params", "params.json", cwd=repository)
        refused(done)
        assert reason in done.stderr


if __name__ == "__main__":
    for form, suffix in FORMS.items():
        output = call("diff", *SIDES, "--format", form, cwd=CASES).stdout
        (CASES / f"expected.{suffix}").write_text(output, encoding="utf-8")
