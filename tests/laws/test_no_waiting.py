"""P9: nothing waits for the device in the steady state, but for one read where a trap decides."""

from __future__ import annotations

from typing import Any, Self, cast

import pytest
import torch
from models import CASES, data
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradsurgeon
from gradsurgeon import _torch

# What asks a device for a value. On the host these cost nothing, so they are counted, not timed.
_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::item",
}


# Copies to the host, which run no operation where the tensor is there already.
_COPIES = {"tolist", "cpu", "numpy"}


class Copies(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _COPIES:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._copies = Copies(self.seen)

    def __enter__(self) -> Self:
        self._copies.__enter__()
        return cast("Self", super().__enter__())

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _READS:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def reads(rules: str, monkeypatch: pytest.MonkeyPatch, width: int) -> int:
    """Return how many values one step asks for, beyond those of the step itself."""
    monkeypatch.setattr(_torch, "is_host", lambda _: False)

    def one(with_rules: bool) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(width)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def step(number: int) -> None:
            optimizer.zero_grad()
            model(data(number, 3, 4)).square().sum().backward()
            optimizer.step()

        if with_rules:
            gradsurgeon.apply(model, rules, optimizer=optimizer)
        step(0)
        with Reads() as counted:
            step(1)
        gradsurgeon.remove(model)
        return len(counted.seen)

    return one(with_rules=True) - one(with_rules=False)


QUIET = """
version: 1
rules:
  - {id: bound, action: clamp, params: "*", at: step, min: -1.0, max: 1.0}
  - {id: early, action: clamp, params: "*", at: backward, max: 1.0}
  - {id: scaled, action: scale, params: "*", factor: 0.5}
  - {id: scaled-late, action: scale, params: "*", factor: 0.5, at: step}
  - {id: none, action: zero, params: "0.bias"}
  - {id: norms, action: norm-log, params: "*", stats: [l1, l2, linf, mean, std, zeros, nonfinite]}
  - {id: each, action: norm-log, params: "*", at: backward}
  - {id: final, action: norm-log, params: "*", at: step}
"""


@pytest.mark.parametrize("width", [2, 8])
def test_edits_and_logs_read_nothing(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reads(QUIET, monkeypatch, width) == 0


@pytest.mark.parametrize("width", [2, 8])
def test_a_trap_reads_once_per_step_whatever_the_model(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = 'version: 1\nrules:\n  - {id: trap, action: nan-trap, params: "*"}\n'
    assert reads(rules, monkeypatch, width) == 1


def test_the_counter_counts() -> None:
    with Reads() as counted:
        float(torch.ones(3).sum())
        torch.ones(3).tolist()
    assert counted.seen == ["aten::_local_scalar_dense", "tolist"]


def test_rows_wait_on_the_device_until_somebody_asks() -> None:
    case = CASES["mlp"]
    model = case.make()
    optimizer = case.optimizer(model)
    with gradsurgeon.apply(model, QUIET.replace('"0.bias"', '"fc1.bias"')) as session:
        for step in range(3):
            case.backward(model, step)
            optimizer.step()
        assert len(session._attachment.context.recorder.records) == 0
        assert len(session.history("fc1.weight", rule="final")) == 3
