"""Rule files out of commits: as they were, with the includes as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import git

from gradsurgeon import RuleFileError
from gradsurgeon.cli.review import sources

pytestmark = pytest.mark.slow


def text(rule: str, *includes: str) -> str:
    listed = f"include: {list(includes)}\n".replace("'", '"') if includes else ""
    return f'version: 1\n{listed}rules:\n- {{id: {rule}, action: zero, params: "*"}}\n'


class Repository:
    """A real one, whose working tree is not what was committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        return git(self.folder, *arguments)

    def write(self, path: str, content: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(content, encoding="utf-8")

    def commit(self, **files: str) -> None:
        for path, content in files.items():
            self.write(path, content)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "x")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    found = Repository(tmp_path)
    found.write("rules/part.yaml", text("old-part", "more/deep.yaml"))
    found.write("rules/more/deep.yaml", text("old-deep"))
    found.commit(**{"rules/r.yaml": text("old", "part.yaml", "gradsurgeon:nan-trap@1")})
    found.write("rules/part.yaml", text("new-part"))
    found.write("rules/r.yaml", text("new", "part.yaml"))
    (tmp_path / "rules/more/deep.yaml").unlink()
    return found


def ids(spec: str) -> list[str]:
    return [rule.id for rule in sources.rules_at(spec).rules]


def problem(spec: str) -> tuple[str, str, str]:
    with pytest.raises(RuleFileError) as caught:
        sources.rules_at(spec)
    (found,) = caught.value.problems
    return str(found.place), found.message, found.hint


class TestCommits:
    def test_includes_are_those_of_the_commit(self, repository: Repository) -> None:
        assert ids("rules/r.yaml") == ["new-part", "new"]
        found = sources.rules_at("HEAD:rules/r.yaml")
        assert [rule.id for rule in found.rules] == ["old-deep", "old-part", "nan-trap-all", "old"]
        assert [name for name, _ in found.files] == [
            "HEAD:rules/r.yaml",
            "HEAD:rules/part.yaml",
            "HEAD:rules/more/deep.yaml",
            "gradsurgeon:nan-trap@1",
        ]
        assert str(found.place("old-deep")) == "HEAD:rules/more/deep.yaml:3:8"

    @pytest.mark.parametrize(
        "ref",
        ["HEAD", "main", "refs/heads/main", "v1", "side/x", "HEAD~1", "main@{0}", "HEAD^{/one}"],
    )
    def test_whatever_git_takes_for_a_commit(self, repository: Repository, ref: str) -> None:
        repository.git("checkout", "-q", "--", ".")
        repository.git("commit", "-q", "--allow-empty", "-m", "one: x")
        repository.git("tag", "v1")
        repository.git("branch", "side/x")
        assert ids(f"{ref}:rules/r.yaml")[-1] == "old"
        assert ids(f"{repository.git('rev-parse', 'HEAD')[:12]}:rules/r.yaml")[-1] == "old"

    def test_paths_count_from_the_top(
        self, repository: Repository, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(repository.folder / "rules")
        assert ids("HEAD:rules/r.yaml")
        for path in ("./r.yaml", "../rules/r.yaml", "../../r.yaml"):
            assert "a file in a commit begins at the top" in problem(f"HEAD:{path}")[1]
        _, message, hint = problem("HEAD:r.yaml")
        assert "path 'r.yaml' does not exist in 'HEAD'" in message
        assert "write REF:PATH with a path from the top of the repository" in hint

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ("../top.yaml", "leads out of the folder of the rule file"),
            ("more/../../top.yaml", "leads out of the folder of the rule file"),
            ("/etc/x.yaml", "is absolute"),
            ("more", "bad file"),
            ("prt.yaml", "`prt.yaml`: cannot read the file: git failed"),
            ("linked/deep.yaml", "`linked/deep.yaml`: cannot read the file: git failed"),
            ("r.yaml", "is included twice"),
        ],
    )
    def test_includes_are_held_to_the_same_as_on_the_disk(
        self, repository: Repository, entry: str, message: str
    ) -> None:
        repository.git("checkout", "-q", "--", ".")
        (repository.folder / "rules/link.yaml").symlink_to("part.yaml")
        (repository.folder / "rules/linked").symlink_to("more")
        repository.commit(**{"top.yaml": text("top")})
        repository.commit(**{"rules/r.yaml": text("r", entry)})
        place, found, _ = problem("HEAD:rules/r.yaml")
        assert place.startswith("HEAD:rules/r.yaml:2:")
        assert message in found

    def test_links_folders_and_large_files_are_no_rule_files(self, repository: Repository) -> None:
        (repository.folder / "link.yaml").symlink_to("rules/r.yaml")
        repository.commit(**{"large.yaml": "#" * (1 << 21)})
        # The text of a link is the path that it names.
        assert 'found the text "rules/r.yaml"' in problem("HEAD:link.yaml")[1]
        assert "bad file" in problem("HEAD:rules")[1]
        assert "over 1024 KiB" in problem("HEAD:large.yaml")[1]


class TestSpecs:
    @pytest.mark.parametrize(
        ("spec", "found"),
        [
            ("r.yaml", (None, "r.yaml")),
            ("C:\\rules\\r.yaml", (None, "C:\\rules\\r.yaml")),
            ("c:/rules/r.yaml", (None, "c:/rules/r.yaml")),
            ("./a:b.yaml", (None, "./a:b.yaml")),
            ("/x/a:b.yaml", (None, "/x/a:b.yaml")),
            ("origin/main:rules/r.yaml", ("origin/main", "rules/r.yaml")),
            ("C:rules.yaml", ("C", "rules.yaml")),
            ("HEAD:a:b.yaml", ("HEAD", "a:b.yaml")),
        ],
    )
    def test_a_commit_or_a_file(self, spec: str, found: tuple[str | None, str]) -> None:
        assert sources.split(spec) == found

    def test_a_file_of_that_name_does_not_stand_for_the_commit(
        self, repository: Repository
    ) -> None:
        repository.write("HEAD:rules/r.yaml", text("planted"))
        assert ids("HEAD:rules/r.yaml")[-1] == "old"
        assert ids("./HEAD:rules/r.yaml") == ["planted"]

    @pytest.mark.parametrize(
        ("spec", "message", "hint"),
        [
            ("origin/main:rules/r.yaml", "invalid object name 'origin/main'", "fetch the commit"),
            ("--output=x:r.yaml", "invalid object name '--output=x'", "write REF:PATH"),
            ("HEAD:", "bad file", "write REF:PATH"),
            ("a\nb:r.yaml", "invalid object name", "fetch the commit"),
            ("HEAD:a\0b", "git cannot be run: embedded null byte", ""),
        ],
    )
    def test_what_git_said(
        self, repository: Repository, spec: str, message: str, hint: str
    ) -> None:
        with pytest.raises(RuleFileError) as caught:
            sources.rules_at(spec)
        (found,) = caught.value.problems
        assert found.check == "unreadable-file"
        assert message in found.message
        assert hint in found.hint
        assert not list(repository.folder.glob("x*"))

    def test_outside_a_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        monkeypatch.chdir(tmp_path)
        _, message, hint = problem("HEAD:r.yaml")
        assert "fatal: not a git repository" in message
        assert hint.startswith("write REF:PATH")


def test_a_pack_is_read_by_its_name() -> None:
    (trap,) = ids("gradsurgeon:nan-trap@1")
    assert sources.rules_with_open_bounds("gradsurgeon:nan-trap@1")[0].rules[0].id == trap
    with pytest.raises(RuleFileError, match="there is no pack"):
        ids("gradsurgeon:nan-trap@99")
