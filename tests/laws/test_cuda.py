"""On CUDA rules do what they do on the host. Each test runs on the host, too, where it is held by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import data
from ranks import Json
from small import attach, fields_of, fired, net, rule_file, sgd, tanh_net
from torch import nn

import gradsurgeon
from benchmarks import device_counts, rule_sets
from gradsurgeon import GradSurgeonError
from gradsurgeon.tensors import _nonfinite, _numbers, _projection, _torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]
RULES = """
version: 1
rules:
  - {id: back, action: norm-log, params: "*", at: backward}
  - {id: half, action: scale, factor: 0.5, params: "*.weight", at: backward}
  - {id: norms, action: norm-log, params: "*"}
  - {id: bound, action: clamp, params: "*", at: step, min: -0.5, max: 0.5}
  - {id: clip, action: clip-norm, params: "*", per: rule, max_norm: 0.4}
  - {id: each, action: clip-norm, per: parameter, params: "*", max_norm: 0.3}
  - {id: last, action: norm-log, params: "*", at: step}
  - {id: outputs, action: norm-log, modules: "*", tensor: output}
  - {id: trap, action: nan-trap, params: "*", then: skip-step}
"""


def train(device: str) -> Json:
    torch.manual_seed(0)
    model = tanh_net(4, 6, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with gradsurgeon.apply(model, RULES, optimizer=optimizer) as session:
        for step in range(6):
            optimizer.zero_grad()
            loss = model(data(step, 5, 4).to(device)).square().mean()
            (loss * (math.nan if step == 3 else 1.0)).backward()
            optimizer.step()
        return {
            "weights": [param.detach().cpu() for param in model.parameters()],
            "events": fields_of(session, "kind", "step"),
            "fired": fired(session),
            "changed": {rule: status.changed for rule, status in session.status().items()},
            "records": {
                rule: [value for _, value in session.history("2.weight", rule=rule)]
                for rule in ("back", "norms", "last")
            },
        }


@pytest.mark.filterwarnings("ignore::gradsurgeon.errors.GradSurgeonWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_all_rules_do_what_they_do_on_the_host(device: str) -> None:
    host, other = train("cpu"), train(device)
    assert [e for e in host["events"] if e[0] != "notice"] == [("trap", 3), ("skipped-step", 3)]
    for key in ("events", "fired", "changed"):
        assert other[key] == host[key], key
    for ours, theirs in zip(other["weights"], host["weights"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    for rule, values in host["records"].items():
        assert other["records"][rule] == pytest.approx(values, rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_factor_is_not_rounded_to_half_precision(dtype: torch.dtype, device: str) -> None:
    elements = torch.linspace(0.1, 2.0, 50_000).to(device=device, dtype=dtype)
    parts = [
        elements[:50].clone(),
        elements[7].clone(),
        elements.clone(),
        elements[:6].view(2, 3).t(),
    ]
    wanted = [(part.float() / 3).to(dtype) for part in parts]
    _numbers.multiply_(parts, torch.tensor([1 / 3], device=device))
    rtol = 0.0 if dtype != torch.float32 else 1e-6
    torch.testing.assert_close(parts, wanted, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norms_of_several_dtypes_come_in_the_order_of_the_gradients(
    order: float, device: str
) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    grads = [
        torch.full((number + 1,), number + 1.0, dtype=kind, device=device)
        for number, kind in enumerate(kinds)
    ]
    grads.append(torch.zeros(0, device=device))
    wanted = [torch.linalg.vector_norm(grad.double(), order).item() for grad in grads[:-1]]
    found = _numbers.norms(grads, order)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([*wanted, 0.0], rel=1e-5)
    alone = [_numbers.norm(grad, order).item() for grad in grads]
    assert alone == pytest.approx([*wanted, 0.0], rel=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [700, 50_000, 1_000_003])
def test_projections_are_those_of_the_host_under_autocast_as_well(
    size: int, dtype: torch.dtype, device: str
) -> None:
    tensor = torch.randn(size).to(dtype)
    with torch.autocast(device, torch.bfloat16):
        found = _projection.projections(tensor.to(device))
    off = found.cpu().double() - _projection.projections(tensor)
    assert off.abs().max() < 1e-5 * tensor.double().norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_elements_that_are_not_finite_are_counted(dtype: torch.dtype, device: str) -> None:
    tensor = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype, device=device)
    for wanted, number in enumerate((1.0, math.nan, math.inf, -math.inf)):
        tensor[0, wanted] = number  # the first one is finite
        assert int(_nonfinite.nonfinite(tensor)) == wanted
        mark = _nonfinite.nonfinite_mark(tensor)
        if isinstance(mark, int):
            assert mark == wanted
        else:
            assert math.isfinite(mark.item()) == (wanted == 0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_optimizer_under_a_scaler_gets_clamped_gradients(device: str) -> None:
    model = nn.Linear(4, 3).half().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=65536.0)
    rules = rule_file(
        {"id": "c", "action": "clamp", "params": "*", "at": "step", "min": -1.0, "max": 1.0},
        {"id": "n", "action": "norm-log", "params": "*", "at": "step"},
    )
    before = model.weight.detach().clone()
    x = (data(0, 5, 4) * 1e-3).half().to(device)
    with gradsurgeon.apply(model, rules) as session:
        scaler.scale(model(x).float().mean() * 1e-2).backward()
        scaler.step(optimizer)
        true = torch.linalg.vector_norm(x.float().mean(0) * 1e-2 / 3) * math.sqrt(3)
        assert session.latest("weight", rule="n") == pytest.approx(true.item(), rel=1e-2)
    assert model.weight.isfinite().all()
    assert (before != model.weight).any()


@pytest.mark.cuda
@needs_cuda
def test_launches_do_not_grow_with_the_parameters() -> None:
    launches = device_counts.launches([(10, ("float32",)), (100, ("float32",))])
    few, many = (launches[params, "float32", rule_sets.CLIP_BITES] for params in (10, 100))
    # The kernels for lists take some hundred tensors at once, in two passes at most.
    assert many - few <= 8


# -------------------------------------------------------------------------------------------------
# CUDA graphs: a replay runs no rule, so a capture under rules is refused.
# -------------------------------------------------------------------------------------------------


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")

PARAMS = {"params": "*"}
OUTPUT = {"modules": "0", "tensor": "output.grad"}
CLAMP = {"action": "clamp", "min": -0.01, "max": 0.01}
SILENCED: list[Json] = [
    {"id": "clamp-backward", **CLAMP, "at": "backward", **PARAMS},
    {"id": "clamp-step", **CLAMP, "at": "step", **PARAMS},
    {"id": "clip-step", "action": "clip-norm", "max_norm": 0.1, "per": "rule", **PARAMS},
    {"id": "freeze", "action": "freeze", **PARAMS},
    {"id": "nan-trap", "action": "nan-trap", **PARAMS},
    {"id": "spike-trap", "action": "spike-trap", "above": {"times": 2}, **PARAMS},
    {"id": "norm-log-backward", "action": "norm-log", "at": "backward", **PARAMS},
    {"id": "norm-log-output-grad", "action": "norm-log", **OUTPUT},
    {"id": "capture", "action": "capture", **PARAMS},
]


def by_id(rules: list[Json]) -> Any:
    return [pytest.param(rule, id=rule["id"]) for rule in rules]


@pytest.mark.filterwarnings("ignore::gradsurgeon.errors.GradSurgeonWarning")
@pytest.mark.parametrize("rule", by_id(SILENCED))
def test_rules_refuse_a_capture_and_a_paused_session_does_not(
    rule: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    optimizer = sgd(model)
    document = rule_file(rule)
    with gradsurgeon.apply(model, document, optimizer=optimizer) as session:
        monkeypatch.setattr(_torch, "is_capturing", lambda: True)
        with pytest.raises(GradSurgeonError, match="a CUDA graph is being captured"):
            model(data(0, 5, 4)).square().mean().backward()
        session.pause()
        model(data(0, 5, 4)).square().mean().backward()
        monkeypatch.undo()


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """Return a captured train step, after the warm-up that torch asks for."""

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    return graph


@pytest.mark.cell(
    "CUDA graphs",
    "backward",
    "accumulated",
    "step",
    "modules",
    refused="a replay runs no Python, so no rule: `session.pause()` before the capture",
)
@pytest.mark.cuda
@cuda
@pytest.mark.parametrize("rule", by_id(SILENCED))
def test_a_capture_under_rules_is_refused(rule: Json) -> None:
    model = net().cuda()
    optimizer = sgd(model)
    with (
        attach(model, rule),
        pytest.raises(GradSurgeonError, match="a CUDA graph is being captured"),
    ):
        capture(model, optimizer, torch.randn(5, 4, device="cuda"))
