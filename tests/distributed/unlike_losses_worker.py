"""Combines the losses of ranks that do not do the same: each writes down what it got, and what it should have got."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Json
from several_losses import Heads, aggregator, applied, flat_grads, jacobian, trunk_of, two
from small import fields_of, sgd
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

WRAPPED = ("before", "after a pass", "anew")
NOTHING = ("a constant", "a head's zero")
MET = ("same", *NOTHING, "other order")


def part(number: int) -> Tensor:
    """Return a batch of this rank."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def make(trunk: type[nn.Module] | None = None) -> Any:
    torch.manual_seed(0)
    return Heads(trunk() if trunk else None).double()


def averaged(matrix: Tensor) -> Tensor:
    total = matrix.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def by_hand(model: Any, batch: Tensor, *, alone: bool = False) -> Tensor:
    """Return what MGDA makes of the averaged gradients, or of those of this rank alone."""
    matrix = jacobian(two(model, batch), trunk_of(model))
    combined: Tensor = aggregator("mgda")(matrix if alone else averaged(matrix))
    return averaged(combined) if alone else combined


def off(model: Any, wanted: Tensor) -> float:
    return float((flat_grads(trunk_of(model)) - wanted).abs().max())


def uneven_micro_batches() -> float:
    """Run another number of micro-batches on each rank before the one that is averaged."""
    model = make()
    called = DistributedDataParallel(model)
    applied(model, {"action": "combine", "method": "mgda"})
    wanted = by_hand(model, part(9))
    quiet = range(1 + 2 * dist.get_rank())
    mine = [jacobian(two(model, part(n)), trunk_of(model)) for n in quiet]
    wanted += averaged(sum((aggregator("mgda")(one) for one in mine), torch.zeros_like(wanted)))
    for number in quiet:
        with called.no_sync():
            gradsurgeon.backward(two(called, part(number)))
    gradsurgeon.backward(two(called, part(9)))
    return off(model, wanted)


def nothing(*_: Any) -> None:
    """Do nothing at this point of a step."""


def farthest(
    model: Any,
    called: Any,
    *,
    before: Callable[[], object] = nothing,
    between: Callable[[Tensor, dict[str, Tensor]], object] = nothing,
    after: Callable[[], object] = nothing,
) -> float:
    """Train; return how far the gradients were at most from those by hand.

    Args:
        model: what the rule is on.
        called: what the script calls.
        before: runs at the begin of a step.
        between: runs between the forward pass that is trained and its backward pass.
        after: runs after the update.
    """
    optimizer = sgd(model)
    largest = 0.0
    for step in range(3):
        before()
        optimizer.zero_grad()
        wanted = by_hand(model, part(step))
        x = part(step).requires_grad_()
        losses = two(called, x)
        between(x, losses)
        gradsurgeon.backward(losses)
        largest = max(largest, off(model, wanted))
        optimizer.step()
        after()
    return largest


def pass_of_one_rank(kind: str) -> Json:
    """Let one rank run a pass of the wrapped model by itself in each step."""
    model = make()
    called = DistributedDataParallel(model)
    session = applied(model, {"action": "combine", "method": "mgda"})

    def alone() -> None:
        if dist.get_rank() != 0:
            return
        losses = two(model, part(7))
        if kind == "plain":
            losses["seg"].backward()
        else:
            gradsurgeon.backward(losses)

    largest = farthest(model, called, before=alone)
    return {"off": largest, "said": fields_of(session, "message")}


def wrapped(when: str) -> float:
    """Wrap the model before the first pass, after one of the bare model, or once more after one."""
    model = make()
    called: Any = model if when == "after a pass" else DistributedDataParallel(model)
    applied(model, {"action": "combine", "method": "mgda"})
    gradsurgeon.backward(two(called, part(0)))
    if when != "before":
        called = DistributedDataParallel(model)
    return farthest(model, called)


BETWEEN = ("nothing", "evaluation", "evaluation on one rank", "no_sync", "inputs")


def passes_between(what: str) -> float:
    """Do something between the forward pass that is trained and its backward pass."""
    model = make()
    called = DistributedDataParallel(model)
    applied(model, {"action": "combine", "method": "mgda"})

    def between(x: Tensor, losses: dict[str, Tensor]) -> None:
        if what == "evaluation" or (what == "evaluation on one rank" and dist.get_rank() == 0):
            with torch.no_grad():
                called(part(7))
        elif what == "no_sync":
            with called.no_sync():
                called(part(7))
        elif what == "inputs":
            losses["seg"].backward(inputs=[x], retain_graph=True)

    return farthest(model, called, between=between)


def with_parts_of_their_own(how: str) -> float:
    """Train a model of which DDP averages the trunk alone, with heads of another width on each rank."""
    model = make()
    alone: Any = model
    if how == "other widths":
        model.seg = nn.Linear(8, 2 + dist.get_rank()).double()
        model.trunk = DistributedDataParallel(model.trunk)
        called: Any = model
        alone = make()
    else:
        ignored = [name for name, _ in model.named_parameters() if not name.startswith("trunk")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        called = DistributedDataParallel(model)
    rule = {"action": "combine", "method": "mgda", "params": "*"}
    applied(model, rule, {"action": "conflict", "params": "*"})

    def after() -> None:
        if dist.get_rank() == 0:  # no rank waits for another in this one
            two(alone, part(3))["seg"].backward()

    return farthest(model, called, after=after)


class Met(torch.autograd.Function):
    """The identity, whose gradient is averaged over ranks within the backward pass, as in `SyncBatchNorm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return averaged(grad)


class Synchronized(nn.SyncBatchNorm):
    """One that a host can run."""

    def forward(self, x: Tensor) -> Any:
        return Met.apply(x)


class Meeting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(16, affine=False)

    def forward(self, x: Tensor) -> Any:
        features: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return Met.apply(features)


def met_in_the_pass(kind: str, *, alike: bool) -> Json:
    """Train a model whose backward pass is one of all ranks, where the second one has its losses in another way.

    ``alike``: all give the same names in the same order, with zeros for what is not there.
    """
    model = make(Meeting)
    called = DistributedDataParallel(model, find_unused_parameters=True)
    # It takes no such layer whose parameters are on a host.
    model.trunk.norm.__class__ = Synchronized
    session = applied(model, {"action": "combine", "method": "mgda"})
    both = two(called, part(0))
    if kind in NOTHING and dist.get_rank() == 1:
        # What a script writes where a batch has nothing for a head.
        zero = 0.0 * sum(param.sum() for param in model.depth.parameters())
        no_loss = torch.zeros(()) if kind == "a constant" else zero
        both["depth"] = 0.0 * both["depth"] if alike else no_loss
    names = ["depth", "seg"] if kind == "other order" and dist.get_rank() == 1 else ["seg", "depth"]
    gradsurgeon.backward({name: both[name] for name in (["seg", "depth"] if alike else names)})
    grads = flat_grads(trunk_of(model))
    return {"grads": grads.tolist(), "weight": session.latest("seg", "weight")}


def main() -> Json:
    warnings.simplefilter("ignore")
    return {
        "uneven": uneven_micro_batches(),
        "pass of one rank": {kind: pass_of_one_rank(kind) for kind in ("plain", "named")},
        "wrapped": {when: wrapped(when) for when in WRAPPED},
        "between": {what: passes_between(what) for what in BETWEEN},
        "own": {how: with_parts_of_their_own(how) for how in ("other widths", "ignored")},
        "met": {k: [met_in_the_pass(k, alike=alike) for alike in (False, True)] for k in MET},
    }


if __name__ == "__main__":
    work(main)
