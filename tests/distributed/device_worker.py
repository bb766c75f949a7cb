"""Two ranks train under DDP with fused optimizers on whose updates the device decides."""

from __future__ import annotations

import logging
import math
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from fused_trainings import (
    STEPS,
    Case,
    batch,
    decided_on_the_cpu,
    differences,
    drawn,
    net,
    train,
    waiting,
)
from ranks import Json
from small import attach
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon
from gradsurgeon.distributed.votes import Voter
from gradsurgeon.runtime import optimizer_watch
from gradsurgeon.runtime.traps import Traps

SKIPS: Json = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
FAULT, LAST = 3, 6
Change = Callable[[int, Any, Any, gradsurgeon.Session], object]


def drawn_for_ranks(seed: int) -> Case:
    """Return a random training; what happens to batches happens on one rank, or on both."""
    case = drawn(seed)
    draw = random.Random(seed)
    case.on_rank = draw.choice([0, 1, None])
    case.averages_all = draw.random() < 0.5
    # A state reads the last decision of its rank alone, before ranks tell each other what they know.
    quiet = [step for step in range(2, STEPS) if step - 1 not in case.happens]
    case.resumes = draw.choice([None, draw.choice(quiet)])
    return case


def compared(seeds: range) -> Json:
    """Return where trainings in which the device decides differ from those in which the host waits."""
    unlike = {}
    late = 0
    for seed in seeds:
        case = drawn_for_ranks(seed)
        decided = train(case, dist.get_rank())
        late += decided.pop("late")
        with waiting():
            waited = train(case, dist.get_rank())
        assert not waited.pop("late")
        found = differences(decided, waited)
        if found:
            unlike[str(seed)] = [repr(case), *found]
    return {"unlike": unlike, "late": late}


def nothing(step: int, model: Any, optimizer: Any, session: gradsurgeon.Session) -> None:
    """Change nothing right before an update."""


def outcome(
    rule: Json = SKIPS,
    *,
    faulty: tuple[int, ...] = (1,),
    change: Change = nothing,
    after: Change = nothing,
    last: int = LAST,
    pieces: int = 1,
    ignored: str = "",
    spare: bool = False,
    prepare: Callable[[Any], object] = lambda _: None,
    **options: Any,
) -> Json:
    """Train with a fault in one step; return what became of it.

    Args:
        rule: the only one.
        faulty: the ranks whose batch has a NaN in that step.
        change: runs before each update.
        after: runs after each update.
        last: how many steps there are.
        pieces: how many passes feed an update; the last one averages.
        ignored: a parameter that DDP leaves alone.
        spare: whether the model has a parameter that no pass reaches.
        prepare: gets the wrapper.
        options: those of the wrapper.
    """
    model = net()
    if spare:
        model.spare = nn.Parameter(torch.ones(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [ignored])
    called = DistributedDataParallel(model, **options)
    prepare(called)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    moved = []
    error = None
    session = attach(called, rule, optimizer=optimizer)
    for step in range(last):
        optimizer.zero_grad()
        for number in range(pieces):
            x = batch(step, dist.get_rank())
            if step == FAULT and dist.get_rank() in faulty:
                x[0, 0] = math.nan
            with called.no_sync() if number < pieces - 1 else nullcontext():
                called(x).square().mean().backward()
        change(step, model, optimizer, session)
        before = [param.detach().clone() for param in model.parameters()]
        try:
            optimizer.step()
        except gradsurgeon.NonFiniteGradientError as caught:
            error = {"step": caught.step, "rank": caught.rank, "text": str(caught)}
            break
        moved.append(not all(map(torch.equal, before, model.parameters())))
        after(step, model, optimizer, session)
    told = [event for event in session.events if event.rule or event.kind == "notice"]
    shared = [(name, param) for name, param in model.named_parameters() if name != ignored]
    found = {
        "plan": str(session.plan),
        "error": error,
        "moved": moved,
        "weights": {name: param.tolist() for name, param in shared},
        "told": [[event.kind, event.step, event.told_at] for event in told],
        "texts": [event.message for event in told],
        "found by": [event.diagnosis["rank"] for event in told if event.diagnosis],
    }
    session.remove()
    return found


def poison(step: int, model: nn.Module, *_: object) -> None:
    """Write a NaN to gradients of rank 1, after ranks have averaged them."""
    if step == FAULT and dist.get_rank() == 1:
        for grad in grads_of(model):
            grad.view(-1)[0] = math.nan


def assign(step: int, model: Any, *_: object) -> None:
    """Give a parameter that no pass reaches a gradient on rank 1 alone."""
    spare = model.spare
    spare.grad = torch.full_like(spare, math.nan if step == FAULT and dist.get_rank() else 1.0)


def repair(_: int, model: nn.Module, *__: object) -> None:
    for grad in grads_of(model):
        grad.nan_to_num_()


def grads_of(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def unfuse(step: int, _: object, optimizer: Any, *__: object) -> None:
    """Let the host decide on the faulty update, which the ranks did not expect in their votes."""
    if step == FAULT:
        optimizer.param_groups[0]["fused"] = None
        optimizer.param_groups[0]["foreach"] = False


def ask(_: int, __: object, ___: object, session: gradsurgeon.Session) -> None:
    """Let rank 0 read what the device has decided long before rank 1 does."""
    if dist.get_rank() == 0:
        session.status()


def pause(step: int, _: object, __: object, session: gradsurgeon.Session) -> None:
    """Let rank 0 pause, so that it makes the update that rank 1 leaves out."""
    if dist.get_rank() == 0 and step == FAULT - 1:
        session.pause()


def compress(called: Any) -> None:
    called.register_comm_hook(None, default_hooks.fp16_compress_hook)


def reads() -> Json:
    """Count how often traps look at gradients after a pass, and how often ranks read votes, in healthy steps."""
    counts = {"looks": 0, "votes": 0}
    look, read = Traps._objections_to, Voter.decision

    def looked(self: Any, *args: Any) -> Any:
        counts["looks"] += 1
        return look(self, *args)

    def asked(self: Any, number: int) -> Any:
        counts["votes"] += 1
        return read(self, number)

    with patch.object(Traps, "_objections_to", looked), patch.object(Voter, "decision", asked):
        outcome(faulty=())
    return counts


def main() -> Json:
    logging.getLogger("gradsurgeon").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    first, last = map(int, sys.argv[2:4]) if sys.argv[2:] else (0, 12)
    with decided_on_the_cpu():
        found: Json = {"random": compared(range(first, last))}
        if first:
            return found
        for then in ("skip-step", "raise"):
            rule = {**SKIPS, "then": then}
            found[f"one rank, {then}"] = outcome(rule)
            found[f"both ranks, {then}"] = outcome(rule, faulty=(0, 1))
            # Rank 1 stops in the last step.
            found[f"written, {then}"] = outcome(rule, faulty=(), change=poison, last=FAULT + 2)
        found["assigned"] = outcome(
            faulty=(), change=assign, last=FAULT + 1, spare=True, find_unused_parameters=True
        )
        found["repaired"] = outcome(change=repair)
        found["accumulated"] = outcome(pieces=3)
        found["asked"] = outcome(after=ask)
        found["unfused"] = outcome(change=unfuse)
        found["ignored"] = outcome(ignored="2.bias")
        found["excluded"] = outcome({**SKIPS, "exclude": "2.bias"}, ignored="2.bias")
        found["hook"] = outcome(prepare=compress)
        found["unused"] = outcome(find_unused_parameters=True)
        found["views"] = outcome(gradient_as_bucket_view=True, static_graph=True)
        found["reads"] = reads()
        optimizer_watch.LIMIT = 0.5  # type: ignore[attr-defined]
        found["paused"] = outcome(after=pause, last=FAULT + 2)
        # The store of the job is on the first rank.
        dist.barrier()
        return found


if __name__ == "__main__":
    work(main)
