"""An action of each kind, and statistics, that a user defines: one class or one entry each is enough."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import models
import pytest
import torch
from commands import WITHOUT_TORCH, call
from pydantic import field_validator, model_validator
from small import attach, equal, fired, rule_file, sgd, weights_of
from torch import Tensor

import gradsurgeon
from gradsurgeon import RuleFileError, actions
from gradsurgeon.language import planning
from gradsurgeon.language.planning import manifest_file
from gradsurgeon.tensors import statistics

RULES = """version: 1
rules:
  - {id: flipped, action: own_actions:flip, params: "fc1.*", strength: 2, at: step}
  - {id: sizes, action: size-log, params: "*"}
  - {id: named, action: norm-log, params: "*", at: step, stats: [large, l2]}
  - {id: kept, action: keep, params: "fc2.bias"}
  - {id: held, action: hold, params: "fc2.weight"}
"""
TRAP = '  - {id: trap, action: size-trap, params: "*", limit: 100, then: warn}\n'
OWN = ["flip", "size-log", "keep", "hold", "size-trap"]
MODULE = Path(__file__).parent.parent / "own_actions.py"
NAMES = ["fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias"]


@pytest.fixture
def own() -> Iterator[Any]:
    """Import the module of the user, and forget it afterwards."""
    known, table = dict(actions.known_actions), dict(statistics.STATISTICS)
    sys.modules.pop("own_actions", None)
    yield importlib.import_module("own_actions")
    sys.modules.pop("own_actions")
    for registry, before in ((actions.known_actions, known), (statistics.STATISTICS, table)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type] # each what it held


@pytest.mark.slow
class TestReview:
    """On the command line, where nothing needs torch."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "own_actions.py").write_text(MODULE.read_text(encoding="utf-8"))
        (tmp_path / "rules.yaml").write_text(RULES + TRAP)
        changed = (
            (RULES + TRAP).replace("strength: 2", "strength: 1").replace("limit: 100", "limit: 50")
        )
        (tmp_path / "new.yaml").write_text(changed)
        manifest_file.write(planning.from_model(models.Mlp()), tmp_path / "params.json")
        return tmp_path

    def run(self, folder: Path, *arguments: str) -> tuple[int, str, str]:
        done = call(*arguments, cwd=folder, code=WITHOUT_TORCH)
        return done.returncode, done.stdout, done.stderr

    def test_what_is_not_imported_is_an_error_that_says_so(self, folder: Path) -> None:
        code, out, _ = self.run(folder, "lint", "rules.yaml", "--format", "concise")
        assert code == 1
        assert (
            "rules.yaml:3:27: error: no module `own_actions` with the action `flip` has been imported "
            "(rule files import nothing: import it before `apply`, or add `--import own_actions` to the command) [unknown-action]"
        ) in out
        assert "rules.yaml:4:25: error: unknown action `size-log` (" in out
        assert "; an action of your own is written MODULE:NAME) [unknown-action]" in out
        assert (
            'rules.yaml:5:66: error: expected the name of a statistic, found the text "large"'
            in out
        )
        code, out, error = self.run(folder, "lint", "rules.yaml", "--import", "gone")
        assert (code, out) == (2, "")
        assert "cannot import `gone`" in error

    def test_lint(self, folder: Path) -> None:
        given = ("lint", "rules.yaml", "--import", "own_actions", "--format", "concise")
        code, out, _ = self.run(folder, *given, "--fail-on", "error")
        assert (code, "error" in out) == (0, False)
        (folder / "rules.yaml").write_text(RULES.replace("strength: 2", "strenght: 2"))
        _, out, _ = self.run(folder, *given)
        assert "rules.yaml:3:62: error: unknown key `strenght` (did you mean `strength`?)" in out

    @pytest.mark.slow
    def test_explain(self, folder: Path) -> None:
        code, out, _ = self.run(folder, "explain", "--import", "own_actions", "flip")
        assert code == 0
        assert out.startswith("`flip`\n\nTurn a gradient around.")
        assert "strength" in out
        assert "# becomes: [-2, 6]" in out
        listed = self.run(folder, "explain", "--import", "own_actions")[1]
        assert all(f"\n{name} " in listed for name in OWN)


def train(model: torch.nn.Module, rules: Any, **options: Any) -> gradsurgeon.Session:
    optimizer = sgd(model)
    session = gradsurgeon.apply(model, rules, optimizer=optimizer, **options)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
    return session


@pytest.mark.usefixtures("own")
class TestTraining:
    @pytest.mark.slow
    def test_each_kind_does_what_it_is_for(self, tmp_path: Path) -> None:
        model = models.Mlp()
        held = model.fc2.weight.detach().clone()
        session = train(model, RULES, record=tmp_path / "run")
        grads = {name: param.grad for name, param in model.named_parameters()}
        assert fired(session) == {
            "flipped": 6,
            "sizes": 18,
            "named": 18,
            "kept": 3,
            "held": 3,
        }
        assert torch.equal(model.fc2.weight, held)
        for name, grad in grads.items():
            assert grad is not None
            seen = {stat: session.latest(name, stat, rule="sizes") for stat in ("top", "power")}
            flipped = -0.5 if name.startswith("fc1.") else 1.0  # `accumulated` comes before
            assert seen["power"] == pytest.approx(float((grad * flipped).square().mean()), rel=1e-5)
            assert seen["top"] == pytest.approx(float((grad * flipped).amax()), rel=1e-5)
            large = session.latest(name, "large", rule="named")
            assert large == int((grad.abs() > 0.01).sum())
        (last,) = (copy for key, copy in session.captured("kept").items() if key[1] == 2)
        assert grads["fc2.bias"] is not None
        assert torch.equal(last, grads["fc2.bias"])
        session.remove()
        # The run is read where nothing of the user's is imported.
        done = call("report", "run", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(f"  {rule} " in done.stdout for rule in ("flipped", "sizes", "kept", "held"))
        recorded = gradsurgeon.open_run(tmp_path / "run")
        assert recorded.latest("fc1.weight", "top") == session.latest("fc1.weight", "top")

    def test_modules_and_tags(self) -> None:
        rules = """version: 1
rules:
  - {id: seen, action: size-log, modules: "0", tensor: output}
  - {id: turned, action: flip, modules: "1", tensor: output.grad}
  - {id: turned-again, action: flip, tensors: "hidden"}
"""

        class Net(torch.nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return gradsurgeon.tag(super().forward(x), "hidden")

        def gradient(given: str) -> Tensor:
            torch.manual_seed(0)
            model = Net(torch.nn.Linear(4, 2), torch.nn.Linear(2, 1))
            session = train(model, given)
            assert all(status.fired for status in session.status().values())
            session.remove()
            weight = model.get_parameter("0.weight").grad
            assert weight is not None
            return weight

        # Twice turned around is where it was.
        log = 'version: 1\nrules:\n  - {id: log, action: norm-log, params: "*"}\n'
        torch.testing.assert_close(gradient(rules), gradient(log))

    def test_a_nan_that_an_edit_makes_moves_no_weight(self) -> None:
        class Normalize(gradsurgeon.EditRule):
            action: Literal["normalize"] = "normalize"

            def compile(self) -> gradsurgeon.Edit:
                def apply(grad: Tensor) -> Tensor:
                    return torch.div(grad, torch.linalg.vector_norm(grad))

                def apply_(grads: Sequence[Tensor]) -> None:
                    for grad in grads:
                        grad.copy_(apply(grad))

                return gradsurgeon.Edit(apply, apply_)

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        before = weights_of(model)
        optimizer = sgd(model)
        trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
        unit = {"id": "unit", "action": "normalize", "params": "*", "at": "step"}
        rules = rule_file(trap, unit)
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
            (model(torch.randn(8, 4)) * 0).sum().backward()  # no gradient has a length
            optimizer.step()
        assert session.events[0].kind == "trap"
        assert "finite before the rules at `step`" in session.events[0].message
        assert equal(model.parameters(), before)

    @pytest.mark.parametrize("at", ["step", "backward"])
    def test_an_edit_that_fails_is_named_and_keeps_its_error(self, at: str) -> None:
        class Picky(gradsurgeon.EditRule):
            action: Literal["picky"] = "picky"

            def compile(self) -> gradsurgeon.Edit:
                def apply(grad: torch.Tensor, at: gradsurgeon.At) -> torch.Tensor:
                    if at.name == "bias":
                        raise KeyError("no such thing")
                    return grad * 1

                return gradsurgeon.Edit(apply)

        model = torch.nn.Linear(4, 1)
        optimizer = sgd(model)
        rules = rule_file({"id": "mine", "action": "picky", "params": "*", "at": at})
        with (
            gradsurgeon.apply(model, rules, optimizer=optimizer),
            pytest.raises(KeyError, match="no such thing") as raised,
        ):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        assert raised.value.__notes__ == ["rule mine: bias, step 0"]

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            (lambda grad: grad.sum(), r"must return \[1, 4\] torch.float32, it returned \[\]"),
            (lambda grad: grad.double(), "it returned .* torch.float64"),
            (lambda grad: None, "must return a tensor, it returned NoneType"),
        ],
    )
    def test_an_edit_returns_what_it_got(self, wrong: Any, said: str) -> None:
        class Changes(gradsurgeon.EditRule):
            action: Literal["changes"] = "changes"

            def compile(self) -> gradsurgeon.Edit:
                return gradsurgeon.Edit(wrong)

        model = torch.nn.Linear(4, 1)
        rules = rule_file({"id": "mine", "action": "changes", "params": "weight", "at": "step"})
        optimizer = sgd(model)
        with (
            gradsurgeon.apply(model, rules, optimizer=optimizer),
            pytest.raises((TypeError, ValueError), match=said),
        ):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    @pytest.mark.parametrize("is_linear", [True, False])
    def test_an_edit_of_parts_of_a_sum_is_told_unless_it_is_linear(
        self, *, is_linear: bool
    ) -> None:
        class Half(gradsurgeon.EditRule):
            action: Literal["half"] = "half"
            linear: ClassVar[bool] = is_linear

            def compile(self) -> gradsurgeon.Edit:
                def apply_(grads: Sequence[Tensor]) -> None:
                    for grad in grads:
                        grad.mul_(0.5)

                return gradsurgeon.Edit(lambda grad: grad * 0.5, apply_)

        model = torch.nn.Linear(4, 1)
        rule = Half(id="half", params=("*",), at="backward")
        optimizer = sgd(model)
        warned = nullcontext() if is_linear else pytest.warns(gradsurgeon.GradSurgeonWarning)
        with gradsurgeon.apply(model, [rule], optimizer=optimizer) as session, warned:
            for _ in range(2):
                model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        assert len(session.events) == (0 if is_linear else 1)

    def test_a_trap_by_another_statistic_decides_before_the_update(self) -> None:
        model = models.Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rule = {"id": "trap", "action": "size-trap", "params": "fc1.*", "limit": 5.0}
        rules = rule_file({**rule, "then": "skip-step"})
        with gradsurgeon.apply(model, rules, optimizer=optimizer) as session:
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()  # nothing is beyond the limit
            assert session.events == []
            moved = weights_of(model)
            assert model.fc1.bias.grad is not None
            model.fc1.bias.grad[1] = -7.0
            optimizer.step()
            trap, _ = session.events
        assert (trap.kind, trap.step, trap.name) == ("trap", 1, "fc1.bias")
        assert "1 of 2 gradients are refused for their linf" in trap.message
        assert "> refused   fc1.bias    linf 7" in trap.message
        assert "non-finite" not in trap.message
        assert equal(model.parameters(), moved)

    def test_a_trap_by_another_statistic_is_for_parameters(self) -> None:
        rule = {
            "id": "trap",
            "action": "size-trap",
            "modules": "fc1",
            "tensor": "output",
            "limit": 5.0,
        }
        with pytest.raises(
            gradsurgeon.BindError, match=r"rule trap: .*alone, not `linf`; use `params`"
        ):
            attach(models.Mlp(), rule)


@pytest.mark.usefixtures("own")
def test_what_is_wrong_inside_an_option_of_any_type_is_told() -> None:
    class Listed(gradsurgeon.FreezeRule):
        action: Literal["listed"] = "listed"
        names: list[str] = []  # noqa: RUF012 - as people write them
        size: int | str = 1

    rule = {"id": "it", "action": "listed", "params": "*", "names": [1], "size": 1.5}
    with pytest.raises(RuleFileError) as caught:
        gradsurgeon.load(rule_file(rule))
    places = {str(one.place) for one in caught.value.problems}
    assert "<dict> rules[0].names[0]" in places
    assert len(places) > 1


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("number", "place"), [(6, "<dict> rules[0].number"), (4, "<dict> rules[0]")]
)
def test_what_a_validator_of_the_user_says_has_a_place(number: int, place: str) -> None:
    class Picky(gradsurgeon.FreezeRule):
        action: Literal["picky"] = "picky"
        number: int

        @field_validator("number")
        @classmethod
        def small(cls, number: int) -> int:
            if number > 5:
                raise ValueError("not that number")
            return number

        @model_validator(mode="after")
        def odd(self) -> Self:
            if self.number == 4:
                raise ValueError("not that number")
            return self

    rule = {"id": "it", "action": "picky", "params": "*", "number": number}
    with pytest.raises(RuleFileError) as caught:
        gradsurgeon.load(rule_file(rule))
    (problem,) = caught.value.problems
    assert str(problem.place) == place
    assert "not that number" in problem.message


class TestRefused:
    """What cannot work is said where it is defined, or where it is bound."""

    @pytest.mark.parametrize(
        ("kind", "name", "said"),
        [
            (gradsurgeon.FreezeRule, "zero", r"zero\.Zero is the action `zero` already"),
            (actions.Rule, "other", "derive it from a kind of rule"),
            (gradsurgeon.FreezeRule, "Other Name", "give it a name"),
            (gradsurgeon.EditRule, "other", "define `compile`"),
        ],
    )
    def test_a_class_that_is_no_action(self, kind: type, name: str, said: str) -> None:
        members = {"__annotations__": {"action": Literal[name]}, "action": name}
        with pytest.raises(TypeError, match=said):
            type("Other", (kind,), {**members, "__module__": __name__})

    def test_an_edit_of_gradients_that_accumulate(self) -> None:
        with pytest.raises(TypeError, match="an edit cannot act at `accumulated`"):

            class Other(gradsurgeon.EditRule):
                action: Literal["other"] = "other"
                points = ("accumulated", "step")

                def compile(self) -> Any:
                    raise NotImplementedError

    def test_a_statistic_of_a_name_that_is_taken(self) -> None:
        mine = gradsurgeon.Statistic(lambda grad, _: grad.sum(), merge="sum")
        with pytest.raises(ValueError, match="there is a statistic 'l2' already"):
            gradsurgeon.add_statistic("l2", mine)
        with pytest.raises(ValueError, match="is not a name for a statistic"):
            gradsurgeon.add_statistic("my stat", mine)

    def test_a_statistic_must_say_how_it_is_merged(self) -> None:
        with pytest.raises(TypeError, match="merge"):
            gradsurgeon.Statistic(lambda grad, _: grad.sum())  # type: ignore[call-arg]
