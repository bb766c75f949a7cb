"""The packs of `rules/`: locked, clean, and binding on real models what their comments claim."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 # the name everybody uses

import gradsurgeon
from gradsurgeon.language import packs

LOCK = packs.folder() / "packs.json"
FILES = sorted(packs.folder().glob("*.yaml"))
SPECS = sorted(packs.published())


def included(*specs: str) -> dict[str, Any]:
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

    def test_the_wheel_carries_the_packs(self) -> None:
        settings = tomllib.loads(Path(packs.folder().parent, "pyproject.toml").read_text())
        wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert wheel["force-include"] == {"rules": "gradsurgeon/rules"}

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


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 3)


class FineTuned(nn.Module):
    """A pretrained backbone and a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)


class TinyResNet(nn.Module):
    """The names of torchvision's ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3)
        self.bn1 = nn.BatchNorm2d(2)
        self.layer1 = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
        self.layer4 = nn.Sequential(nn.Conv2d(2, 2, 1))
        self.fc = nn.Linear(2, 2)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.c_attn(x).chunk(3, -1)
        out: Tensor = self.c_proj(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 2 * width), "c_proj": nn.Linear(2 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return out


class TinyGpt2(nn.Module):
    """The names of Hugging Face's GPT-2, head tied to the embeddings; 12 blocks, so that 1 is not 10."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, 4),
                "wpe": nn.Embedding(6, 4),
                "h": nn.Sequential(*(Block(4) for _ in range(12))),
                "ln_f": nn.LayerNorm(4),
            }
        )
        self.lm_head = nn.Linear(4, 11, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        embedded = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        out: Tensor = self.lm_head(parts["ln_f"](parts["h"](embedded)))
        return out


class Gan(nn.Module):
    """Both networks in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(2, 3)
        self.discriminator = nn.Linear(3, 1)


class DigitsGenerator(Mlp):
    pass


class PatchDiscriminator(Mlp):
    pass


class TwoTasks(nn.Module):
    """A trunk under three heads, two of which are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.seg_head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.heads = nn.ModuleDict(
            {"depth": nn.Sequential(nn.Linear(4, 1)), "edges": nn.Linear(4, 1)}
        )


ALL = "."
EMBEDDINGS = ["transformer.wte.weight", "transformer.wpe.weight"]
QUICKSTART: dict[str, str | list[str]] = {
    "norms": ALL,
    "trap": ALL,
    "bounded-head": ["fc1.weight", "fc2.weight"],
}
# A pack, a model, and what each rule binds: a regex that finds the parameters, or names.
BOUND: list[tuple[str, type[nn.Module], dict[str, str | list[str]]]] = [
    ("quickstart@1", Mlp, QUICKSTART),
    ("quickstart@2", Mlp, QUICKSTART),
    ("nan-trap@1", Mlp, {"nan-trap-all": ALL}),
    ("norm-log@1", Mlp, {"norm-log-raw": ALL, "norm-log-final": ALL}),
    ("clip@1", Mlp, {"clip-all": ALL}),
    (
        "freeze-backbone@1",
        FineTuned,
        {
            "freeze-backbone-stages": "^backbone",
            "freeze-backbone-head-norm": ["head.weight", "head.bias"],
        },
    ),
    (
        "freeze-backbone@1",
        TinyResNet,
        {
            "freeze-backbone-resnet": "^(conv1|bn1|layer)",
            "freeze-backbone-head-norm": ["fc.weight", "fc.bias"],
        },
    ),
    (
        "finetune-llm@1",
        TinyGpt2,
        {
            "finetune-llm-embeddings": EMBEDDINGS,
            "finetune-llm-lower-blocks": r"^transformer\.h\.[0-5]\.",
            "finetune-llm-attention": r"attn\.c_(attn|proj)\.weight$",
            "finetune-llm-total": r"^transformer\.(h|ln_f)\.",
            "finetune-llm-norms": r"^transformer\.h\..*weight$",
        },
    ),
    (
        "llm-stability@1",
        Mlp,
        {"llm-stability-spikes": ALL, "llm-stability-nans": ALL, "llm-stability-norms": ALL},
    ),
    (
        "gan@1",
        Gan,
        {"gan-discriminator": "^discriminator", "gan-generator": "^generator", "gan-norms": ALL},
    ),
    ("gan@1", DigitsGenerator, {"gan-generator-model": ALL, "gan-norms": ALL}),
    ("gan@1", PatchDiscriminator, {"gan-discriminator-model": ALL, "gan-norms": ALL}),
    (
        "debug-everything@1",
        Mlp,
        {
            "debug-everything-gradients": ALL,
            "debug-everything-updates": ALL,
            "debug-everything-outputs": ["fc1", "fc2"],
            "debug-everything-output-gradients": ["fc1", "fc2"],
            "debug-everything-nans": ALL,
        },
    ),
    (
        "multi-task@1",
        TwoTasks,
        {"multi-task-features": ["seg_head", "heads.depth", "heads.edges"]},
    ),
    ("multi-task@1", Mlp, {}),
]


@pytest.mark.parametrize(
    ("spec", "build", "expected"), BOUND, ids=[f"{case[0]}-{case[1].__name__}" for case in BOUND]
)
def test_each_rule_binds_what_its_comment_says(
    spec: str, build: type[nn.Module], expected: dict[str, str | list[str]]
) -> None:
    model = build()
    params = [name for name, _ in model.named_parameters()]
    plan = gradsurgeon.plan(model, included(spec))
    for rule in plan.rules.rules:
        names = expected.get(rule.id, [])
        if isinstance(names, str):
            names = [param for param in params if re.search(names, param)]
            assert names
        assert [binding.name for binding in plan.of(rule.id)] == names, rule.id


def test_all_packs_can_be_combined() -> None:
    names = {spec.partition("@")[0] for spec in SPECS}
    together = gradsurgeon.load(included(*(f"{name}@1" for name in sorted(names))))
    assert len(together.rules) >= len(names)


def clipped(grads: dict[str, Tensor], max_norm: float) -> dict[str, Tensor]:
    """Return the gradients with one norm over all of them bounded, by the textbook."""
    total = torch.stack([grad.norm() for grad in grads.values()]).norm()
    assert total > max_norm
    return {name: grad * (max_norm / total) for name, grad in grads.items()}


def test_fine_tuning_updates_weights_as_the_textbook_says() -> None:
    torch.manual_seed(0)
    model = TinyGpt2()
    params = dict(model.named_parameters())
    before = {name: param.detach().clone() for name, param in params.items()}
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])

    def loss() -> Tensor:
        logits = model(tokens)[:, :-1].flatten(0, 1)
        return 30 * F.cross_entropy(logits, tokens[:, 1:].flatten())

    grads = torch.autograd.grad(loss(), list(params.values()))
    expected = dict(zip(params, grads, strict=True))
    for name, grad in expected.items():
        if re.search(r"\.h\.[0-5]\.", name):
            grad.mul_(0.1)
        if re.search(r"attn\..*weight$", name):
            grad.mul_(min(1.0, 0.5 / float(grad.norm())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with gradsurgeon.apply(model, included("finetune-llm@1"), optimizer=optimizer) as session:
        loss().backward()
        optimizer.step()
        norm = session.latest("transformer.h.11.attn.c_attn.weight")
    for name in EMBEDDINGS:
        del expected[name]
        assert torch.equal(params[name], before[name])
    expected = clipped(expected, 1.0)
    for name, grad in expected.items():
        torch.testing.assert_close(before[name] - params[name], grad, rtol=1e-4, atol=1e-6)
    assert norm == pytest.approx(
        float(expected["transformer.h.11.attn.c_attn.weight"].norm()), rel=1e-4
    )


def test_the_surgery_that_the_multi_task_pack_proposes_is_valid() -> None:
    text = packs.published()["multi-task@1"].path.read_text(encoding="utf-8")
    lines = text.partition("  # What to do about it")[2].splitlines()
    proposed = [f"  {line[4:]}" for line in lines if re.match(r"  # (- |  )", line)]
    document = "\n".join(["version: 1", "rules:", *proposed])
    rules = gradsurgeon.load(document.replace("id: surgery", "id: on-features", 1))
    assert [rule.id for rule in rules.rules] == ["on-features", "tasks", "surgery"]
    plan = gradsurgeon.plan(TwoTasks(), rules)
    assert all(plan.of(rule.id) for rule in rules.rules)
