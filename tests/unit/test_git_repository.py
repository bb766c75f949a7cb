"""Reading a commit runs nothing that its repository brings along, and reads nothing but that commit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from commands import git
from pairs import singly

import gradsurgeon
from gradsurgeon.cli.review import sources

pytestmark = pytest.mark.slow

# `touch` and a command that goes on as git expects, where {mark} tells that it ran.
PROMISOR = """
[core]
\trepositoryformatversion = 1
[extensions]
\tpartialClone = origin
[remote "origin"]
\tpromisor = true
"""
# What git runs or reads for an object that is missing, by name of what leads it there.
FETCHES = {
    "upload-pack": '\turl = {whole}\n\tuploadpack = "touch {mark}; git-upload-pack"\n',
    "remote helper": '\turl = ext::touch {mark}\n[protocol "ext"]\n\tallow = always\n',
    "ssh command": "\turl = ssh://host/x\n[core]\n\tsshCommand = touch {mark};\n",
    "proxy command": "\turl = git://host/x\n[core]\n\tgitProxy = {script}\n",
    "another file": "[include]\n\tpath = {included}\n",
    "rewritten url": '\turl = no:x\n[url "ext::touch {mark} "]\n\tinsteadOf = no:\n[protocol]\n\tallow = always\n',
}
# What git runs in other places, all of it at once.
COMMANDS = """
[core]
\tfsmonitor = {script}
\tpager = {script}
\thooksPath = {hooks}
\tattributesFile = {attributes}
\talternateRefsCommand = {script}
\taskPass = {script}
\teditor = {script}
[pager]
\tcat-file = {script}
\tls-tree = {script}
\trev-parse = {script}
[alias]
\tcat-file = "!{script}"
\tls-tree = "!{script}"
[diff]
\texternal = {script}
[diff "evil"]
\ttextconv = {script}
[filter "evil"]
\tsmudge = {script}
\tclean = {script}
\tprocess = {script}
\trequired = true
[credential]
\thelper = "!{script}"
[gpg]
\tprogram = {script}
"""


def rules(rule: str) -> str:
    return f'version: 1\nrules:\n- {{id: {rule}, action: zero, params: "*"}}\n'


def ids(spec: str) -> list[str]:
    return [rule.id for rule in sources.rules_at(spec).rules]


def refusal(spec: str) -> tuple[str, str]:
    with pytest.raises(gradsurgeon.RuleFileError) as caught:
        sources.rules_at(spec)
    (problem,) = caught.value.problems
    assert problem.check == "unreadable-file"
    return problem.message, problem.hint


def commit(folder: Path, rule: str) -> None:
    (folder / "rules.yaml").write_text(rules(rule))
    git(folder, "add", "rules.yaml")
    git(folder, "commit", "-q", "-m", "x")


class Evil:
    """A repository at ``folder`` whose rule file is in ``whole`` too, and a mark that must not appear."""

    def __init__(self, top: Path) -> None:
        self.whole, self.folder, self.mark = top / "whole", top / "evil", top / "MARK"
        self.script = top / "script"
        self.script.write_text(f"#!/bin/sh\ntouch {self.mark}\ncat\n")
        self.script.chmod(0o755)
        self.whole.mkdir()
        git(self.whole, "init", "-q", "-b", "main")
        commit(self.whole, "good")
        shutil.copytree(self.whole, self.folder)

    def configure(self, text: str, name: str = "config") -> None:
        included = self.folder / ".git/more"
        places = {
            "whole": self.whole,
            "mark": self.mark,
            "script": self.script,
            "included": included,
            "hooks": self.folder / ".git/hooks",
            "attributes": self.folder / ".git/evil",
        }
        included.write_text('[remote "origin"]\n' + FETCHES["upload-pack"].format(**places))
        with (self.folder / ".git" / name).open("a") as stream:
            stream.write(text.format(**places))

    def lose(self, spec: str) -> None:
        """Remove an object, so that git has a reason to fetch it."""
        name = git(self.whole, "rev-parse", spec)
        (self.folder / ".git/objects" / name[:2] / name[2:]).unlink()


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evil:
    for name in [one for one in os.environ if one.startswith("GIT_")]:
        monkeypatch.delenv(name)
    found = Evil(tmp_path)
    monkeypatch.chdir(found.folder)
    return found


class TestCommands:
    @singly(way=FETCHES, lost=["HEAD:rules.yaml", "HEAD^{tree}", "HEAD"], old=[False, True])
    def test_a_missing_object_is_not_fetched(
        self, evil: Evil, way: str, lost: str, old: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if old:
            monkeypatch.delitem(sources._VARIABLES, "GIT_NO_LAZY_FETCH")
        assert ids("main:rules.yaml") == ["good"]
        evil.configure(PROMISOR + FETCHES[way])
        assert ids("main:rules.yaml") == ["good"]
        evil.lose(lost)
        message, hint = refusal("main:rules.yaml")
        assert not evil.mark.exists()
        assert message.startswith("cannot read the file: git failed with exit code ")
        assert "because nothing is fetched here" in hint

    def test_no_other_command_of_the_repository_is_run(self, evil: Evil) -> None:
        evil.configure(COMMANDS)
        (evil.folder / ".git/evil").write_text("*.yaml diff=evil filter=evil\n")
        (evil.folder / ".git/info").mkdir(exist_ok=True)
        (evil.folder / ".git/info/attributes").write_text("*.yaml diff=evil filter=evil\n")
        for name in ("reference-transaction", "post-checkout", "post-index-change", "pre-auto-gc"):
            shutil.copy(evil.script, evil.folder / ".git/hooks" / name)
        assert ids("main:rules.yaml") == ids("HEAD@{0}:rules.yaml") == ["good"]
        assert not evil.mark.exists()

    def test_a_git_in_the_current_folder_is_not_git(
        self, evil: Evil, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copy(evil.script, evil.folder / "git")
        monkeypatch.setenv("PATH", os.pathsep.join([".", "", os.environ["PATH"]]))
        assert ids("main:rules.yaml") == ["good"]
        assert not evil.mark.exists()
        monkeypatch.setenv("PATH", ".")
        assert refusal("main:rules.yaml")[0] == "cannot read the file: git is not installed"


class TestObjects:
    def test_a_bare_repository_among_the_files_is_not_taken_for_the_repository(
        self, evil: Evil, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        git(evil.folder, "clone", "-q", "--bare", str(evil.whole), "examples")
        (evil.folder / "examples/below").mkdir()
        for folder in ("examples", "examples/below"):
            monkeypatch.chdir(evil.folder / folder)
            assert "cannot use bare repository" in refusal("main:rules.yaml")[0]
            monkeypatch.chdir(evil.folder)

    def test_objects_are_those_that_the_commit_names(self, evil: Evil) -> None:
        (evil.folder / "rules.yaml").write_text(rules("other"))
        other = git(evil.folder, "hash-object", "-w", "rules.yaml")
        git(evil.folder, "replace", git(evil.folder, "rev-parse", "HEAD:rules.yaml"), other)
        assert "other" in git(evil.folder, "show", "HEAD:rules.yaml")
        assert ids("HEAD:rules.yaml") == ["good"]

    def test_parents_are_those_that_the_commit_names(self, evil: Evil) -> None:
        commit(evil.folder, "second")
        commit(evil.folder, "third")
        first, third = (git(evil.folder, "rev-parse", one) for one in ("HEAD~2", "HEAD"))
        (evil.folder / ".git/info").mkdir(exist_ok=True)
        (evil.folder / ".git/info/grafts").write_text(f"{third} {first}\n")
        assert "good" in git(evil.folder, "show", "HEAD~1:rules.yaml")
        assert ids("HEAD~1:rules.yaml") == ["second"]

    @pytest.mark.parametrize("name", ["GIT_DIR", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"])
    def test_no_variable_leads_elsewhere(
        self, evil: Evil, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        commit(evil.folder, "own")
        objects = "/objects" if name == "GIT_OBJECT_DIRECTORY" else ""
        monkeypatch.setenv(name, f"{evil.whole}/.git{objects}")
        assert ids("HEAD:rules.yaml") == ["own"]


class TestWhatStillWorks:
    def test_a_branch_upstream(self, evil: Evil, monkeypatch: pytest.MonkeyPatch) -> None:
        git(evil.folder.parent, "clone", "-q", str(evil.whole), "clone")
        clone = evil.folder.parent / "clone"
        commit(clone, "mine")
        monkeypatch.chdir(clone)
        assert ids("HEAD:rules.yaml") == ["mine"]
        assert ids("@{upstream}:rules.yaml") == ids("main@{u}:rules.yaml") == ["good"]

    def test_a_linked_working_tree_has_its_own_head(
        self, evil: Evil, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        git(evil.folder, "worktree", "add", "-q", "../linked")
        commit(evil.folder.parent / "linked", "first")
        commit(evil.folder.parent / "linked", "linked")
        monkeypatch.chdir(evil.folder.parent / "linked")
        assert ids("HEAD:rules.yaml") == ids("linked:rules.yaml") == ["linked"]
        assert ids("HEAD@{1}:rules.yaml") == ["first"]
        assert ids("main:rules.yaml") == ["good"]
