"""The hooks that are offered to pre-commit, run by it in a repository of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from bounds import TIMEOUT
from commands import CLEAN, ROOT, environment, git, pasted

pytestmark = pytest.mark.slow

HOOKS = ROOT / ".pre-commit-hooks.yaml"
DOUBTFUL = CLEAN.replace("norm-log", "scale, factor: 0")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a repository that uses the hooks of another one, which holds those of this checkout."""
    hooks, user = tmp_path / "hooks", tmp_path / "user"
    for folder in (hooks, user):
        folder.mkdir()
        git(folder, "init", "-q")
    shutil.copy(HOOKS, hooks)
    git(hooks, "add", "-A")
    git(hooks, "commit", "-qm", "x")
    one = {"repo": str(hooks), "rev": git(hooks, "rev-parse", "HEAD")}
    config = {"repos": [{**one, "hooks": [{"id": "gradsurgeon-lint-system"}]}]}
    (user / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    return user


def pre_commit(here: Path, *command: str) -> tuple[int, str]:
    return run(here, sys.executable, "-m", "pre_commit", *command, "--color=never")


def commit(here: Path) -> tuple[int, str]:
    """Run the hooks on all that is staged, as a commit would."""
    git(here, "add", "-A")
    return pre_commit(here, "run")


def run(here: Path, *command: str) -> tuple[int, str]:
    """Run a command where the hooks find the gradsurgeon that is tested."""
    scripts = Path(sys.executable).parent
    env = {
        **environment(),
        "PRE_COMMIT_HOME": str(here.parent / "home"),
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        command,
        cwd=here,
        env=env,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_git_itself_refuses_the_commit(here: Path) -> None:
    assert pre_commit(here, "install")[0] == 0
    save = ["git", "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "rules"]
    (here / "rules.yaml").write_text(CLEAN)
    (here / "deep").mkdir()
    wrong = here / "deep" / "net.gradsurgeon.yml"
    wrong.write_text(CLEAN.replace("norm-log", "norm-lg"))
    git(here, "add", "-A")
    code, text = run(here, *save)
    assert code == 1, text
    assert "deep/net.gradsurgeon.yml:3:25: error: unknown action `norm-lg`" in text
    assert "2 files: 1 error" in text
    assert git(here, "rev-list", "--all", "--count") == "0"
    wrong.write_text(CLEAN)
    (here / "config.yaml").write_text("[")
    git(here, "add", "-A")
    code, text = run(here, *save)
    assert code == 0, text
    assert git(here, "rev-list", "--all", "--count") == "1"


def test_other_files_are_left_alone(here: Path) -> None:
    (here / "config.yaml").write_text("[")
    code, text = commit(here)
    assert (code, "Skipped" in text) == (0, True), text
    # What stands beside it is checked, and that alone.
    (here / "rules.yaml").write_text(CLEAN)
    code, text = commit(here)
    assert (code, "Passed" in text, "config.yaml" in text) == (0, True, False), text


def test_the_guide_says_what_to_paste(here: Path) -> None:
    file = here / ".pre-commit-config.yaml"
    (one,) = yaml.safe_load(file.read_text())["repos"]
    text = pasted("yml").partition("# .github")[0]
    text = text.replace("<this repository>", one["repo"]).replace("<commit>", one["rev"])
    # The hook of the guide, in an environment that need not be installed first.
    assert text.count("id: gradsurgeon-lint\n") == 1
    file.write_text(text.replace("gradsurgeon-lint\n", "gradsurgeon-lint-system\n"))
    (here / "rules.yaml").write_text(CLEAN)
    code, text = commit(here)
    assert (code, "Passed" in text) == (0, True), text
    (here / "rules.yaml").write_text(DOUBTFUL)
    code, text = commit(here)
    assert (code, "[scale-by-zero]" in text) == (1, True), text


@pytest.mark.parametrize(
    ("file", "taken"),
    [
        ("gradsurgeon.yaml", True),
        ("a/b/gradsurgeon.yml", True),
        ("rules.yaml", True),
        ("gan.gradsurgeon.yaml", True),
        ("a/.gradsurgeon.yaml", True),
        ("my-rules.yaml", False),
        ("gradsurgeon/other.yaml", False),
        ("rules.yaml.txt", False),
        ("rulesxyaml", False),
    ],
)
def test_rule_files_are_known_by_name(file: str, taken: bool) -> None:
    for hook in yaml.safe_load(HOOKS.read_text(encoding="utf-8")):
        assert bool(re.search(hook["files"], file)) is taken
        if hook["id"].startswith("gradsurgeon-lint"):
            assert hook["types"] == ["yaml"]
        else:
            for other in ("a/rules.test.yaml", "params.json", "a/norms.json"):
                assert re.search(hook["files"], other)


def test_tests_are_run_if_only_the_rules_have_changed(here: Path) -> None:
    file = here / ".pre-commit-config.yaml"
    file.write_text(file.read_text().replace("gradsurgeon-lint-system", "gradsurgeon-test"))
    (here / "rules.yaml").write_text(CLEAN.replace("norm-log", "scale, factor: 2.0"))
    rule = yaml.safe_load(CLEAN)["rules"][0]["id"]
    test = {"rule": rule, "gradient": [1.0], "expect": [2.0]}
    (here / "rules.test.yaml").write_text(yaml.safe_dump({"version": 1, "tests": [test]}))
    code, text = commit(here)
    assert (code, "Passed" in text) == (0, True), text
    git(here, "commit", "-qm", "x")
    (here / "rules.yaml").write_text(CLEAN.replace("norm-log", "scale, factor: 3.0"))
    code, text = commit(here)
    assert (code, "the optimizer gets [3.0], not [2.0]" in text) == (1, True), text
