"""One of two ranks sees something that the other does not; each writes down what became of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import mine, whole, wrapped
from ranks import Json
from small import attach, fields_of, kinds_of, refusal, sgd, tanh_net
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

FAULT = 2
STEPS = 5


def make(kind: str) -> tuple[nn.Sequential, Any]:
    """Return a model of four rows per layer and what the script calls."""
    torch.manual_seed(0)
    model = tanh_net(4, 4, 4)
    return model, wrapped(kind, model)


def spoil_row(row: int) -> Callable[[Tensor], Tensor]:
    """Return a hook that makes one column of the gradient of an output NaN."""

    def hook(grad: Tensor) -> Tensor:
        faulty = grad.clone()
        faulty[:, row] = float("nan")
        return faulty

    return hook


def outcome(model: nn.Module, root: nn.Module, rule: Json, backward: Callable[[int], None]) -> Json:
    """Train until a rule raises, and return what it raised, the weights after each step, and the events.

    Args:
        model: what the optimizer updates.
        root: what the rule is bound to.
        rule: the only one.
        backward: makes the gradients of a step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    session = attach(root, rule)
    weights = []
    error = None
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(step)
        try:
            optimizer.step()
        except gradsurgeon.NonFiniteGradientError as caught:
            error = {"rank": caught.rank, "name": caught.name, "step": caught.step}
            error |= {"rule": caught.rule, "text": str(caught)}
            break
        weights.append([whole(param) for param in model.parameters()])
    session.remove()
    return {
        "error": error,
        "weights": weights,
        "events": fields_of(session, "kind", "step", "name"),
        "texts": fields_of(session, "message"),
    }


def train(kind: str, rule: Json) -> Json:
    """Train, with a fault in one step that comes through the output of layer 2."""
    model, called = make(kind)

    def backward(step: int) -> None:
        out = called(mine(step))
        if step == FAULT:
            out = everywhere(out)
        out.square().mean().backward()

    return outcome(model, called, rule, backward)


def everywhere(out: Tensor) -> Tensor:
    """Make one row of the weight gradient NaN on the last rank; reduction carries it to its owner."""
    if dist.get_rank() == 1:
        out.register_hook(spoil_row(0))
    return out


def trap(**options: Any) -> Json:
    """Return a trap on parameters or modules."""
    return {"id": "trap", "action": "nan-trap", "params": "*", **options}


def module_trap(kind: str, then: str) -> Json:
    """Trap a module tensor that is NaN on rank 1 alone and that no gradient sees."""
    model, called = make(kind)

    probe = nn.Tanh()
    holder = nn.ModuleDict({"net": model, "probe": probe})
    rule = {
        "id": "trap",
        "action": "nan-trap",
        "modules": "probe",
        "tensor": "output.grad",
        "then": then,
    }

    def backward(step: int) -> None:
        side = torch.ones(2, requires_grad=True)
        seen = probe(side)
        if step == FAULT and dist.get_rank() == 1:
            seen = seen * float("nan")
        (called(mine(step)).square().mean() + seen.sum()).backward()

    return outcome(model, holder, rule, backward)


def in_pieces(then: str, faulty: int) -> Json:
    """Accumulate two micro-batches of which the last is reduced; rank 1 spoils one of them."""
    model, called = make("DDP")

    def backward(step: int) -> None:
        for number, piece in enumerate(mine(step).chunk(2)):
            with called.no_sync() if number == 0 else nullcontext():
                out = called(piece)
                if step == FAULT and number == faulty:
                    out = everywhere(out)
                out.square().mean().backward()

    return outcome(model, called, trap(then=then), backward)


class Branch(nn.Module):
    """Uses one of its layers on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.side = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the rank makes of ``x``."""
        out: Tensor = self.first(x)
        return out.add(self.side(x)) if dist.get_rank() == 0 else out


def used_by_one(params: str, then: str) -> Json:
    """Trap a gradient that one rank alone has computed, and that the other is given."""
    model = Branch()
    called = DistributedDataParallel(model, find_unused_parameters=True)

    def backward(step: int) -> None:
        if step == FAULT:
            model.side.register_forward_hook(lambda _m, _i, out: out * float("nan"))
        called(mine(step)).square().mean().backward()

    return outcome(model, called, trap(then=then) | {"params": params}, backward)


def scheduled() -> Json:
    """Let rank 1 leave out an update, so that its count lags and its rule rests where that of rank 0 trips."""
    model, called = make("DDP")
    optimizer = sgd(model, 0.05)
    rule = trap(then="skip-step", steps={"every": 2})
    session = attach(called, rule)
    moved = []
    for step in range(STEPS):
        optimizer.zero_grad()
        out = called(mine(step))
        (everywhere(out) if step == FAULT else out).square().mean().backward()
        before = [whole(param) for param in model.parameters()]
        if step or dist.get_rank() == 0:
            optimizer.step()
        moved.append(before != [whole(param) for param in model.parameters()])
    session.remove()
    return {"moved": moved, "events": kinds_of(session)}


def own_spikes(per: str, then: str) -> str:
    """Return why a rule is refused by which ranks would stop or skip by a norm that each has by itself."""
    model, _ = make("")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    rule: Json = {"id": "spikes", "action": "spike-trap", "params": "*", "per": per, "then": then}
    rule["above"] = {"times": 3.0, "beta": 0.9, "warmup": 4}
    called = DistributedDataParallel(model)

    def backward(step: int) -> None:
        called(mine(step)).sum().backward()

    return refusal(lambda: outcome(model, called, rule, backward))


def uneven() -> str:
    """Train under `Join`."""
    _, called = make("DDP")
    session = attach(called, trap())

    def backward() -> None:
        with Join([called]):
            called(mine(0)).sum().backward()

    text = refusal(backward)
    session.remove()
    return text


def main() -> Json:
    """Run every part."""
    found: Json = {}
    for kind in ("DDP", "FSDP2"):
        for then in ("skip-step", "raise"):
            found[f"{kind} params {then}"] = train(kind, trap(then=then))
            found[f"{kind} module {then}"] = module_trap(kind, then)
    found["FSDP2 give up"] = train("FSDP2", trap(then="skip-step", give_up_after=1))
    for faulty in range(2):
        for then in ("skip-step", "raise"):
            found[f"piece {faulty} {then}"] = in_pieces(then, faulty)
    for params in ("side.*", "*"):
        found[f"used by one, {params}"] = used_by_one(params, "raise")
    found["scheduled"] = scheduled()
    found["own spikes"] = [own_spikes("parameter", "skip-step"), own_spikes("rule", "raise")]
    found["uneven"] = uneven()
    return found


if __name__ == "__main__":
    work(main)
