"""Trains on two ranks under `spike-trap`, where all ranks see a spike and where one rank differs from the other."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from distributed.batches import make, mine, whole, wrapped
from ranks import Json
from small import attach, fields_of, sgd
from spikes import statistics_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon

# What the loss of each step is multiplied by.
FACTORS = (1, 1.2, 0.9, 1.1, 1, 30, 1, 1.1, 0.9, 50, 0.8, 1.3)
SIGMAS = {"sigmas": 2.5, "beta": 0.9, "warmup": 4}
TIMES = {"times": 1.05, "beta": 0.9, "warmup": 4}
# Three times the usual: nothing but the fault of one rank is that large.
HIGH: Json = {"times": 3, "beta": 0.9, "warmup": 3}
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


def spike_trap(above: Json, per: str, then: str, **options: Any) -> Json:
    """Return a rule."""
    rule = {"id": "spikes", "action": "spike-trap", "params": "*", "above": above}
    return {**rule, "per": per, "then": then, **options}


def outcome(model: Any, called: Any, rule: Json, backward: Callable[[int], None]) -> Json:
    """Train until a rule raises; return what it raised, the weights after each step, and the rest.

    Weights are those that are to stay alike on all ranks.
    """
    optimizer = sgd(model, 0.01)
    session = attach(called, rule, optimizer=optimizer)
    weights: list[Any] = []
    error: Json | None = None
    for step in range(len(FACTORS)):
        optimizer.zero_grad()
        backward(step)
        try:
            optimizer.step()
        except gradsurgeon.GradientSpikeError as caught:
            error = {"step": caught.step, "text": str(caught)}
            break
        alike = [p for name, p in model.named_parameters() if not name.startswith("own")]
        weights.append([whole(param) for param in alike])
    found = {
        "error": error,
        "weights": weights,
        "events": fields_of(session, "kind", "step", "name"),
        "learnt": [statistic.kept.tolist() for statistic in statistics_of(session)],
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

    def backward(step: int) -> None:
        now[0] = step
        use = not (what == "none" and dist.get_rank() == 1 and step % 2)
        # The batch of one step throughout: nothing else is a spike.
        called(mine(0), use=use).square().mean().backward()

    return outcome(model, called, rule, backward)


def all_at_once(kind: str, rule: Json) -> Json:
    """Let all ranks see the same."""
    model = make()
    called = wrapped(kind, model)

    def backward(step: int) -> None:
        (called(mine(step)).square().mean() * FACTORS[step]).backward()

    return outcome(model, called, rule, backward)


def main() -> Json:
    """Train where one rank differs from the other, and where rules stop."""
    logging.getLogger("gradsurgeon").setLevel(logging.CRITICAL)
    # Sessions look for wrappers among all live objects: torch itself need not be searched each time.
    gc.freeze()
    found: Json = {}
    for then in ("clip", "warn"):
        for what in ALONE:
            found[f"alone, {what}, {then}"] = alone(what, spike_trap(HIGH, "parameter", then))
    for kind in ("DDP", "FSDP2"):
        found[f"raise, {kind}"] = all_at_once(kind, spike_trap(SIGMAS, "rule", "raise"))
        patience = spike_trap(TIMES, "parameter", "skip-step", give_up_after=2)
        found[f"give up, {kind}"] = all_at_once(kind, patience)
    return found


if __name__ == "__main__":
    work(main)
