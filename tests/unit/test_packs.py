"""The packs of `rules/`: locked and clean. What each binds is in ``cases/plans``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import plan_cases
import pytest
from ranks import Json

import gradsurgeon
from gradsurgeon.language import packs

LOCK = packs.folder() / "packs.json"
FILES = sorted(packs.folder().glob("*.yaml"))
CASES = Path(__file__).parents[1] / "cases" / "plans"
SPECS = sorted(packs.published())


def included(*specs: str) -> Json:
    return {"version": 1, "include": [f"gradsurgeon:{spec}" for spec in specs]}


class TestLock:
    def test_it_lists_every_file_and_nothing_else(self) -> None:
        lock = json.loads(LOCK.read_text(encoding="utf-8"))
        assert set(lock) == {"version", "packs"}
        assert lock["version"] == 1
        assert all(set(entry) == {"file", "sha256"} for entry in lock["packs"].values())
        assert {pack.path for pack in packs.published().values()} == set(FILES)

    @pytest.mark.parametrize("spec", SPECS)
    def test_a_published_pack_never_changes(self, spec: str) -> None:
        pack = packs.published()[spec]
        text = pack.path.read_text(encoding="utf-8")
        assert packs.content_hash(text) == pack.sha256, (
            f"{pack.path.name} has changed since it was published as {spec}: undo that, or publish a "
            "new version as rules/guide/maintainers.md says"
        )

    def test_the_newest_version_has_the_plain_name(self) -> None:
        newest: dict[str, int] = {}
        for spec in SPECS:
            name, _, version = spec.partition("@")
            newest[name] = max(int(version), newest.get(name, 0))
        for spec in SPECS:
            name, _, version = spec.partition("@")
            file = name if int(version) == newest[name] else spec
            assert packs.published()[spec].path.name == f"{file}.yaml"

    def test_the_packs_of_an_installed_package_come_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "gradsurgeon"
        monkeypatch.setattr(packs, "__file__", str(package / "language" / "packs.py"))
        assert packs.folder() == tmp_path / "rules"
        (package / "rules").mkdir(parents=True)
        assert packs.folder() == package / "rules"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestEveryPack:
    def test_it_is_clean(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        first, second = text.splitlines()[:2]
        assert first == "# yaml-language-server: $schema=./rules.schema.json"
        assert second.startswith("# ")
        assert '\nrequires: ">=0.1"' in text
        # Files would be outside of the lock, and a pack in a pack could not be included beside it.
        assert "\ninclude:" not in text
        assert gradsurgeon.load(file).rules
        assert text.isascii()

    def test_its_comment_includes_it(self, file: Path) -> None:
        name = file.stem.partition("@")[0]
        if name == "quickstart":
            return
        shown = re.search(r"^#     (include: .*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert shown is not None
        ids = {rule.id for rule in gradsurgeon.load(file).rules}
        assert ids <= {rule.id for rule in gradsurgeon.load(f"version: 1\n{shown[1]}\n").rules}
        assert all(rule.startswith(name) for rule in ids)


def test_all_packs_can_be_combined() -> None:
    names = {spec.partition("@")[0] for spec in SPECS}
    together = gradsurgeon.load(included(*(f"{name}@1" for name in sorted(names))))
    assert len(together.rules) >= len(names)


def test_the_surgery_that_the_multi_task_pack_proposes_is_valid() -> None:
    text = packs.published()["multi-task@1"].path.read_text(encoding="utf-8")
    lines = text.partition("  # What to do about it")[2].splitlines()
    proposed = [f"  {line[4:]}" for line in lines if re.match(r"  # (- |  )", line)]
    document = "\n".join(["version: 1", "rules:", *proposed])
    rules = gradsurgeon.load(document.replace("id: surgery", "id: on-features", 1))
    assert [rule.id for rule in rules.rules] == ["on-features", "tasks", "surgery"]
    params = ["trunk.weight", "seg_head.0.weight", "heads.depth.0.weight"]
    plan = gradsurgeon.plan(plan_cases.named({"params": params}), rules)
    assert all(plan.of(rule.id) for rule in rules.rules)


@pytest.mark.parametrize("spec", SPECS)
def test_what_a_pack_binds_is_in_a_case(spec: str) -> None:
    assert list(CASES.glob(f"pack-{spec.replace('@', '-')}-*.yaml"))
