"""What `laws/test_device_waits.py` runs, in a process of its own: the device stays registered.

Prints what each case has found, as JSON.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from device_failures import captured, failed, failed_at_the_update, failed_under_apply
from ranks import Json
from small import fields_of, sgd, tanh_net
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradsurgeon
from benchmarks.operations import counting
from benchmarks.toy_device import (
    DEVICE,
    Factories,
    Operation,
    Toy,
    aten,
    leaves,
    move,
    watchers,
)
from gradsurgeon.runtime.controller import Controller
from gradsurgeon.tensors import _numbers
from gradsurgeon.tensors.backward_graph import BackwardGraph

warnings.simplefilter("ignore")
ALL: list[Json] = [
    {"id": "back", "action": "norm-log", "params": "*", "at": "backward"},
    {"id": "half", "action": "scale", "factor": 0.5, "params": "*.weight", "at": "backward"},
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "bins", "action": "norm-log", "params": "*", "stats": ["histogram"]},
    {"id": "bound", "action": "clamp", "params": "*", "at": "step", "min": -0.5, "max": 0.5},
    {"id": "clip", "action": "clip-norm", "params": "*", "per": "rule", "max_norm": 0.4},
    {"id": "last", "action": "norm-log", "params": "*", "at": "step"},
    {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"},
    # Within its warm-up it cuts nothing.
    {"id": "spikes", "action": "spike-trap", "params": "*", "above": {"sigmas": 2.5}},
]


def rules(*ids: str) -> Json:
    return {"version": 1, "rules": [rule for rule in ALL if not ids or rule["id"] in ids]}


class CudaCasts(TorchDispatchMode):
    """Rounds 0-dim float32 operands of half tensors first, as CUDA does and the CPU does not."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        narrow = (torch.float16, torch.bfloat16)
        if func in (aten.mul_.Tensor, aten.div_.Tensor, aten.mul.Tensor, aten.div.Tensor):
            left, right = args
            alone = isinstance(right, Tensor) and right.ndim == 0
            if alone and left.ndim and left.dtype in narrow and right.dtype == torch.float32:
                args = (left, right.to(left.dtype))
        if func is aten._foreach_mul_.Tensor and args[0][0].dtype in narrow:
            args = (args[0], args[1].to(args[0][0].dtype))
        return func(*args, **(kwargs or {}))


def plain(tensor: Tensor) -> list[Any]:
    raw: Any = tensor.detach()
    found: list[Any] = (raw.raw if isinstance(raw, Toy) else raw).tolist()
    return found


def train(*, on_device: bool, scaled: bool = False) -> Json:
    torch.manual_seed(0)
    model = tanh_net(4, 6, 2)
    if on_device:
        move(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    with gradsurgeon.apply(model, rules(), optimizer=optimizer) as session:
        for step in range(6):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(Toy(x) if on_device else x).square().mean()
            (loss * (float("nan") if step == 3 else 1.0)).backward()
            optimizer.step()
        return {
            "weights": [plain(param) for param in model.parameters()],
            "events": fields_of(session, "kind", "step", "name"),
            "records": {
                rule: [
                    value
                    for _, value in session.history("2.weight", rule=rule)
                    if math.isfinite(value)
                ]
                for rule in ("back", "norms", "last")
            },
            "histograms": session.histograms("2.weight"),
            "status": {
                rule: (status.fired, status.changed) for rule, status in session.status().items()
            },
        }


def same_as_on_the_host() -> Json:
    return {"host": train(on_device=False), "device": train(on_device=True)}


def of_losses(*, on_device: bool) -> Json:
    """Combine the gradients of scaled losses by a method that goes by how large they are."""
    torch.manual_seed(0)
    model = tanh_net(4, 6, 2)
    x = torch.randn(5, 4)
    if on_device:
        move(model)
    combine = {"id": "all", "action": "combine", "params": "*", "method": "fairgrad", "alpha": 1}
    pairs = {"id": "pairs", "action": "conflict", "params": "*"}
    named = [{**rule, "losses": ["one", "other"]} for rule in (combine, pairs)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    session = gradsurgeon.apply(model, {"version": 1, "rules": named}, optimizer=[])
    out = model(Toy(x) if on_device else x)
    losses = {"one": out.square().mean(), "other": (out - 1).square().mean()}
    gradsurgeon.backward({name: scaler.scale(loss) for name, loss in losses.items()})
    return {
        "grads": [plain(param.grad) for param in model.parameters() if param.grad is not None],
        "weights": [session.latest(name, "weight") for name in losses],
        "cosine": session.latest("one/other", "cosine"),
    }


def losses() -> Json:
    return {"host": of_losses(on_device=False), "device": of_losses(on_device=True)}


class Branches(nn.Module):
    """Two branches whose backward passes run at once, in two threads."""

    def __init__(self) -> None:
        super().__init__()
        self.host = nn.ModuleList([nn.Linear(4, 4) for _ in range(20)])
        self.device = nn.ModuleList([nn.Linear(4, 4) for _ in range(20)])
        move(self.device)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        for layer in self.host:
            x = layer(x)
        for layer in self.device:
            y = layer(y)
        return [x.sum(), y.sum()]


def two_threads() -> Json:
    sys.setswitchinterval(1e-6)
    begins = Controller.backward_started

    def slowly(self: Controller, graph: BackwardGraph) -> None:
        time.sleep(0.002)  # so that both threads come before the pass is known
        begins(self, graph)

    Controller.backward_started = slowly  # type: ignore[method-assign]
    found: Json = {"events": [], "steps": [], "rows": []}
    for _ in range(6):
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
        with gradsurgeon.apply(model, rules("back", "norms"), optimizer=optimizer) as session:
            for _ in range(4):
                optimizer.zero_grad()
                losses = model(torch.randn(3, 4), Toy(torch.randn(3, 4)))
                torch.autograd.backward(losses)
                optimizer.step()
            found["events"] += fields_of(session, "message")
            found["steps"].append(session.step)
            names = ("host.0.weight", "device.0.weight", "host.19.bias", "device.19.bias")
            found["rows"].append(
                [
                    len(session.history(name, rule=rule))
                    for name in names
                    for rule in ("back", "norms")
                ]
            )
    Controller.backward_started = begins  # type: ignore[method-assign]
    return found


def reads_of(*ids: str, by_hand: bool = False) -> int:
    """Return how often the host waits in four steps, after two to settle in."""
    torch.manual_seed(0)
    model = tanh_net(4, 6, 2)
    move(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    given: Any = [] if by_hand else optimizer
    with gradsurgeon.apply(model, rules(*ids), optimizer=given) as session:

        def step() -> None:
            optimizer.zero_grad()
            model(Toy(torch.randn(5, 4))).square().mean().backward()
            if by_hand:
                session.tick()
            else:
                optimizer.step()

        for _ in range(2):
            step()
        with counting() as counts:
            for _ in range(4):
                step()
    return counts.host_reads


def host_reads() -> dict[str, int]:
    return {
        "norms": reads_of("norms", "back", "last"),
        "histograms": reads_of("bins"),
        "edits": reads_of("bound", "clip", "half"),
        "trap": reads_of("trap", "norms"),
        "everything": reads_of(),
        "by hand": reads_of("bound", "norms", by_hand=True),
    }


def half_precision() -> Json:
    found = {}
    for cast in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1000.0, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        entries = [
            {"id": "c", "action": "clamp", "params": "*", "at": "step", "min": -1.0, "max": 1.0},
            {"id": "n", "action": "norm-log", "params": "*", "at": "step"},
        ]
        before = model.weight.detach().clone()
        x = torch.randn(5, 4).half() * 1e-3
        with gradsurgeon.apply(model, {"version": 1, "rules": entries}) as session:
            scaler.scale(model(x).float().mean() * 1e-2).backward()
            if cast:
                with CudaCasts():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            found[f"fp16, cast {cast}"] = {
                "weights": plain(model.weight),
                "finite": bool(model.weight.isfinite().all()),
                "record": session.latest("weight"),
                "moved": bool((before != model.weight).any()),
            }
    factor = torch.tensor([1 / 3])
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        part = torch.linspace(0.1, 2.0, 50).to(kind)
        wanted = (part.float() / 3).to(kind)
        with CudaCasts():
            _numbers.multiply_([part], factor)
        found[str(kind)] = {"off": (part.float() - wanted.float()).abs().max().item()}
    return found


def counted(act: Callable[[], object]) -> dict[str, int]:
    with counting() as counts:
        act()
    return {key: count for key, count in counts.to_dict().items() if count}


def operations() -> dict[str, dict[str, int]]:
    four, three = Toy(torch.ones(4)), Toy(torch.ones(3))
    wide, host = Toy(torch.ones(2, 1)).expand(2, 8), torch.ones(4)
    return {
        "add": counted(lambda: four + 1.0),
        "add_": counted(lambda: four.add_(1.0)),
        "zero_": counted(four.zero_),
        "copy_": counted(lambda: four.copy_(Toy(host))),
        "expanded": counted(wide.sum),
        "views": counted(lambda: [four.view(2, 2)[0], four.detach()]),
        "empty": counted(lambda: torch.empty_like(four)),
        "zeros": counted(lambda: torch.zeros(4, device=DEVICE)),
        "foreach": counted(lambda: torch._foreach_mul_([four, three], 2.0)),
        "norms": counted(lambda: torch._foreach_norm([four, three])),
        "cat": counted(lambda: torch.cat([four, three])),
        "item": counted(three.max().item),
        "tolist": counted(four.tolist),
        "cpu": counted(four.cpu),
        "copy to host": counted(lambda: host.copy_(four)),
        "to host, later": counted(lambda: four.to("cpu", non_blocking=True)),
        "copy to host, later": counted(lambda: host.copy_(four, non_blocking=True)),
        "from host": counted(lambda: host.to(DEVICE)),
        "copy from host": counted(lambda: four.copy_(host)),
    }


def norms() -> dict[str, list[list[float]]]:
    """Return what the norms of gradients of several dtypes should be, and are: together and alone."""
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)
    grads = [torch.full((size + 1,), size + 1.0, dtype=kind) for size, kind in enumerate(kinds)]
    grads.append(torch.zeros(0))
    there = [Toy(grad) for grad in grads]
    return {
        str(order): [
            [torch.linalg.vector_norm(grad.double(), order).item() for grad in grads[:-1]] + [0.0],
            _numbers.norms(there, order).tolist(),
            [_numbers.norm(grad, order).item() for grad in there],
        ]
        for order in (1.0, 2.0, 3.0, math.inf)
    }


EVERY: list[Json] = [
    {"action": "clamp", "min": -1e-3, "max": 1e-3, "at": "step"},
    {"action": "scale", "factor": 0.3, "at": "step"},
    {"action": "zero", "at": "step"},
    {"action": "sanitize", "at": "backward"},
    {"action": "clip-norm", "max_norm": 1e-3},
    {"action": "clip-norm", "max_norm": 1e-4, "per": "rule"},
    {"action": "norm-log", "stats": ["l1", "l2", "linf", "mean", "std", "zeros", "nonfinite"]},
    {"action": "nan-trap", "then": "skip-step"},
    {"action": "spike-trap", "above": {"sigmas": 2.5, "warmup": 2}, "then": "clip"},
    {"action": "check-update"},
]


def private_operations() -> list[list[str]]:
    """Return each private operation that rules on parameters ask of the device, with the dtype that they ask it in."""
    found: set[tuple[str, str]] = set()

    def watch(operation: Operation) -> None:
        name = operation.func.overloadpacket.__name__
        if name.startswith(("_foreach_", "_amp_", "_fused_")):
            tensors = [one for one in leaves(operation.args[0]) if isinstance(one, Toy)]
            found.update((name, str(one.dtype).removeprefix("torch.")) for one in tensors)

    entries = [{"id": f"r{i}", "params": "*", **rule} for i, rule in enumerate(EVERY)]
    watchers.append(watch)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        torch.manual_seed(0)
        model = tanh_net(4, 6, 2).to(dtype)
        move(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
        for entry in entries:
            with gradsurgeon.apply(model, {"version": 1, "rules": [entry]}, optimizer=optimizer):
                for step in range(3):
                    optimizer.zero_grad()
                    x = Toy(torch.full((5, 4), 1.0 + 100.0 * step).to(dtype))
                    model(x).square().mean().backward()
                    optimizer.step()
    watchers.remove(watch)
    return [list(pair) for pair in sorted(found)]


def weights_on_two_devices() -> Any:
    """Return what `check-update` names where weights of two devices never move: no optimizer owns them."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    for number in (0, 2):
        move(model[number])
    optimizer = sgd(model[3], 0.05)
    messages: list[str] = []
    check = {"id": "update", "action": "check-update", "params": "*"}
    with gradsurgeon.apply(
        model,
        {"version": 1, "rules": [check]},
        optimizer=optimizer,
        on_event=lambda event: messages.append(event.message),
    ) as session:
        for _ in range(25):
            optimizer.zero_grad()
            for number, layer in enumerate(model):
                x = torch.randn(5, 4)
                output = layer(x if number % 2 else Toy(x))
                output.square().mean().backward()
            optimizer.step()
            session.status()  # reads what waits on the device
    return messages


CASES = [
    captured,
    failed,
    failed_at_the_update,
    failed_under_apply,
    operations,
    norms,
    same_as_on_the_host,
    losses,
    two_threads,
    host_reads,
    half_precision,
    private_operations,
    weights_on_two_devices,
]

if __name__ == "__main__":
    told: Json = {}
    with Factories():
        for case in CASES:
            try:
                told[case.__name__] = case()
            except Exception as error:  # noqa: BLE001 # told to whoever has started this
                told[case.__name__] = {"error": "".join(traceback.format_exception(error))}
    print(json.dumps(told), flush=True)  # noqa: T201 # the answer
    # The thread of the device outlives Python, which torch answers with an abort.
    os._exit(0)
