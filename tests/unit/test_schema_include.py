"""`include`: which rules come, in which order, from which place, and what must not be read."""

from __future__ import annotations

import json
import os
from hashlib import sha256 as sha256_of
from pathlib import Path
from typing import Any

import pytest
from bounds import within

import gradsurgeon
from gradsurgeon.errors import RuleFileError
from gradsurgeon.language import packs

GOOD = Path(__file__).parent.parent / "cases/schema/good"


def text(*ids: str, include: object = None) -> str:
    data: dict[str, object] = {"version": 1}
    if include is not None:
        data["include"] = include
    if ids:
        data["rules"] = [{"id": one, "action": "zero", "params": "*"} for one in ids]
    return json.dumps(data)


def sha256(content: bytes) -> str:
    return sha256_of(content).hexdigest()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (tmp_path / "outside.yaml").write_text(text("outside"))
    return folder


def put(path: Path, *ids: str, include: object = None) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text(*ids, include=include))


def refused(rules: Any) -> list[str]:
    with pytest.raises(RuleFileError) as caught:
        gradsurgeon.load(rules)
    return [problem.concise() for problem in caught.value.problems]


def refused_entries(here: Path, *entries: str) -> list[str]:
    """Return what is said of a file that includes others."""
    put(here / "top.yaml", "one", include=entries)
    return refused("top.yaml")


class TestOrderAndPlaces:
    def test_included_rules_come_first_depth_first_in_order_of_the_list(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(GOOD.parent)
        rules = gradsurgeon.load("good/include.yaml")
        ids = [rule.id for rule in rules.rules]
        assert ids == ["nan-trap-all", "third", "first", "second", "last"]
        assert [str(rules.place(rule)) for rule in ids] == [
            "gradsurgeon:nan-trap@1:14:9",
            "good/include-parts/more/third.json:1:33",
            "good/include-parts/first.yaml:5:10",
            "good/include-parts/more/second.yml:3:10",
            "good/include.yaml:5:10",
        ]
        assert rules.file == "good/include.yaml"
        assert [name for name, _ in rules.files] == [
            "good/include.yaml",
            "gradsurgeon:nan-trap@1",
            "good/include-parts/first.yaml",
            "good/include-parts/more/third.json",
            "good/include-parts/more/second.yml",
        ]
        assert rules.files[0][1] == rules.text
        assert rules.files[1][1] == (packs.folder() / "nan-trap.yaml").read_text(encoding="utf-8")

    def test_what_does_not_bind_is_named_by_its_own_place(self, here: Path) -> None:
        from torch import nn

        (here / "part.yaml").write_text(text("part").replace("*", "head.*"))
        put(here / "top.yaml", include=["part.yaml"])
        with pytest.raises(gradsurgeon.BindError, match=r"\npart\.yaml:1:\d+: rule part: no param"):
            gradsurgeon.plan(nn.Linear(2, 2), "top.yaml")


class TestHash:
    def test_of_several_files_it_is_that_of_their_texts(self, here: Path) -> None:
        put(here / "top.yaml", "one", include=["part.yaml"])
        put(here / "part.yaml", "two")
        part, top = (gradsurgeon.load(here / name).sha256 for name in ("part.yaml", "top.yaml"))
        assert part == sha256((here / "part.yaml").read_bytes())
        texts = [(here / name).read_bytes() for name in ("top.yaml", "part.yaml")]
        assert top == sha256(b"\n".join(texts))
        # Not where it was read from, but what was read.
        assert gradsurgeon.load("top.yaml").sha256 == top
        (here / "part.yaml").write_text(text("two") + "\n")
        assert gradsurgeon.load("top.yaml").sha256 != top

    def test_of_a_dict_with_a_pack_it_is_that_of_the_rules(self) -> None:
        one, other = (
            gradsurgeon.load({"version": 1, "include": [f"gradsurgeon:{name}@1"]})
            for name in ("clip", "nan-trap")
        )
        assert one.sha256 != other.sha256
        assert [name for name, _ in one.files] == ["gradsurgeon:clip@1"]


# Entries that are refused, and what is said of them. `link.yaml` and `folder` lead out, `tokens.yaml` to `.git/config`.
REFUSED = [
    ("link.yaml", "leads out of the folder of the rule file, by `..` or by a link"),
    ("folder/outside.yaml", "leads out of the folder"),
    ("folder/../outside.yaml", "leads out of the folder"),
    ("inner/../../outside.yaml", "leads out of the folder"),
    # Actions of a job write tokens there, and a message would quote them.
    (".git/config", "is in `.git`"),
    ("tokens.yaml", "is in `.git`"),
    ("folder/outsid.yaml", "leads out of the folder"),
    ("circle.yaml", "cannot be looked up"),
    ("pipe.yaml", "there is no file `pipe.yaml`"),
    ("x" * 999, "cannot be looked up"),
]


REFUSED_TOGETHER = [
    (["{here}/part.yaml"], "top.yaml:1:28", "is absolute, or holds a backslash: a rule file reads"),
    (
        ["part.yaml", "link.yaml"],
        "top.yaml:1:41",
        "link.yaml is included twice, first at top.yaml:1:28",
    ),
    (["inner/part.yaml"], "inner/part.yaml:1:28", "`../more.yaml` leads out"),
    (["long.yaml"], "top.yaml:1:28", "over 1024 KiB of text"),
]


class TestTree:
    @pytest.mark.parametrize(("entry", "message"), REFUSED)
    def test_nothing_outside_is_read_and_nothing_that_never_ends(
        self, here: Path, entry: str, message: str
    ) -> None:
        (here / "link.yaml").symlink_to(here.parent / "outside.yaml")
        (here / "folder").symlink_to(here.parent, target_is_directory=True)
        (here / "inner").mkdir()
        (here / ".git").mkdir()
        (here / ".git/config").write_text("hunter2\n")
        (here / "tokens.yaml").symlink_to(".git/config")
        (here / "circle.yaml").symlink_to("circle.yaml")
        os.mkfifo(here / "pipe.yaml")
        (found,) = refused_entries(here, entry)
        assert found.startswith("top.yaml:1:28: error: ")
        assert message in found
        # What lies outside is not told.
        assert "outside.yaml" not in found.replace(entry, "")
        assert str(here) not in found

    def test_links_that_stay_inside_are_followed(self, here: Path) -> None:
        put(here / "real" / "part.yaml", "two", include=["more.yaml"])
        put(here / "real" / "more.yaml", "three")
        (here / "link").symlink_to("real", target_is_directory=True)
        put(here / "top.yaml", "one", include=["link/part.yaml"])
        rules = gradsurgeon.load("top.yaml")
        assert [rule.id for rule in rules.rules] == ["three", "two", "one"]
        assert rules.place("three").file == "link/more.yaml"

    @pytest.mark.parametrize(("entries", "place", "message"), REFUSED_TOGETHER)
    def test_what_is_there_may_be_refused_too(
        self, here: Path, entries: list[str], place: str, message: str
    ) -> None:
        put(here / "part.yaml", "two")
        (here / "link.yaml").symlink_to("part.yaml")
        put(here / "inner" / "part.yaml", "two", include=["../more.yaml"])
        put(here / "more.yaml", "three")
        (here / "long.yaml").write_text("#" * (1 << 20) + "\n" + text("two"))
        (found,) = refused_entries(here, *(entry.format(here=here) for entry in entries))
        assert found.startswith(f"{place}: error: ")
        assert message in found


class TestLimits:
    def test_more_entries_than_are_read(self, here: Path) -> None:
        *gone, found = refused_entries(here, *["gone.yaml"] * 33)
        assert len(gone) == 32
        assert "more than 32 entries in all (include fewer files)" in found

    def test_entries_that_name_nothing_are_not_looked_for_without_end(self, here: Path) -> None:
        names = [f"{'ab' * 50}{n:03}" for n in range(100)]
        for name in names:
            (here / name).touch()
        wrong = [f"{name[::-1]}" for name in names[:31]]
        parts = [f"part{n}.yaml" for n in range(31)]
        for name in parts:
            put(here / name, include=wrong)
        with within(seconds=3):
            assert len(refused_entries(here, *parts)) == 32

    @pytest.mark.parametrize(("depth", "read"), [(32, True), (33, False)])
    def test_a_chain(self, here: Path, depth: int, read: bool) -> None:
        put(here / "part0.yaml", "part0")
        for n in range(1, depth + 1):
            put(here / f"part{n}.yaml", f"part{n}", include=[f"part{n - 1}.yaml"])
        if read:
            rules = gradsurgeon.load(f"part{depth}.yaml").rules
            assert [rule.id for rule in rules] == [f"part{n}" for n in range(depth + 1)]
        else:
            (found,) = refused(f"part{depth}.yaml")
            assert "more than 32 entries in all" in found
            assert found.startswith("part1.yaml:1:")


class TestPublished:
    @pytest.fixture
    def rules(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Make a folder of packs of our own."""
        folder = tmp_path / "gradsurgeon" / "rules"
        folder.mkdir(parents=True)
        monkeypatch.setattr(packs, "__file__", str(folder.parent / "language" / "packs.py"))
        names = {
            "one@1": "one@1.yaml",
            "one@2": "one.yaml",
            "one@10": "ten.yaml",
            "far@1": "far.yaml",
        }
        for spec, name in names.items():
            include = ["part.yaml"] if name == "far.yaml" else None
            rule = spec.replace("@", "-")
            (folder / name).write_text(text(rule, include=include) + "\n")
        lock = {
            spec: {"file": name, "sha256": packs.content_hash((folder / name).read_text())}
            for spec, name in names.items()
        }
        (folder / "packs.json").write_text(json.dumps({"version": 1, "packs": lock}))
        return folder

    def load(self, spec: str) -> list[str]:
        rules = gradsurgeon.load({"version": 1, "include": [f"gradsurgeon:{spec}"]})
        return [rule.id for rule in rules.rules]

    def test_each_version_is_its_own_file(self, rules: Path) -> None:
        assert self.load("one@1") == ["one-1"]
        assert self.load("one@2") == ["one-2"]

    def test_a_version_that_is_there_is_proposed(self, rules: Path) -> None:
        for spec in ("one", "one@3"):
            with pytest.raises(RuleFileError, match=r"did you mean `one@\d+`") as caught:
                self.load(spec)
            assert f"there is no pack `{spec}`; packs are named with" in str(caught.value)

    def test_a_pack_that_was_changed_is_refused(self, rules: Path) -> None:
        path = rules / "one.yaml"
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        # Ends of lines may change.
        assert self.load("one@2") == ["one-2"]
        with path.open("a") as stream:
            stream.write("# a word\n")
        with pytest.raises(
            RuleFileError, match=r"gradsurgeon:one@2 differs from the published version: one"
        ):
            self.load("one@2")
        path.unlink()
        with pytest.raises(
            RuleFileError, match=r"`gradsurgeon:one@2`: cannot read the file: No such"
        ):
            self.load("one@2")

    def test_a_pack_includes_packs_only(self, rules: Path) -> None:
        (rules / "part.yaml").write_text(text("part"))
        with pytest.raises(
            RuleFileError, match=r"gradsurgeon:far@1:1:28: error: `part\.yaml` would"
        ):
            self.load("far@1")

    def test_a_damaged_installation(self, rules: Path) -> None:
        (rules / "packs.json").write_text("{}")
        with pytest.raises(RuleFileError, match=r"the list of packs cannot be read: 'packs'"):
            self.load("one@2")
