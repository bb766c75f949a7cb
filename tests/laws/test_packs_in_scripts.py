"""Rules that nobody chose for a script never end it: what a set-up refuses is one line, and the other rules act."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import actions_of_users
import pack_trainings as trainings
import pytest
import torch
import yaml
from pack_trainings import PACKAGE, Launched, Train, launched, same
from small import attach

from gradsurgeon import BindError, NonFiniteGradientError, load
from gradsurgeon.actions import LossRule
from gradsurgeon.actions.checks.base import Finding, Update
from gradsurgeon.actions.checks.update_check import UpdateCheck
from gradsurgeon.language import packs
from gradsurgeon.language.planning import binding
from gradsurgeon.runtime.refusals import Guard, Refusals


@pytest.fixture(scope="module", autouse=True)
def _third_trap() -> Iterator[None]:
    with actions_of_users.third_trap():
        yield


NORMS = {"id": "norms", "action": "norm-log", "params": "*"}
FREEZE = {"id": "still", "action": "freeze", "params": "0.*"}
DENSE = {"id": "dense", "action": "clamp", "params": "*", "at": "step", "min": 0.1}
CASES = Path(__file__).parents[1] / "cases"
# By name: the training, its rules, what the line says, and the rules that act all the same.
REFUSED: dict[str, dict[str, Any]] = yaml.safe_load((CASES / "refused_in_scripts.yaml").read_text())


HELD_BACK = [
    FREEZE,
    {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"},
    {"id": "trap", "action": "nan-trap", "modules": "0", "tensor": "output", "then": "skip-step"},
]


@pytest.mark.cell(
    "closures (LBFGS)",
    "step",
    "modules",
    refused="`freeze` and `then: skip-step`: LBFGS moves all parameters together and several times in a step; "
    "a skipping trap of a pack warns instead",
)
@pytest.mark.parametrize("rule", HELD_BACK, ids=["freeze", "trap", "trap on modules"])
def test_lbfgs_refuses_chosen_rules_that_hold_an_update_back(rule: dict[str, Any]) -> None:
    model = trainings.net()
    optimizer: Any = torch.optim.LBFGS(model.parameters())
    with pytest.raises(BindError, match="LBFGS moves all parameters together"):
        attach(model, rule, optimizer=optimizer)
    done = launched(trainings.lbfgs, [rule, NORMS])
    assert same(done.weights, list(trainings.lbfgs()))
    assert done.fired() == ({"norms"} if rule is FREEZE else {"norms", "trap"})


def driven(what: str) -> tuple[Train, Launched]:
    train: Train = getattr(trainings, REFUSED[what]["train"])
    return train, launched(train, REFUSED[what]["rules"])


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_set_up_refuses_is_one_line_and_the_other_rules_act(what: str) -> None:
    train, done = driven(what)
    assert same(done.weights, [*train()])
    assert [REFUSED[what]["said"] in line for line in done.lines].count(True) == 1, done.lines
    words = (" rests: ", " rest: ", "no rule acts", "only warns", 'matches "')
    assert sum(any(word in line for word in words) for line in done.lines) == 1, done.lines
    assert done.fired() >= set(REFUSED[what]["act"])
    assert not any("never-fired" in line for line in done.lines)


def test_several_rules_that_are_refused_for_one_reason_share_a_line() -> None:
    done = launched(trainings.two_heads, [DENSE, {**DENSE, "id": "other"}, NORMS])
    assert ["dense, other rest: " in line for line in done.lines].count(True) == 1, done.lines


def test_the_verdict_of_a_trap_is_no_refusal() -> None:
    trap = {"id": "trap", "action": "nan-trap", "params": "*"}
    with pytest.raises(NonFiniteGradientError):
        launched(trainings.with_a_nan, [trap, NORMS])


def test_rules_act_before_and_after_a_capture() -> None:
    done = launched(trainings.captured)
    (status,) = done.statuses
    # Four of five steps.
    assert (status["debug-nans"].fired, status["debug-norms"].fired) == (4, 4 * 6)
    checked = "  checked: debug-updates, debug-loop, debug-structure, debug-ranks; found: nothing"
    assert checked in done.lines


def test_records_that_cannot_be_written_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    done = launched(trainings.plain, record=str(tmp_path / "file"))
    assert same(done.weights, list(trainings.plain()))
    (line,) = [line for line in done.lines if "no rule acts: " in line]
    assert str(tmp_path / "file") in line


def test_a_fault_of_ours_is_one_line_that_names_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise ZeroDivisionError("nothing left")

    monkeypatch.setattr(binding, "_bindings", fails)
    done = launched(trainings.plain)
    (line,) = done.lines
    assert line.startswith(
        "gradsurgeon: no rule acts: ZeroDivisionError: nothing left (language/planning/binding.py:"
    )
    assert line.endswith("; a fault of gradsurgeon, please report it)")


def test_a_fault_of_ours_that_stops_all_rules_is_no_fine_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_check: object, update: Update) -> list[Finding]:
        if update.step == 2:
            raise ZeroDivisionError("nothing left")
        return []

    monkeypatch.setattr(UpdateCheck, "after_update", fails)
    done = launched(trainings.plain)
    assert same(done.weights, list(trainings.plain()))
    at = done.lines.index("gradsurgeon: Sequential, 2 steps")
    assert done.lines[at + 1 : at + 3] == ["  look: no rule acts, from step 2 on", "  ended"]
    (checked,) = [line for line in done.lines if line.startswith("  checked: ")]
    assert checked.endswith("; found: no fault")


# -------------------------------------------------------------------------------------------------
# Every error path: each `raise` and each refusal of the rooms that run inside a script.
# -------------------------------------------------------------------------------------------------

ROOMS = (
    "runtime",
    "distributed",
    "forensics",
    "actions/checks",
    "records",
    "tensors",
    "integrations/launcher",
)
# What reads runs and bundles, which no training does.
READERS = ("records/store/", "tensors/_bounded_load.py")
REFUSALS = {"refuse", "refuse_rules", "refuse_complaints", "abstain", "soften_skips"}
# Sites that no training here drives, by the reason.
NOT_DRIVEN: dict[str, list[str]] = yaml.safe_load((CASES / "not_driven.yaml").read_text())


def sites() -> dict[str, set[int]]:
    """Return the lines with a `raise` or a refusal, by file and function."""
    found: dict[str, set[int]] = {}
    for room in ROOMS:
        files = sorted((PACKAGE / room).rglob("*.py"))
        assert files, room
        for file in files:
            if str(file.relative_to(PACKAGE)).startswith(READERS):
                continue
            for name, line in _sites_in(ast.parse(file.read_text(encoding="utf-8")), ""):
                found.setdefault(f"{file.relative_to(PACKAGE)}:{name}", set()).add(line)
    return found


def _sites_in(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _sites_in(child, f"{name}.{child.name}".removeprefix("."))
            continue
        # A bare `raise` passes another error on.
        if isinstance(child, ast.Raise) and child.exc is not None:
            yield name, child.lineno
        if isinstance(child, ast.Call) and getattr(child.func, "attr", "") in REFUSALS:
            yield name, child.lineno
        yield from _sites_in(child, name)


def _place(frame: FrameType, line: int) -> tuple[str, int]:
    return frame.f_code.co_filename.removeprefix(f"{PACKAGE}/"), line


def noted(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Return a set that gets the file and line of each refusal, and of each error that a guard meets."""
    places: set[tuple[str, int]] = set()
    for name in REFUSALS:
        monkeypatch.setattr(Refusals, name, _noting(getattr(Refusals, name), places))
    goes_on_after = Guard.goes_on_after

    def noting(self: Guard, error: Exception) -> bool:
        traceback = error.__traceback__
        while traceback is not None:
            places.add(_place(traceback.tb_frame, traceback.tb_lineno))
            traceback = traceback.tb_next
        return goes_on_after(self, error)

    monkeypatch.setattr(Guard, "goes_on_after", noting)
    return places


def _noting(act: Callable[..., None], places: set[tuple[str, int]]) -> Callable[..., None]:
    def noting(*args: Any, **named: Any) -> None:
        frame = sys._getframe(1)
        places.add(_place(frame, frame.f_lineno))
        act(*args, **named)

    return noting


def test_every_error_path_is_driven_or_is_none_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    places = noted(monkeypatch)
    for what in REFUSED:
        driven(what)
    missing = {
        site
        for site, lines in sites().items()
        if not places.issuperset((site.partition(":")[0], line) for line in lines)
    }
    assert sorted(missing) == sorted(chain.from_iterable(NOT_DRIVEN.values()))


def test_no_pack_has_the_rules_of_sites_that_no_training_drives() -> None:
    for name in packs.published():
        for rule in load(f"gradsurgeon:{name}").rules:
            # Rules on losses, bounds on what one pass contributes, and bounds by which ranks stop alone.
            assert not (isinstance(rule, LossRule) and (rule.edits or rule.target == "params"))
            bounds = rule.edits and not rule.linear
            assert not (bounds and rule.target == "params" and rule.point == "backward")
            assert rule.action != "spike-trap" or rule.edits
