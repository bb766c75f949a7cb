"""Records of what an optimizer keeps: what its state says after each update."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import events_of, hold_rows, messages, rule_file, steps_of, tanh_net
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import GradSurgeonWarning
from gradsurgeon.report import summary
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.web_page import page_data

STATS: dict[str, Callable[[Tensor], float]] = {
    "l2": lambda kept: kept.norm().item(),
    "mean": lambda kept: kept.mean().item(),
    "max": lambda kept: kept.max().item(),
    "std": lambda kept: kept.std(correction=0).item(),
    "zeros": lambda kept: (kept == 0).sum().item(),
}
CASES: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": ("momentum_buffer", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "foreach": ("exp_avg_sq", lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True)),
    "fused": ("exp_avg", lambda params: torch.optim.AdamW(params, lr=0.01, fused=True)),
    "steps": ("step", lambda params: torch.optim.AdamW(params, lr=0.01)),
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return tanh_net(4, 6, 2)


def rule(name: str, **options: Any) -> Json:
    return {"id": "kept", "action": "norm-log", "params": "*", "tensor": f"state.{name}", **options}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    net(data(number, 3, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_records_are_the_numbers_of_the_state(case: str) -> None:
    name, make_optimizer = CASES[case]
    net = make()
    optimizer = make_optimizer(net.parameters())
    wanted: dict[tuple[str, str], list[tuple[int, float]]] = {}
    rules = rule_file(rule(name, stats=list(STATS), steps={"from": 1, "every": 2}))
    with gradsurgeon.apply(net, rules, optimizer=optimizer) as session:
        for number in range(6):
            step(net, optimizer, number)
            if number % 2 == 0:
                continue
            for param_name, param in net.named_parameters():
                kept = optimizer.state[param][name].double()
                for stat, read in STATS.items():
                    wanted.setdefault((param_name, stat), []).append((number, read(kept)))
    assert len(wanted) == 4 * len(STATS)
    for (param_name, stat), rows in wanted.items():
        hold_rows(session.history(param_name, stat=stat), rows)
    assert session.status()["kept"].fired == 3 * 4


def test_numbers_of_python_are_recorded_too() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    state["calls"] = state.get("calls", 0) + 1
                    state["seen"] = torch.tensor([1, 2])
                    state["text"] = "none of ours"
            return super().step(closure)

    net = make()
    optimizer = Counting(net.parameters(), lr=0.1)
    rules = rule_file(
        rule("calls"),
        {**rule("seen", stats=["mean"]), "id": "seen"},
        {**rule("text"), "id": "text"},
    )
    with (
        gradsurgeon.apply(net, rules, optimizer=optimizer) as session,
        pytest.warns(GradSurgeonWarning, match="rule text: Counting keeps no `state.text`"),
    ):
        step(net, optimizer, 0)
        step(net, optimizer, 1)
    assert session.history("0.bias", rule="kept") == [(0, 1.0), (1, 2.0)]
    assert session.history("0.bias", stat="mean") == [(0, 1.5), (1, 1.5)]


@pytest.mark.parametrize(
    ("make_optimizer", "told"),
    [
        (
            CASES["fused"][1],
            "AdamW keeps no `state.exp` of 0.weight, 0.bias, 2.weight and 1 more: it keeps `state.step`, "
            "`state.exp_avg`, `state.exp_avg_sq`",
        ),
        (
            lambda params: torch.optim.SGD(params, lr=0.1),
            "SGD keeps no `state.exp` of 0.weight, 0.bias, 2.weight and 1 more: it keeps nothing",
        ),
    ],
)
def test_an_optimizer_without_the_name_is_told_at_its_first_update(
    make_optimizer: Callable[[Any], torch.optim.Optimizer], told: str
) -> None:
    net = make()
    optimizer = make_optimizer(net.parameters())
    with gradsurgeon.apply(net, rule_file(rule("exp")), optimizer=optimizer) as session:
        with pytest.warns(GradSurgeonWarning, match="keeps no"):
            step(net, optimizer, 0)
        assert messages(session, "notice") == [told]
        with warnings.catch_warnings(action="ignore", category=GradSurgeonWarning):
            for number in range(1, 4):
                step(net, optimizer, number)
    assert "no optimizer keeps this" in messages(session, "never-fired")[0]


def test_each_optimizer_is_asked_and_a_parameter_without_a_gradient_is_no_lack() -> None:
    net = make()
    net[2].bias.requires_grad_(False)
    first = CASES["SGD"][1](net[0].parameters())
    second = CASES["fused"][1](net[2].parameters())
    rules = rule_file(rule("exp_avg"))
    with (
        gradsurgeon.apply(net, rules, optimizer=[first, second]) as session,
        pytest.warns(GradSurgeonWarning, match="SGD keeps no `state.exp_avg` of 0.weight, 0.bias"),
    ):
        for number in range(2):
            first.zero_grad()
            second.zero_grad()
            net(data(number, 3, 4)).square().mean().backward()
            first.step()
            second.step()
    assert [event.message.split()[0] for event in events_of(session, "notice")] == ["SGD"]
    assert steps_of(session, "2.weight") == [0, 1]
    assert steps_of(session, "2.bias") == []


def test_reports_pages_and_run_directories_have_a_table_of_it(tmp_path: Path) -> None:
    net = make()
    optimizer = CASES["SGD"][1](net.parameters())
    norms = {"id": "norms", "action": "norm-log", "params": "*"}
    rules = rule_file(norms, rule("momentum_buffer"))
    with gradsurgeon.apply(net, rules, optimizer=optimizer, record=tmp_path / "run") as session:
        for number in range(4):
            step(net, optimizer, number)
        wanted = session.history("0.weight", rule="kept")
    with gradsurgeon.open_run(tmp_path / "run") as run:
        assert run.history("0.weight", rule="kept") == wanted
        report = summary(run)
        page = json.dumps(page_data(run))
        values = json.dumps(to_dict(report))
    title = "norms (l2) of state.momentum_buffer of 4 parameters, recorded by kept (at updated)"
    assert title in str(report)
    assert "norms (l2) of 4 parameters, recorded by norms (at accumulated)" in str(report)
    assert title in page
    assert '"kind": "state.momentum_buffer"' in values


REFUSED: Sequence[tuple[Json, str]] = [
    (rule("exp_avg", at="step"), "`state.exp_avg` exists once the update is over"),
    (rule("exp_avg", per="rule"), "`per: rule` needs all gradients of an update at once"),
    (rule("exp_avg", stats=["ratio"]), "`ratio` says what an update changes in a weight"),
    ({**rule("exp_avg"), "tensor": "state."}, "`state.` is no tensor of a parameter"),
    (
        {**rule("exp_avg"), "action": "scale", "factor": 0.5},
        "scale does not take `state.exp_avg` of a parameter",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("refused", "why"), REFUSED)
def test_what_a_state_has_not_is_refused(refused: Json, why: str) -> None:
    with pytest.raises(gradsurgeon.GradSurgeonError) as raised:
        gradsurgeon.load(rule_file(refused))
    assert why in str(raised.value)
