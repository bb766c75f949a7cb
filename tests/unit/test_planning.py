"""Rules bound to names: every file under ``cases/plans``, and what no file can show. Nothing is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import plan_cases
import pytest
import report_cases
import torch
from models import CASES
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import gradsurgeon
from gradsurgeon import BindError
from gradsurgeon.actions._methods import METHODS
from gradsurgeon.actions.combine import MethodName
from gradsurgeon.language.planning import from_model, slots

RULES = {"version": 1, "rules": [{"id": "it", "action": "zero", "params": "*"}]}


@pytest.mark.parametrize("file", plan_cases.FILES, ids=lambda file: file.stem)
def test_the_plan_is_that_of_the_case(file: Path) -> None:
    case = report_cases.read(file)
    if "refused" in case:
        with pytest.raises(BindError, match="nothing was changed") as caught:
            plan_cases.plan(case)
        assert list(caught.value.complaints) == case["refused"]
        return
    plan = plan_cases.plan(case)
    assert str(plan) == case["plan"].rstrip("\n")
    wanted = case.get("json", {})
    assert report_cases.parts(plan.to_dict(), wanted) == wanted


def test_the_methods_of_the_class_are_those_of_the_table() -> None:
    assert get_args(MethodName) == tuple(METHODS)


class Inner(nn.Module):
    """Has a child that really is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self.fc = nn.Linear(2, 2, bias=False)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.DataParallel,
        compiled,
        checkpoint_wrapper,
        lambda model: nn.DataParallel(compiled(model)),
    ],
    ids=["bare", "DataParallel", "compile", "checkpoint", "both"],
)
def test_segments_of_wrappers_are_dropped_and_only_those(wrap: Any) -> None:
    model = Inner()
    model.fc = wrap(model.fc)
    found = from_model(wrap(model)).params
    assert [param.name for param in found] == ["module.weight", "fc.weight"]


def test_names_are_those_of_named_parameters() -> None:
    for case in CASES.values():
        model = case.make()
        manifest = from_model(model)
        assert [param.name for param in manifest.params] == [n for n, _ in model.named_parameters()]
        everything = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        assert sorted(slot.name for slot in slots(model)) == sorted(everything)


def test_planning_touches_nothing_and_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(50_000, 50_000) for _ in range(4)])
    plan = gradsurgeon.plan(model, RULES)
    assert plan.manifest.elements == 4 * (50_000**2 + 50_000)
    assert all(param._backward_hooks is None for param in model.parameters())
