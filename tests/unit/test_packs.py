"""The packs of `rules/`: locked, clean, and doing on real models what their comments claim."""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 # the name everybody uses

import gradsurgeon
from gradsurgeon.language import packs
from gradsurgeon.runtime.session import Session

LOCK = packs.folder() / "packs.json"
FILES = sorted(packs.folder().glob("*.yaml"))
SPECS = sorted(packs.published())


def included(*names: str) -> dict[str, Any]:
    return {"version": 1, "include": [f"gradsurgeon:{name}@1" for name in names]}


def bound(model: nn.Module, rules: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names that each rule binds."""
    plan = gradsurgeon.plan(model, rules)
    return {rule.id: [one.name for one in plan.of(rule.id)] for rule in plan.rules.rules}


def params(model: nn.Module, pattern: str = "") -> list[str]:
    return [name for name, _ in model.named_parameters() if re.search(pattern, name)]


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    after = weights(model)
    return {name for name in before if not torch.equal(before[name], after[name])}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x).relu())
        return out


class ConvNet(nn.Module):
    """A pretrained backbone with a batch norm, and a new head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(x).mean((2, 3)))
        return out


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

    def __init__(self, layers: int = 12, width: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, width),
                "wpe": nn.Embedding(6, width),
                "h": nn.ModuleList(Block(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1]))
        for block in parts["h"]:
            x = block(x)
        out: Tensor = self.lm_head(parts["ln_f"](x))
        return out


class Gan(nn.Module):
    """Both networks in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


class DigitsGenerator(nn.Sequential):
    pass


class PatchDiscriminator(nn.Sequential):
    pass


def clipped(grads: list[Tensor], max_norm: float) -> list[Tensor]:
    """Return the gradients with one norm over all of them bounded, by the textbook."""
    total = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    return [grad * min(1.0, max_norm / (float(total) + 1e-6)) for grad in grads]


class TwoTasks(nn.Module):
    """A trunk under three heads, one of which is in a list and one a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.seg_head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.heads = nn.ModuleDict(
            {"depth": nn.Sequential(nn.Linear(4, 1)), "edges": nn.Linear(4, 1)}
        )


class TestLock:
    def test_every_file_is_published(self) -> None:
        assert FILES
        assert {found.path for found in packs.published().values()} == set(FILES)

    @pytest.mark.parametrize("spec", SPECS)
    def test_what_was_published_never_changes(self, spec: str) -> None:
        found = packs.published()[spec]
        text = found.path.read_text(encoding="utf-8")
        assert packs.content_hash(text) == found.sha256, (
            f"{found.path.name} has changed since it was published as {spec}: undo that, or publish a "
            "new version as rules/guide/maintainers.md says"
        )

    @pytest.mark.parametrize("spec", SPECS)
    def test_the_newest_version_has_the_plain_name(self, spec: str) -> None:
        name, _, version = spec.partition("@")
        newest = max(int(one.partition("@")[2]) for one in SPECS if one.startswith(f"{name}@"))
        file = f"{name}.yaml" if int(version) == newest else f"{name}@{version}.yaml"
        assert packs.published()[spec].path.name == file

    def test_the_wheel_carries_the_packs(self) -> None:
        settings = tomllib.loads(Path(packs.folder().parent, "pyproject.toml").read_text())
        wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert wheel["force-include"] == {"rules": "gradsurgeon/rules"}

    def test_those_of_an_installed_package_come_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            packs, "__file__", str(tmp_path / "gradsurgeon" / "language" / "packs.py")
        )
        assert packs.folder() == tmp_path / "rules"
        (tmp_path / "gradsurgeon" / "rules").mkdir(parents=True)
        assert packs.folder() == tmp_path / "gradsurgeon" / "rules"

    def test_the_lock_says_nothing_else(self) -> None:
        lock = json.loads(LOCK.read_text(encoding="utf-8"))
        assert set(lock) == {"version", "packs"}
        assert lock["version"] == 1
        assert all(set(entry) == {"file", "sha256"} for entry in lock["packs"].values())


class TestEveryPack:
    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
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

    @pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
    def test_what_its_comment_shows_includes_it(self, file: Path) -> None:
        if file.stem.partition("@")[0] == "quickstart":
            return
        shown = re.search(r"^#     (include: .*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert shown is not None
        ids = {rule.id for rule in gradsurgeon.load(f"version: 1\n{shown[1]}\n").rules}
        assert {rule.id for rule in gradsurgeon.load(file).rules} <= ids
        prefix = file.stem.partition("@")[0]
        assert all(rule.id.startswith(prefix) for rule in gradsurgeon.load(file).rules)

    @pytest.mark.parametrize("version", [1, 2])
    def test_the_quickstart_fits_any_model(self, version: int) -> None:
        rules = {"version": 1, "include": [f"gradsurgeon:quickstart@{version}"]}
        names = bound(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), rules)
        assert [rule for rule, found in names.items() if found] == ["norms", "trap"]

    def test_all_can_be_combined(self) -> None:
        names = {spec.partition("@")[0] for spec in SPECS}
        together = gradsurgeon.load(included(*sorted(names)))
        assert len(together.rules) >= len(names)


class TestNanTrap:
    def test_a_step_with_a_nan_changes_nothing(self) -> None:
        model = seeded(Mlp)
        assert bound(model, included("nan-trap")) == {"nan-trap-all": params(model)}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        with gradsurgeon.apply(model, included("nan-trap"), optimizer=optimizer) as session:
            for step in range(4):
                before = weights(model)
                optimizer.zero_grad()
                x = torch.randn(5, 4)
                loss = model(x).square().mean() * (float("nan") if step == 2 else 1.0)
                loss.backward()
                optimizer.step()
                assert moved(model, before) == (set() if step == 2 else set(before))
        assert [(one.kind, one.step) for one in session.events if one.kind == "trap"] == [
            ("trap", 2)
        ]

    def test_ten_in_a_row_stop_the_run(self) -> None:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsurgeon.apply(model, included("nan-trap"), optimizer=optimizer):
            for step in range(10):
                (model(torch.randn(5, 4)).sum() * float("inf")).backward()
                if step < 9:
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    with pytest.raises(gradsurgeon.NonFiniteGradientError, match=r"nan-trap-all"):
                        optimizer.step()


class TestNormLog:
    def test_before_and_after_the_clip_of_the_script(self) -> None:
        model = seeded(Mlp)
        names = params(model)
        rules = included("norm-log")
        assert bound(model, rules) == {"norm-log-raw": names, "norm-log-final": names}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
            (100 * model(torch.randn(5, 4)).square().mean()).backward()
            raw = {name: float(param.grad.norm()) for name, param in named_grads(model)}
            total = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            assert total > 10
            optimizer.step()
            for name in names:
                assert session.latest(name, rule="norm-log-raw") == pytest.approx(raw[name])
                final = session.latest(name, rule="norm-log-final")
                assert final == pytest.approx(raw[name] / total, rel=1e-4)


def named_grads(model: nn.Module) -> list[tuple[str, Any]]:
    return list(model.named_parameters())


def grads(model: nn.Module, pattern: str = "") -> list[Tensor]:
    return [
        param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None and re.search(pattern, name)
    ]


class TestClip:
    def test_it_is_clip_grad_norm(self) -> None:
        model, twin = seeded(Mlp), seeded(Mlp)
        assert bound(model, included("clip")) == {"clip-all": params(model)}
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
        with gradsurgeon.apply(model, included("clip"), optimizer=optimizers[0]) as session:
            for factor in (0.01, 50.0, 1.0, 20.0):
                x = torch.randn(5, 4)
                for one, optimizer in zip((model, twin), optimizers, strict=True):
                    optimizer.zero_grad()
                    # Two micro-batches: the norm is that of their sum.
                    (factor * one(x[:3]).square().mean()).backward()
                    (factor * one(x[3:]).square().mean()).backward()
                    if one is twin:
                        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
                    optimizer.step()
                for left, right in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)
            changed = session.status()["clip-all"].changed
        assert changed is not None
        assert 0.25 <= changed <= 0.75


class TestFreezeBackbone:
    def train(self, model: nn.Module, steps: int, start_step: int = 0) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        rules = included("freeze-backbone")
        with gradsurgeon.apply(model, rules, optimizer=optimizer, start_step=start_step) as session:
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(6, 1, 8, 8)), torch.arange(6) % 2).backward()
                optimizer.step()
            self.states = {
                name for name, param in model.named_parameters() if param in optimizer.state
            }
            self.session: Session = session

    def test_what_it_binds(self) -> None:
        model = ConvNet()
        assert bound(model, included("freeze-backbone")) == {
            "freeze-backbone-stages": params(model, "^backbone"),
            "freeze-backbone-resnet": [],
            "freeze-backbone-head-norm": ["head.weight", "head.bias"],
        }
        assert len(params(model, "^backbone")) == 4

    def test_it_binds_the_names_of_a_resnet(self) -> None:
        model = TinyResNet()
        found = bound(model, included("freeze-backbone"))
        assert found["freeze-backbone-stages"] == []
        assert found["freeze-backbone-resnet"] == params(model, "^(?!fc)")
        assert len(found["freeze-backbone-resnet"]) == 10
        assert found["freeze-backbone-head-norm"] == ["fc.weight", "fc.bias"]

    def test_the_backbone_stays_bit_by_bit_and_the_head_learns(self) -> None:
        model = seeded(ConvNet)
        before = weights(model)
        running = model.get_buffer("backbone.1.running_mean").clone()
        self.train(model, 5)
        assert moved(model, before) == {"head.weight", "head.bias"}
        assert self.states == {"head.weight", "head.bias"}
        # As the comment says: buffers are no parameters.
        assert not torch.equal(running, model.get_buffer("backbone.1.running_mean"))
        assert self.session.latest("head.weight") > 0

    def test_it_thaws_at_step_1000(self) -> None:
        model = seeded(ConvNet)
        before = weights(model)
        self.train(model, 1, start_step=999)
        assert moved(model, before) == {"head.weight", "head.bias"}
        self.train(model, 1, start_step=1000)
        assert moved(model, before) == set(before)


class TestFinetuneLlm:
    TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])

    def backward(self, model: nn.Module) -> None:
        logits = model(self.TOKENS)[:, :-1].flatten(0, 1)
        (30 * F.cross_entropy(logits, self.TOKENS[:, 1:].flatten())).backward()

    def test_what_it_binds(self) -> None:
        model = TinyGpt2()
        found = bound(model, included("finetune-llm"))
        embeddings = ["transformer.wte.weight", "transformer.wpe.weight"]
        assert found == {
            "finetune-llm-embeddings": embeddings,
            "finetune-llm-lower-blocks": params(model, r"^transformer\.h\.[0-5]\."),
            "finetune-llm-attention": params(model, r"attn\.c_(attn|proj)\.weight$"),
            "finetune-llm-total": [name for name in params(model) if name not in embeddings],
            "finetune-llm-norms": params(model, r"^transformer\.h\..*weight$"),
        }
        assert [len(names) for names in found.values()] == [2, 6 * 12, 12 * 2, 12 * 12 + 2, 12 * 6]
        plan = gradsurgeon.plan(model, included("finetune-llm"))
        assert plan.of("finetune-llm-embeddings")[0].aliases == ("lm_head.weight",)
        assert not any("optional" in one for texts in plan.rule_warnings.values() for one in texts)

    def test_the_update_is_that_of_the_textbook(self) -> None:
        model, twin = seeded(TinyGpt2), seeded(TinyGpt2)
        self.backward(twin)
        expected = {name: param.grad for name, param in named_grads(twin)}
        for name in params(twin, r"\.h\.[0-5]\."):
            expected[name] = expected[name] * 0.1
        for name in params(twin, r"attn\..*weight$"):
            (expected[name],) = clipped([expected[name]], 0.5)
        rest = [
            name
            for name in expected
            if name not in ("transformer.wte.weight", "transformer.wpe.weight")
        ]
        assert torch.stack([expected[name].norm() for name in rest]).norm() > 1.0
        total = clipped([expected[name] for name in rest], 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = weights(model)
        with gradsurgeon.apply(model, included("finetune-llm"), optimizer=optimizer) as session:
            self.backward(model)
            optimizer.step()
            attention = session.status()["finetune-llm-attention"]
            norms = session.latest("transformer.h.11.attn.c_attn.weight")
        after = weights(model)
        for name, grad in zip(rest, total, strict=True):
            torch.testing.assert_close(before[name] - after[name], grad, rtol=1e-4, atol=1e-6)
        assert moved(model, before) == set(rest)
        assert attention.changed
        assert norms == pytest.approx(
            float(total[rest.index("transformer.h.11.attn.c_attn.weight")].norm()), rel=1e-4
        )

    def test_the_tied_embeddings_stay_under_decay(self) -> None:
        model = seeded(TinyGpt2)
        before = weights(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        with gradsurgeon.apply(model, included("finetune-llm", "nan-trap"), optimizer=optimizer):
            for _ in range(3):
                optimizer.zero_grad()
                self.backward(model)
                optimizer.step()
        still = {"transformer.wte.weight", "transformer.wpe.weight"}
        assert moved(model, before) == set(before) - still
        head: Any = model.lm_head
        assert torch.equal(head.weight, before["transformer.wte.weight"])


class TestLlmStability:
    SPIKE, NAN, STEPS = 30, 35, 40

    def train(self, model: nn.Module) -> Iterator[tuple[int, dict[str, Tensor], dict[str, Tensor]]]:
        """Train, and yield each step with the weights before it and after it."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rules = included("llm-stability")
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as self.session:
            for step in range(self.STEPS):
                before = weights(model)
                tokens = torch.randint(0, 11, (4, 6))
                logits = model(tokens)[:, :-1].flatten(0, 1)
                loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
                optimizer.zero_grad()
                (loss * {self.SPIKE: 50.0, self.NAN: math.nan}.get(step, 1.0)).backward()
                optimizer.step()
                yield step, before, weights(model)

    def test_what_it_binds(self) -> None:
        model = TinyGpt2(layers=2)
        names = params(model)
        assert bound(model, included("llm-stability")) == {
            "llm-stability-spikes": names,
            "llm-stability-nans": names,
            "llm-stability-norms": names,
        }

    def test_a_spike_moves_the_weights_no_more_than_a_usual_step(self) -> None:
        model, moved_by = seeded(lambda: TinyGpt2(layers=2)), []
        for _, before, after in self.train(model):
            moves = [(after[name] - before[name]).norm() for name in before]
            moved_by.append(float(torch.stack(moves).norm()) / 0.01)
        histories = [dict(self.session.history(name)) for name in params(model)]
        norms = [math.hypot(*(one[step] for one in histories)) for step in range(self.STEPS)]
        assert norms[self.SPIKE] > 10 * max(norms[: self.SPIKE])
        expected = list(zclip(norms))
        assert expected[self.SPIKE] < norms[self.SPIKE] / 10
        assert moved_by == pytest.approx(expected, rel=1e-3)
        assert math.isnan(norms[self.NAN])
        events = [(one.kind, one.step) for one in self.session.events if one.step == self.SPIKE]
        assert ("spike", self.SPIKE) in events


def zclip(norms: list[float]) -> Iterator[float]:
    """Yield the norms as ZClip lets them through (arXiv 2504.02507, 2.5, 0.97, 25); 0 for a skipped step."""
    warm: list[float] = []
    for norm in norms:
        if not math.isfinite(norm):
            yield 0.0
        elif len(warm) < 25:
            warm.append(norm)
            mean, variance = statistics.fmean(warm), statistics.pvariance(warm)
            yield norm
        else:
            z = (norm - mean) / (math.sqrt(variance) + 1e-6)
            passed = mean + 2.5**2 / z * math.sqrt(variance) if z > 2.5 else norm
            mean = 0.97 * mean + 0.03 * passed
            variance = 0.97 * variance + 0.03 * (passed - mean) ** 2
            yield passed


class TestGan:
    RULES = included("gan")

    def test_what_it_binds_in_one_model(self) -> None:
        model = Gan()
        assert bound(model, self.RULES) == {
            "gan-discriminator": params(model, "^discriminator"),
            "gan-generator": params(model, "^generator"),
            "gan-discriminator-model": [],
            "gan-generator-model": [],
            "gan-norms": params(model),
        }
        assert len(params(model, "^generator")) == len(params(model, "^discriminator")) == 4

    def test_what_it_binds_in_two_models(self) -> None:
        for build, own in ((DigitsGenerator, "generator"), (PatchDiscriminator, "discriminator")):
            model = build(nn.Linear(2, 2))
            found = bound(model, self.RULES)
            assert {rule for rule, names in found.items() if names} == {
                f"gan-{own}-model",
                "gan-norms",
            }
            assert found[f"gan-{own}-model"] == ["0.weight", "0.bias"]

    def test_two_optimizers_in_turn(self) -> None:
        model, twin = seeded(Gan), seeded(Gan)
        turns = [
            (part, bound_) for part, bound_ in (("discriminator", 1.0), ("generator", 5.0))
        ] * 2
        optimizers = {
            part: torch.optim.SGD(model.get_submodule(part).parameters(), lr=0.01)
            for part in ("discriminator", "generator")
        }
        with gradsurgeon.apply(model, self.RULES, optimizer=list(optimizers.values())) as session:
            for part, max_norm in turns:
                noise = torch.randn(5, 2)
                for one in (model, twin):
                    net: Any = one
                    net.get_submodule(part).zero_grad()
                    # The other network gets gradients in this turn, too, and keeps them.
                    (900 * net.discriminator(net.generator(noise)).square().mean()).backward()
                own = list(twin.get_submodule(part).parameters())
                raw = [param.grad for param in own if param.grad is not None]
                assert torch.stack([grad.norm() for grad in raw]).norm() > max_norm
                with torch.no_grad():
                    for param, grad in zip(own, clipped(raw, max_norm), strict=True):
                        param.sub_(0.01 * grad)
                optimizers[part].step()
                for left, right in zip(model.parameters(), twin.parameters(), strict=True):
                    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
            assert session.status()["gan-generator"].changed == 1.0
            assert session.latest("generator.0.weight", "zeros") >= 0


class TestDebugEverything:
    def run(self, rules: dict[str, Any] | None) -> tuple[list[Tensor], Any]:
        model = seeded(Mlp)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        session = rules and gradsurgeon.apply(model, rules, optimizer=optimizer)
        torch.manual_seed(1)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()], session

    def test_what_it_binds(self) -> None:
        model = Mlp()
        assert bound(model, included("debug-everything")) == {
            "debug-everything-gradients": params(model),
            "debug-everything-updates": params(model),
            "debug-everything-outputs": ["fc1", "fc2"],
            "debug-everything-output-gradients": ["fc1", "fc2"],
            "debug-everything-nans": params(model),
        }

    def test_it_changes_nothing_and_sees_everything(self) -> None:
        plain, _ = self.run(None)
        watched, session = self.run(included("debug-everything"))
        assert all(map(torch.equal, plain, watched))
        raw = session.latest("fc1.weight", rule="debug-everything-gradients")
        final = session.latest("fc1.weight", rule="debug-everything-updates")
        assert 0 < final < raw
        for stat in ("l1", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"):
            session.latest("fc1.weight", stat, rule="debug-everything-gradients")
        status = session.status()
        assert all(one.fired for one in status.values()), status
        session.remove()

    def test_a_nan_is_reported_and_not_stopped(self) -> None:
        model = seeded(Mlp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradsurgeon.apply(model, included("debug-everything"), optimizer=optimizer) as session:
            (model(torch.randn(5, 4)).sum() * float("nan")).backward()
            with pytest.warns(gradsurgeon.GradSurgeonWarning, match=r"expect non-finite weights"):
                optimizer.step()
            nonfinite = session.latest("fc2.bias", "nonfinite", rule="debug-everything-gradients")
        assert nonfinite == 3
        assert any(one.kind == "trap" for one in session.events)
        assert not torch.isfinite(model.get_parameter("fc2.bias")).any()


class TestMultiTask:
    def test_heads_meet_and_not_what_they_consist_of(self) -> None:
        found = bound(TwoTasks(), included("multi-task"))
        assert found == {"multi-task-features": ["seg_head", "heads.depth", "heads.edges"]}
        assert bound(Mlp(), included("multi-task")) == {"multi-task-features": []}

    def test_it_changes_nothing(self) -> None:
        (rule,) = gradsurgeon.load(included("multi-task")).rules
        assert not rule.edits

    def test_it_measures_in_an_ordinary_backward_pass(self) -> None:
        model = TwoTasks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        heads: list[Any] = [model.seg_head, *model.heads.values()]
        with gradsurgeon.apply(model, included("multi-task"), optimizer=optimizer) as session:
            features = model.trunk(torch.randn(3, 4))
            torch.stack([head(features).mean() for head in heads]).sum().backward()
            optimizer.step()
            assert session.status()["multi-task-features"].fired == 1

    def test_what_it_proposes_is_valid(self) -> None:
        text = packs.published()["multi-task@1"].path.read_text(encoding="utf-8")
        lines = text.partition("  # What to do about it")[2].splitlines()
        commented = [line[4:] for line in lines if re.match(r"  # (- |  )", line)]
        rules = gradsurgeon.load(
            "version: 1\nrules:\n"
            + "\n".join(f"  {line}" for line in commented).replace(
                "id: surgery", "id: on-features", 1
            )
        )
        assert [rule.id for rule in rules.rules] == ["on-features", "tasks", "surgery"]
        model = nn.ModuleDict(
            {"trunk": nn.Linear(2, 2), "seg_head": nn.Linear(2, 1), "depth_head": nn.Linear(2, 1)}
        )
        plan = gradsurgeon.plan(model, rules)
        assert all(plan.of(rule.id) for rule in rules.rules)
