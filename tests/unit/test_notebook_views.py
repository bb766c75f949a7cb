"""What a notebook shows of plans, diagnoses and reports: the numbers, and nothing that could do harm."""

from __future__ import annotations

import math
from typing import Any

import torch
from html_views import Page
from models import Tied
from ranks import Json
from runs import add, shown
from torch import nn

import gradsurgeon
from gradsurgeon import Diagnosis, Event
from gradsurgeon.common.diagnosis import Cause, Line, TensorFacts
from gradsurgeon.common.events import RuleStatus
from gradsurgeon.records.store import Key, Records
from gradsurgeon.report import Report, RuleInfo

NAN = math.nan
HOSTILE = "<script>alert(1)</script>\u202e\"'&"
INERT = "<script>alert(1)</script>\\u202e\"'&"


def plan(model: nn.Module, *rules: Json) -> gradsurgeon.Plan:
    return gradsurgeon.plan(model, {"version": 1, "rules": list(rules)})


def test_a_plan_shows_its_table() -> None:
    found = plan(
        Tied(),
        {"id": "bias", "action": "zero", "params": "*.bias", "at": "step"},
        {"id": "maps", "action": "capture", "modules": "body", "tensor": "output.grad"},
    )
    page = Page(found)
    assert page.html.startswith("<pre ")
    assert page.texts == [line for line in str(found).split("\n") if line]


def facts(name: str, **more: Any) -> TensorFacts:
    values = {"shape": (2, 3), "dtype": "float32", "low": -2.5, "high": 1.25, "nan": 0, "inf": 0}
    return TensorFacts(**{"name": name, "numel": 6000, **values, **more})


def diagnosis(**more: Any) -> Diagnosis:
    given: Json = {
        "certainty": "reproduced",
        "reasons": (),
        "step": 7,
        "rank": 1,
        "what": "NaN",
        "where": "forward",
        "module": "h.0",
        "module_type": "Energy",
        "operation": "aten.sqrt",
        "lines": (Line("train.py", 9, "forward", "x.sqrt()"),),
        "inputs": (facts("self"),),
        "output": facts("", nan=1234, low=None, high=None),
        "history": (("h.0: aten.addmm", 2.537),),
        "cause": Cause("mathematics", ("in float64 the result is NaN as well",), "guard it"),
    }
    return Diagnosis(**(given | more))


def test_a_diagnosis_shows_its_evidence() -> None:
    shown = diagnosis(scale=1024.0, bundle="a b")
    head, *evidence = str(shown).splitlines()
    assert head.endswith("NaN born in the forward pass of h.0 (Energy): aten.sqrt")
    assert Page(shown).texts == [f"step 7, rank 1: {head}", *evidence]
    assert [line.strip() for line in evidence] == [
        "at train.py:9, in forward: x.sqrt()",
        "to try: guard it",
        "cause: mathematics",
        "in float64 the result is NaN as well",
        "in   input [2, 3] float32: -2.5 to 1.25",
        "out  [2, 3] float32: 1,234 of 6,000 NaN",
        "the GradScaler multiplied the loss by 1024",
        "largest magnitudes before it, the last one last:",
        "2.54      h.0: aten.addmm",
        "to run the step again: gradsurgeon replay 'a b' --model MODULE:BUILD",
    ]


def test_a_diagnosis_that_blames_nobody_shows_why() -> None:
    reasons = ("the model has changed",)
    page = Page(Diagnosis("not reproduced", reasons, 7, 1, no_bundle="no room"))
    assert page.texts == [
        "step 7, rank 1: diagnosis: not reproduced, so no operation is blamed",
        "  not reproduced because the model has changed",
        "  no bundle was written: no room",
    ]
    sure = Page(diagnosis(certainty="partial", reasons=("a kernel is random",)))
    assert "  partial because a kernel is random" in sure.texts


def report(histories: dict[str, list[float | None]], **more: Any) -> Report:
    records = Records()
    key = Key("norms", "l2", "accumulated", tuple(histories))
    for step, row in enumerate(zip(*histories.values(), strict=True)):
        absent = frozenset(place for place, value in enumerate(row) if value is None)
        floats = torch.tensor([value or 0.0 for value in row])
        add(records, key, step, floats.numpy().tobytes(), absent)
    given: Json = {
        "title": "rules.yaml on Net",
        "params": tuple(histories),
        "rules": {"norms": RuleInfo("norm-log", "observe", ("never",))},
        "statuses": {"norms": RuleStatus(2, 5, 0, 4)},
    } | shown(records)
    return Report(**(given | more))


def test_a_report_shows_its_text() -> None:
    event = Event("trap", "trap", 3, 0, "a", "step 3: bad\nthe border lies there")
    one = report({"a": [1.0, 64.0], "b": [NAN, 0.25]}, events=(event,))
    assert Page(one).texts == list(filter(None, one.text(width=100).splitlines()))


def test_hostile_texts_are_inert() -> None:
    event = Event("trap", HOSTILE, 0, 0, HOSTILE, f"{HOSTILE}\n{HOSTILE}")
    shown = [
        report(
            {HOSTILE: [1.0]},
            title=HOSTILE,
            events=(event,),
            rules={HOSTILE: RuleInfo(HOSTILE, HOSTILE, (HOSTILE,))},
            statuses={HOSTILE: RuleStatus(1, 1, 0, 0)},
        ),
        diagnosis(
            **dict.fromkeys(
                ("module", "module_type", "operation", "node", "bundle", "no_bundle"), HOSTILE
            ),
            reasons=(HOSTILE,),
            lines=(Line(HOSTILE, 1, HOSTILE, HOSTILE),),
            inputs=(facts(HOSTILE, dtype=HOSTILE),),
            history=((HOSTILE, 1.0),),
            cause=Cause("unknown", (HOSTILE,), HOSTILE),
            loss_nodes=(HOSTILE,),
        ),
        plan(
            nn.ModuleDict({HOSTILE: nn.Linear(1, 1)}),
            {"id": "all", "action": "zero", "params": "*"},
        ),
    ]
    for one in shown:
        page = Page(one)
        assert INERT in page.text
        assert "\u202e" not in page.html
