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
from typing import Any

import torch
from device_failures import (
    backward,
    captured,
    failed,
    failed_at_the_update,
    failed_under_apply,
    on_device,
)
from ranks import Json
from small import attach, fields_of, rules_of_workers, sgd, tanh_net
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradsurgeon
from benchmarks import device_worker
from benchmarks.operations import counting
from benchmarks.toy_device import (
    Factories,
    Operation,
    Toy,
    aten,
    leaves,
    move,
    watchers,
)
from gradsurgeon.runtime import device_policy
from gradsurgeon.runtime.training import Training
from gradsurgeon.tensors import _nonfinite, _numbers, _projection, _torch, measure
from gradsurgeon.tensors.backward_graph import BackwardGraph

warnings.simplefilter("ignore")


def rules(*ids: str) -> Json:
    return {
        "version": 1,
        "rules": [rule for rule in rules_of_workers("device") if not ids or rule["id"] in ids],
    }


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
    begins = Training.backward_started

    def slowly(self: Training, graph: BackwardGraph) -> None:
        time.sleep(0.002)  # so that both threads come before the pass is known
        begins(self, graph)

    Training.backward_started = slowly  # type: ignore[method-assign]
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
    Training.backward_started = begins  # type: ignore[method-assign]
    return found


def reads_of(*ids: str, by_hand: bool = False) -> int:
    """Return how often the host waits in four steps, after two to settle in."""
    model, optimizer = on_device()
    given: Any = [] if by_hand else optimizer
    with gradsurgeon.apply(model, rules(*ids), optimizer=given) as session:

        def step() -> None:
            backward(model, optimizer)
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


def asynchronously(parts: Any) -> _torch.Arrival:
    """Copy to the host without a wait, as only CUDA does."""
    whole = torch.cat(list(parts))
    host = torch.empty(len(whole), dtype=whole.dtype, device="cpu")
    return _torch.Arrival(parts, host.copy_(whole, non_blocking=True))


def decided(layers: int, *, scaled: bool = False) -> Json:
    """Return what five steps ask of a device that decides in the place of traps, beside norms and a clip."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    move(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("toy", enabled=scaled)
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    spikes = {**trap, "id": "spikes", "action": "spike-trap", "above": {"times": 9, "warmup": 2}}
    clip = {"id": "clip", "action": "clip-norm", "params": "*", "max_norm": 1.0, "per": "rule"}
    norms = {"id": "norms", "action": "norm-log", "params": "*", "at": "step"}
    found: Json = {"waits": {}}
    for name, rule_list in (("bare", [norms]), ("rules", [trap, spikes, clip, norms])):
        with gradsurgeon.apply(
            model, {"version": 1, "rules": rule_list}, optimizer=optimizer
        ) as session:

            def step(*, bad: bool = False) -> None:
                optimizer.zero_grad()
                loss = model(Toy(torch.randn(2, 4))).square().mean()
                scaler.scale(loss * (math.nan if bad else 1.0)).backward()
                scaler.step(optimizer)

            for _ in range(3):
                step()
            with counting() as counts:
                for _ in range(5):
                    step()
            found[name] = {"waits": counts.host_reads, "operations": counts.operations}
            if name == "rules":
                before = [plain(param) for param in model.parameters()]
                step(bad=True)
                found["moved"] = before != [plain(param) for param in model.parameters()]
                session.status()
                told = fields_of(session, "kind", "step", "told_at")
                found["told"] = [entry for entry in told if entry[0] != "notice"]
    return found


def scaled(*, on_device: bool) -> Json:
    """Train under a scaler, with overflows, a trap that warns, a clip and norms; return waits and what is told."""
    torch.manual_seed(0)
    model = tanh_net(4, 6, 2)
    if on_device:
        move(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    kind = "toy" if on_device else "cpu"
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**4, growth_interval=100)
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "warn", "forensics": False}
    spikes = {**trap, "id": "spikes", "action": "spike-trap", "above": {"times": 9, "warmup": 2}}
    del spikes["forensics"]
    norms = {"id": "norms", "action": "norm-log", "params": "*", "at": "step"}
    learns = {"id": "learns", "action": "check-update", "params": "*"}
    waits = []
    rule_list = [trap, spikes, norms, learns]
    with gradsurgeon.apply(
        model, {"version": 1, "rules": rule_list}, optimizer=optimizer, scaler=scaler
    ) as session:
        for step in range(7):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(Toy(x) if on_device else x).square().mean()
            scaler.scale(loss * (1e39 if step in (2, 5) else 1.0)).backward()
            with counting() as counts:
                scaler.step(optimizer)
            waits.append(counts.host_reads)
            scaler.update()
        return {
            "waits": waits,
            "weights": [plain(param) for param in model.parameters()],
            "events": fields_of(session, "kind", "step", "name"),
            "status": {
                rule: (told.fired, told.last_step) for rule, told in session.status().items()
            },
            "norms": [step for step, _ in session.history("2.weight", rule="norms")],
        }


def waiting_under_a_scaler() -> Json:
    return {"host": scaled(on_device=False), "device": scaled(on_device=True)}


def decisions() -> Json:
    device_policy.DEVICES.add("toy")
    sends = _torch.send
    _torch.send = asynchronously
    try:
        return {"few": decided(2), "many": decided(20)}
    finally:
        _torch.send = sends
        device_policy.DEVICES.discard("toy")


def host_reads() -> dict[str, int]:
    return {
        "norms": reads_of("norms", "back", "last"),
        "histograms": reads_of("bins"),
        "edits": reads_of("bound", "clip", "half"),
        "trap": reads_of("trap", "norms"),
        "everything": reads_of(),
        "by hand": reads_of("bound", "norms", by_hand=True),
    }


def reads_in_40_steps() -> dict[str, int]:
    """Return how often the host waits where copies to it are asynchronous, as they are on CUDA."""
    modules = {"action": "norm-log", "modules": "*", "tensor": "output"}
    clip = {"action": "clip-norm", "params": "*", "per": "rule", "max_norm": 0.1}
    each = {"version": 1, "rules": [{"id": "outputs", **modules}, {"id": "clip", **clip}]}
    waiting = _torch.send
    _torch.send = device_worker._send
    reads = {}
    for name, wanted in (("norms and clip", each), ("fingerprint", "gradsurgeon:fingerprint@1")):
        model, optimizer = on_device()
        with gradsurgeon.apply(model, wanted, optimizer=optimizer):
            backward(model, optimizer)
            optimizer.step()
            with counting() as counts:
                for _ in range(40):
                    backward(model, optimizer)
                    optimizer.step()
        reads[name] = counts.host_reads
    _torch.send = waiting
    return reads


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


def projections() -> dict[str, Json]:
    """Return what each form of a projection is off from that of the host, and what it asks of the device."""
    found: dict[str, Json] = {}
    for form, widening in (("plain", set()), ("widening", {"toy"})):
        _projection.WIDENING = widening
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for size in (700, 50_000, 1_000_003):
                tensor = torch.randn(size).to(dtype)
                there = Toy(tensor)
                _projection.projections(there)  # makes the signs
                with counting() as counts:
                    measured = _projection.projections(there)
                off = torch.tensor(plain(measured)) - _projection.projections(tensor)
                found[f"{form} {dtype} {size}"] = {
                    "off": off.abs().max().item() / tensor.double().norm().item(),
                    "operations": counts.operations,
                    "copied": counts.bytes_written / tensor.nbytes,
                    "read": counts.bytes_read / tensor.nbytes,
                }
    _projection.WIDENING = {"cuda"}
    return found


def projections_of_many() -> Json:
    """Return the operations for 10 and for 100 small tensors, and the largest distance from those of the host."""
    operations = []
    for number in (10, 100):
        tensors = [torch.randn(size) for size in (0, 1, 300, 768, 3072) for _ in range(number // 5)]
        there = [Toy(tensor) for tensor in tensors]
        _projection.projections_of(there)
        with counting() as counts:
            measured = _projection.projections_of(there)
        operations.append(counts.operations)
    off = torch.tensor(plain(measured)) - _projection.projections_of(tensors)
    return {"operations": operations, "off": off.abs().max().item()}


def nonfinite() -> list[list[Any]]:
    """Return the dtype, the number of non-finite elements, the one that is counted, the mark and its operations.

    The last two are the number of elements and the operations that count them, by name.
    """
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
    bad = [math.nan, math.inf, -math.inf]
    # The largest number of a format is not taken for an infinity.
    tensors = [torch.full((3, 5), torch.finfo(kind).max, dtype=kind) for kind in kinds]
    tensors += [torch.tensor([1.0, number]).to(kind) for kind in kinds for number in bad]
    tensors += [torch.tensor([[1.0, *bad], bad + bad[:1]]).t(), torch.ones(0), torch.ones(3).long()]
    tensors.append(torch.full((3, 5, 7), math.inf).transpose(0, 2))
    _nonfinite._COUNTED_AT_ONCE = 4
    found = []
    for tensor in tensors:
        with counting() as counts:
            mark: Any = _nonfinite.nonfinite_mark(Toy(tensor))
        if isinstance(mark, Tensor):
            (mark,) = measure.read_marks([mark])
        with counting() as work:
            counted: Any = _nonfinite.nonfinite(Toy(tensor))
        wanted = int(tensor.isfinite().logical_not().sum())
        found.append([str(tensor.dtype), wanted, int(counted), mark, counts.operations])
        found[-1] += [tensor.numel(), dict(work.names)]
    return found


def trapped_outputs() -> Any:
    """Return what a trap on modules says of outputs on the device that are not finite."""
    model, optimizer = on_device()
    trap = {"id": "trap", "action": "nan-trap", "then": "warn", "forensics": False}
    trap |= {"modules": "*", "tensor": "output"}
    with attach(model, trap, optimizer=optimizer) as session:
        optimizer.zero_grad()
        model(Toy(torch.tensor([[math.inf, 1.0, 1.0, 1.0]]))).sum().backward()
        optimizer.step()
        return fields_of(session, "kind", "name", "message")


def private_operations() -> list[list[str]]:
    """Return each private operation that rules on parameters ask of the device, with the dtype that they ask it in."""
    found: set[tuple[str, str]] = set()

    def watch(operation: Operation) -> None:
        name = operation.func.overloadpacket.__name__
        if name.startswith(("_foreach_", "_amp_", "_fused_")):
            tensors = [one for one in leaves(operation.args[0]) if isinstance(one, Toy)]
            found.update((name, str(one.dtype).removeprefix("torch.")) for one in tensors)

    watchers.append(watch)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        torch.manual_seed(0)
        model = tanh_net(4, 6, 2).to(dtype)
        move(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
        for rule in rules_of_workers("device, one by one"):
            with attach(model, rule, optimizer=optimizer):
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
    norms,
    nonfinite,
    trapped_outputs,
    projections,
    projections_of_many,
    same_as_on_the_host,
    losses,
    two_threads,
    decisions,
    waiting_under_a_scaler,
    host_reads,
    reads_in_40_steps,
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
