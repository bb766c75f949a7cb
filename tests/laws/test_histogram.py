"""Histograms: counts by sign and magnitude, against a count by hand, on tensors of any kind."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Json
from small import attach, rule_file, sgd, take_step, tanh_net
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon.errors import RecordError
from gradsurgeon.report import summary
from gradsurgeon.report.histograms import SHARES, quantiles_of
from gradsurgeon.report.web_page import page_data
from gradsurgeon.tensors import _histogram, measure
from gradsurgeon.tensors.statistics import HISTOGRAM

RULE = {"id": "elements", "action": "norm-log", "params": "*", "stats": ["histogram"]}


def column_of(number: float) -> int:
    if number == 0:
        return 64
    if not math.isfinite(number):
        return 65
    # `frexp` of Python, for which log2 of numbers just below a power of 2 does not round up.
    octave = math.frexp(number)[1] - 1
    place = min(max(math.floor((octave + 48) / 2), 0), 31)
    return 32 + place if number > 0 else 31 - place


def counted(tensor: Tensor) -> list[float]:
    dense = tensor.detach().cpu()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    counts = Counter(map(column_of, dense.double().flatten().tolist()))
    return [float(counts[column]) for column in range(66)]


def nasty(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    numbers = [0.0, math.nan, math.inf, info.tiny, info.max, 5e-324, 1e-45]
    for power in range(-60, 30):
        one = 2.0**power
        numbers += [one, one * (1 + info.eps), one * (1 - info.eps / 2)]
    wide = torch.tensor(numbers, dtype=torch.float64)
    return torch.cat([wide, -wide]).to(dtype)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_counted_where_it_belongs(dtype: torch.dtype) -> None:
    tensor = nasty(dtype)
    scattered = torch.randn(40, 30, dtype=torch.float64).mul(10).exp().mul(torch.randn(40, 30))
    dense = torch.zeros(4, 5)
    dense[1, 2] = -3.0
    tensors = [
        tensor,
        tensor.view(2, -1).t(),
        tensor[::3],
        tensor[:1].expand(7),
        tensor[:0],
        tensor[5],
        scattered.to(dtype),
        torch._neg_view(tensor),  # as the imaginary part of a conjugate
        dense.to(dtype).to_sparse(),
    ]
    together = measure.statistics("histogram", tensors)
    assert together.shape == (len(tensors), len(HISTOGRAM))
    for each, counts in zip(tensors, together, strict=True):
        assert counts.tolist() == counted(each)
        assert measure.parts("histogram", [each])[0].tolist() == counted(each)


def test_long_tensors_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_histogram, "_AT_ONCE", 7)
    tensor = nasty(torch.float32)
    assert measure.statistic("histogram", tensor).tolist() == counted(tensor)


def train(*rules: Json, steps: int = 3, **options: Any) -> tuple[Any, list[list[float]]]:
    """Train with rules; return the session, and the histograms of the gradients of a weight by hand."""
    torch.manual_seed(0)
    model: Any = tanh_net(4, 3, 1)
    optimizer = sgd(model)
    by_hand = []
    with attach(model, *rules, optimizer=optimizer, **options) as session:
        for _ in range(steps):
            take_step(optimizer, model(torch.randn(5, 4)).square().mean())
            by_hand.append(counted(model[0].weight.grad))
    return session, by_hand


@pytest.mark.parametrize("at", ["backward", "accumulated", "step"])
def test_records_are_read_back(at: str, tmp_path: Path) -> None:
    weights = {**RULE, "id": "weights", "tensor": "value"}
    outputs = {"id": "outputs", "action": "norm-log", "modules": "0", "tensor": "output"}
    rules = [{**RULE, "at": at}, weights, {**outputs, "stats": ["histogram", "l2"]}]
    session, by_hand = train(*rules, record=tmp_path / "run")
    with gradsurgeon.open_run(tmp_path / "run") as run:
        for records in (session, run):
            found = records.histograms("0.weight", rule="elements")
            assert [(step, list(counts)) for step, counts in found] == [*enumerate(by_hand)]
            values = records.histograms("0.weight", rule="weights")
            assert [sum(counts) for _, counts in values] == [12.0] * 3
            assert [sum(counts) for _, counts in records.histograms("0")] == [15.0] * 3
        columns = run.history("0.weight", "histogram_zeros", rule="elements")
        assert [count for _, count in columns] == [counts[64] for counts in by_hand]
        report = summary(run)
        magnitudes = page_data(run)["magnitudes"]
    assert "histogram_" not in str(report)
    shown = {entry["name"]: entry["lines"] for entry in magnitudes if entry["rule"] == "elements"}
    assert set(shown) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    wanted = quantiles_of(np.array(by_hand)).tolist()
    lines = [(line["label"], line["steps"], line["values"]) for line in shown["0.weight"]]
    assert lines == [
        (label, [0, 1, 2], pytest.approx(values, rel=1e-5))
        for label, values in zip(["5%", "25%", "50%", "75%", "95%"], wanted, strict=True)
    ]


def test_a_histogram_is_no_single_number() -> None:
    session, _ = train(RULE)
    for ask in (session.history, session.latest):
        with pytest.raises(RecordError, match="histogram is 66 numbers"):
            ask("0.weight", "histogram")
    with pytest.raises(gradsurgeon.BindError, match="complex numbers have no real histogram"):
        gradsurgeon.plan(nn.Linear(2, 1, dtype=torch.complex64), rule_file(RULE))


def test_quantiles_are_right_to_a_bin() -> None:
    tensor = torch.randn(4000).mul(3).exp() * torch.randn(4000).sign()
    counts = counted(tensor)
    nothing = [0.0] * 64 + [5.0, 1.0]
    quantiles = quantiles_of(np.array([counts, nothing]))
    assert quantiles.shape == (len(SHARES), 2)
    for share, (quantile, of_nothing) in zip(SHARES, quantiles, strict=True):
        exact = float(tensor.abs().quantile(share))
        assert exact / 1.5 < quantile < exact * 1.5
        assert math.isnan(of_nothing)
