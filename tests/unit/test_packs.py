"""The packs of `rules/`: locked, clean, and binding what their comments claim."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ranks import Json

import gradsurgeon
from gradsurgeon.language import packs
from gradsurgeon.language.planning import Manifest, ModuleEntry, Param

LOCK = packs.folder() / "packs.json"
FILES = sorted(packs.folder().glob("*.yaml"))
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


def model(kind: str, params: str) -> Manifest:
    """Return a model of a class with parameters of these names."""
    names = params.split()
    modules = dict.fromkeys(
        ".".join(parts[:depth])
        for parts in (name.split(".") for name in names)
        for depth in range(1, len(parts))
    )
    return Manifest(
        kind,
        tuple(Param(name, (), (2,), "float32", True, ("Linear", "Module")) for name in names),
        tuple(ModuleEntry(name, (), ("Linear", "Module")) for name in modules),
        (kind, "Module"),
    )


MLP = "fc1.weight fc1.bias fc2.weight fc2.bias"
BLOCK = "ln_1.weight attn.c_attn.weight attn.c_attn.bias attn.c_proj.weight ln_2.weight mlp.c_fc.weight mlp.c_fc.bias"
# 12 blocks, so that 1 is not 10.
BLOCKS = " ".join(f"transformer.h.{n}.{name}" for n in range(12) for name in BLOCK.split())
MODELS = {
    "Mlp": MLP,
    # A pretrained backbone with a batch norm, and a new head.
    "FineTuned": "backbone.0.weight backbone.1.weight backbone.1.bias head.weight head.bias",
    # The names of torchvision.
    "ResNet": "conv1.weight bn1.weight bn1.bias layer1.0.weight layer1.1.bias layer4.0.weight fc.weight fc.bias",
    # The names of Hugging Face.
    "Gpt2": f"transformer.wte.weight transformer.wpe.weight {BLOCKS} transformer.ln_f.weight",
    "Gan": "generator.0.weight generator.2.bias discriminator.0.weight discriminator.2.bias",
    "DigitsGenerator": MLP,
    "PatchDiscriminator": MLP,
    "TwoTasks": "trunk.weight seg_head.0.weight seg_head.1.weight heads.depth.0.weight heads.edges.bias",
}
ALL = "."
QUICKSTART = {"norms": ALL, "trap": ALL, "bounded-head": r"^fc\d\.weight"}
# A pack, a model, and a regex that finds what each rule binds.
BOUND: list[tuple[str, str, dict[str, str]]] = [
    ("quickstart@1", "Mlp", QUICKSTART),
    ("quickstart@2", "Mlp", QUICKSTART),
    ("nan-trap@1", "Mlp", {"nan-trap-all": ALL}),
    ("norm-log@1", "Mlp", {"norm-log-raw": ALL, "norm-log-final": ALL}),
    ("clip@1", "Mlp", {"clip-all": ALL}),
    (
        "freeze-backbone@1",
        "FineTuned",
        {"freeze-backbone-stages": "^backbone", "freeze-backbone-head-norm": "^head"},
    ),
    (
        "freeze-backbone@1",
        "ResNet",
        {
            "freeze-backbone-resnet": "^(conv1|bn1|layer)",
            "freeze-backbone-head-norm": "^fc",
        },
    ),
    (
        "finetune-llm@1",
        "Gpt2",
        {
            "finetune-llm-embeddings": r"\.w[tp]e\.",
            "finetune-llm-lower-blocks": r"^transformer\.h\.[0-5]\.",
            "finetune-llm-attention": r"attn\.c_(attn|proj)\.weight$",
            "finetune-llm-total": r"^transformer\.(h|ln_f)\.",
            "finetune-llm-norms": r"^transformer\.h\..*weight$",
        },
    ),
    (
        "llm-stability@1",
        "Gpt2",
        {"llm-stability-spikes": ALL, "llm-stability-nans": ALL, "llm-stability-norms": ALL},
    ),
    (
        "gan@1",
        "Gan",
        {"gan-discriminator": "^discriminator", "gan-generator": "^generator", "gan-norms": ALL},
    ),
    ("gan@1", "DigitsGenerator", {"gan-generator-model": ALL, "gan-norms": ALL}),
    ("gan@1", "PatchDiscriminator", {"gan-discriminator-model": ALL, "gan-norms": ALL}),
    (
        "debug-everything@1",
        "Mlp",
        {
            "debug-everything-gradients": ALL,
            "debug-everything-updates": ALL,
            "debug-everything-outputs": ALL,
            "debug-everything-output-gradients": ALL,
            "debug-everything-nans": ALL,
        },
    ),
    ("multi-task@1", "TwoTasks", {"multi-task-features": r"^(seg_head|heads\.\w+)$"}),
    ("multi-task@1", "Mlp", {}),
]


@pytest.mark.parametrize(
    ("spec", "kind", "expected"), BOUND, ids=[f"{spec}-{kind}" for spec, kind, _ in BOUND]
)
def test_each_rule_binds_what_its_comment_says(
    spec: str, kind: str, expected: dict[str, str]
) -> None:
    names = model(kind, MODELS[kind])
    plan = gradsurgeon.plan(names, included(spec))
    for rule in plan.rules.rules:
        known = names.modules if rule.modules else names.params
        found = [binding.name for binding in plan.of(rule.id)]
        if rule.id in expected:
            assert found == [one.name for one in known if re.search(expected[rule.id], one.name)]
            assert found
        else:
            assert found == [], rule.id


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
    plan = gradsurgeon.plan(model("TwoTasks", MODELS["TwoTasks"]), rules)
    assert all(plan.of(rule.id) for rule in rules.rules)
