"""Trains under `spike-trap` in every set-up of several ranks, and where one rank differs from the other."""

from __future__ import annotations

import gc
import itertools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import Block, data, divide, make, shard, whole
from ranks import Json
from running_bounds import ByHand
from small import attach, fields_of, sgd
from spikes import statistics_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

# What the loss of each step is multiplied by.
FACTORS = (1, 1.2, 0.9, 1.1, 1, 30, 1, 1.1, 0.9, 50, 0.8, 1.3)
ABOVE: dict[str, Json] = {
    "sigmas": {"sigmas": 2.5, "beta": 0.9, "warmup": 4},
    "times": {"times": 1.05, "beta": 0.9, "warmup": 4},
    "percentile": {"percentile": 60, "window": 4},
    "norm": {"norm": 0.4},
}
# Three times the usual: nothing but the fault of one rank is that large.
HIGH: Json = {"times": 3, "beta": 0.9, "warmup": 3}
CLIP = {"id": "short", "action": "clip-norm", "params": "*", "max_norm": 1.0, "per": "rule"}
PER = ("rule", "parameter")
THEN = ("clip", "skip-step")
KINDS = ("DDP", "FSDP2", "tensor parallel")
VARIANTS = ("plain", "accumulation", "scaler")
# Where one rank differs from the other: in this step.
FAULT = 5
ALONE = ("nan", "large", "none")


class WithOwn(nn.Module):
    """Has a parameter that DDP leaves alone, so that each rank has its own gradient of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()
        self.own = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.own.weight)

    def forward(self, x: Tensor, *, use: bool = True) -> Tensor:
        """Return what the model makes of ``x``, and move `own` with it."""
        out: Tensor = self.net(x)
        return out + self.own.weight.sum() if use else out


def wrapped(kind: str, model: Any) -> Any:
    """Return what the script calls."""
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP2":
        return shard(model)
    if kind == "tensor parallel":
        return divide(model)
    return model


def backward(kind: str, called: Any, step: int, parts: int, scaler: Any) -> None:
    """Make the gradients of a step, of this rank's share of the batch."""
    ranks, rank = (2, dist.get_rank()) if kind in KINDS else (1, 0)
    factor = FACTORS[step]
    if kind in ("tensor parallel", "block"):
        # Every rank has half of the sequence; the loss is the mean over all of it.
        x = data(step).reshape(1, 8, 4).chunk(ranks, 1)[rank]
        (called(x).square().sum() / 32 * factor).backward()
        return
    mine = data(step).chunk(ranks)[rank].chunk(parts)
    for number, part in enumerate(mine):
        last = number == len(mine) - 1
        if kind == "DDP":
            called.require_backward_grad_sync = last
        if kind == "FSDP2":
            called.set_requires_gradient_sync(last)
        loss = called(part).square().mean() * factor / parts
        (loss if scaler is None else scaler.scale(loss)).backward()


def learnt(session: gradsurgeon.Session) -> list[list[list[float]]]:
    """Return what the rules of a session have learnt."""
    return [statistic.kept.tolist() for statistic in statistics_of(session)]


def train(kind: str, rule: Json, variant: str = "plain") -> Json:
    """Train under a rule, and return the weights at the end, the events and what was learnt."""
    model: Any = Block() if kind in ("tensor parallel", "block") else make()
    called = wrapped(kind, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    # Its scale grows in every third step.
    scaler = None
    if variant == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parts = 2 if variant == "accumulation" else 1
    with attach(called, rule, optimizer=optimizer) as session:
        for step in range(len(FACTORS)):
            optimizer.zero_grad()
            backward(kind, called, step, parts, scaler)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        return {
            "weights": [whole(param) for param in model.parameters()],
            "events": fields_of(session, "kind", "step", "name", "message"),
            "learnt": learnt(session),
        }


def train_by_hand(kind: str, rule: Json | None) -> Json:
    """Train in one process on the whole batch, and keep to the bound of the rule, if any, by hand."""
    model: Any = Block() if kind == "block" else make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    hand = None if rule is None else ByHand(rule["above"], rule["per"], rule["then"])
    for step in range(len(FACTORS)):
        optimizer.zero_grad()
        backward(kind, model, step, 1, None)
        if hand is None or hand.judge({n: p.grad for n, p in model.named_parameters()}):
            optimizer.step()
            if hand is not None:
                hand.learn()
    cut = 0 if hand is None else hand.cut
    return {"weights": [whole(param) for param in model.parameters()], "cut": cut}


def spike_trap(above: Json, per: str, then: str, **options: Any) -> Json:
    """Return a rule."""
    rule = {"id": "spikes", "action": "spike-trap", "params": "*", "above": above}
    return {**rule, "per": per, "then": then, **options}


def same(cases: list[str]) -> Json:
    """Train in set-ups as they are named, and by hand under every rule."""
    found: Json = {}
    for kind in ("one process", "block"):
        found[f"{kind} | nothing"] = train_by_hand(kind, None)
        for above, per, then in itertools.product(ABOVE, PER, THEN):
            rule = spike_trap(ABOVE[above], per, then)
            found[f"{kind} | {above}, {per}, {then}"] = train_by_hand(kind, rule)
    for case in cases:
        kind, variant, above, per, then = case.replace(" | ", ", ").split(", ")
        found[case] = train(kind, spike_trap(ABOVE[above], per, then), variant)
    return found


def outcome(
    model: Any,
    called: Any,
    rule: Json,
    step_backward: Callable[[int, Any], None],
) -> Json:
    """Train until a rule raises; return what it raised, the weights after each step, and the rest.

    Weights are those that are to stay alike on all ranks.
    """
    optimizer = sgd(model, 0.01)
    session = attach(called, rule, optimizer=optimizer)
    weights: list[Any] = []
    error: Json | None = None
    for step in range(len(FACTORS)):
        optimizer.zero_grad()
        step_backward(step, session)
        try:
            optimizer.step()
        except gradsurgeon.GradientSpikeError as caught:
            error = {"rank": caught.rank, "name": caught.name, "step": caught.step}
            error["text"] = str(caught)
            break
        alike = [p for name, p in model.named_parameters() if not name.startswith("own")]
        weights.append([whole(param) for param in alike])
    found = {
        "error": error,
        "weights": weights,
        "events": fields_of(session, "kind", "step", "name"),
        "texts": fields_of(session, "message"),
        "learnt": learnt(session),
    }
    session.remove()
    return found


def alone(what: str, rule: Json) -> Json:
    """Let rank 1 have a gradient of its own that is NaN or large in one step, or none in every other step."""
    model = WithOwn()
    ignored = ["own.weight"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    called = DistributedDataParallel(model)
    factor = {"nan": float("nan"), "large": 1e4, "none": 1.0}[what]
    now = [0]

    def spoil(grad: Tensor) -> Tensor:
        return grad * factor if now[0] == FAULT and dist.get_rank() == 1 else grad

    model.own.weight.register_hook(spoil)

    def step_backward(step: int, _session: Any) -> None:
        now[0] = step
        use = not (what == "none" and dist.get_rank() == 1 and step % 2)
        # The batch of one step throughout: nothing else is a spike.
        called(data(0).chunk(2)[dist.get_rank()], use=use).square().mean().backward()

    return outcome(model, called, rule, step_backward)


def refused(rule: Json) -> str:
    """Return why a rule is refused where a rank has a gradient of its own."""
    try:
        alone("none", rule)
    except gradsurgeon.GradSurgeonError as error:
        return str(error)
    return ""


def all_at_once(kind: str, rule: Json) -> Json:
    """Let all ranks see the same."""
    model = make()
    called = wrapped(kind, model)
    return outcome(model, called, rule, lambda step, _: backward(kind, called, step, 1, None))


def apart() -> Json:
    """Train where one rank differs from the other, and where rules stop."""
    found: Json = {}
    for then in ("clip", "skip-step", "raise", "warn"):
        # By its own gradient a rank must not stop or skip.
        for what in ALONE if then in ("clip", "warn") else ():
            found[f"alone, {what}, {then}"] = alone(what, spike_trap(HIGH, "parameter", then))
        if then in ("skip-step", "raise"):
            for per in ("parameter", "rule"):
                found[f"refused, {per}, {then}"] = refused(spike_trap(HIGH, per, then))
            shared = {**spike_trap(HIGH, "parameter", then), "exclude": "own.*"}
            found[f"shared, {then}"] = alone("none", shared)
    over_all = spike_trap(HIGH, "rule", "clip")
    found["over all"] = alone("large", over_all)
    found["over all, of clip-norm"] = alone("large", CLIP)
    found["over all but its own"] = alone("large", {**over_all, "exclude": "own.*"})
    for kind in ("DDP", "FSDP2"):
        found[f"raise, {kind}"] = all_at_once(kind, spike_trap(ABOVE["sigmas"], "rule", "raise"))
        patience = spike_trap(ABOVE["times"], "parameter", "skip-step", give_up_after=2)
        found[f"give up, {kind}"] = all_at_once(kind, patience)
    return found


def main() -> Json:
    """Run every part."""
    logging.getLogger("gradsurgeon").setLevel(logging.CRITICAL)
    # Sessions look for wrappers among all live objects: torch itself need not be searched each time.
    gc.freeze()
    return {"same": same(sys.argv[2:]), "apart": apart()}


if __name__ == "__main__":
    work(main)
