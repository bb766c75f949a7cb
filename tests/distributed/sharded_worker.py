"""What rules see and do on sharded models; each rank writes down the answers to the tests."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import Block, data, divide, make, mine, shard, whole
from ranks import Json
from small import attach, fields_of, fired, messages, rules_of_workers, sgd, steps_of, take_step
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon
from gradsurgeon import GradSurgeonWarning
from gradsurgeon.records import shared_rows
from gradsurgeon.tensors.statistics import columns_of

STATS = ["l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"]
LOG = {"id": "log", "action": "norm-log", "params": "*", "stats": STATS}


def rules(*given: Json) -> Json:
    """Return a rule set."""
    return {"version": 1, "rules": list(given)}


def steps(model: Any, batch: Callable[[int], Tensor], count: int = 3) -> torch.optim.Optimizer:
    """Train for some steps."""
    optimizer = sgd(model)
    for step in range(count):
        take_step(optimizer, model(batch(step)).square().mean())
    return optimizer


def whole_and_sharded() -> list[tuple[str, Any, Callable[[int], Tensor]]]:
    """Return a whole model and a sharded one by their names, each with what it is given."""
    return [("whole", make(), data), ("sharded", shard(make()), mine)]


def columns(stats: Sequence[str]) -> list[str]:
    """Return the numbers of statistics in records."""
    return list(chain.from_iterable(map(columns_of, stats)))


def told(session: gradsurgeon.Session, stats: Sequence[str] = tuple(STATS)) -> Json:
    """Return the statistics of all parameters."""
    names = [param.name for param in session.plan.manifest.params]
    return {
        f"{name} {stat}": [value for _, value in session.history(name, stat)]
        for name in names
        for stat in stats
    }


def error(call: Callable[[], object]) -> Json:
    """Return the error of a call."""
    try:
        call()
    except gradsurgeon.GradSurgeonError as caught:
        found: Json = {"kind": type(caught).__name__, "text": str(caught)}
        if isinstance(caught, gradsurgeon.NonFiniteGradientError):
            found |= {"rank": caught.rank, "name": caught.name, "step": caught.step}
        return found
    return {"kind": "", "text": ""}


def statistics() -> Json:
    """Record every statistic of a whole and of a sharded model: gradients at two points, weights and updates."""
    found: Json = {}
    of_update = [*STATS, "ratio", "moved"]
    cases: dict[str, Json] = {
        "accumulated": {"at": "accumulated"},
        "step": {"at": "step"},
        "value": {"tensor": "value"},
        "update": {"tensor": "update", "stats": of_update},
        "projection": {"tensor": "value", "stats": ["projection", "numel"]},
        "histogram": {"at": "accumulated", "stats": ["histogram"]},
    }
    for case, options in cases.items():
        log = LOG | options
        for kind, model, batch in whole_and_sharded():
            with gradsurgeon.apply(model, rules(log)) as session:
                steps(model, batch)
                found[f"{kind} {case}"] = told(session, columns(log["stats"]))
    return found


def together() -> Json:
    """Record numbers of all gradients together, of a whole and of a sharded model."""
    stats = ["l1", "l2", "linf", "min", "max", "zeros", "nonfinite"]
    found: Json = {}
    for case, model, batch in whole_and_sharded():
        with gradsurgeon.apply(model, rules({**LOG, "stats": stats, "per": "rule"})) as session:
            steps(model, batch)
            found[case] = {stat: session.history("log", stat) for stat in stats}
    return found


def edited_weights() -> Json:
    """Edit weights and updates of a whole and of a sharded model; return the weights at the end."""
    found: Json = {}
    for case, model, batch in whole_and_sharded():
        with attach(model, *rules_of_workers("edits")):
            steps(model, batch)
        found[case] = {name: whole(param) for name, param in model.named_parameters()}
    return found


def recorded() -> Json:
    """Record a sharded model in a run directory, and ask for a record on one rank alone."""
    places = [tempfile.mkdtemp()]
    dist.broadcast_object_list(places)
    place = Path(places[0]) / "run"
    session = gradsurgeon.apply(model := shard(make()), rules(LOG), record=place)
    steps(model, data)
    found: Json = {}
    shared_rows.LIMIT, usual = 0.5, shared_rows.LIMIT
    if dist.get_rank() == 0:
        found["alone"] = error(lambda: session.latest("0.weight"))
    dist.barrier()
    shared_rows.LIMIT = usual
    session.remove()
    found["after"] = error(lambda: session.latest("0.weight"))
    dist.barrier()
    with gradsurgeon.open_run(place) as run:
        found["ranks"] = {
            name: [one.rank for one in run.series(name, "l2")] for name in ("0.weight", "2.bias")
        }
        found["run"] = {
            f"{name} {stat}": [value for _, value in run.history(name, stat)]
            for name in run.params
            for stat in STATS
        }
    return found


def captured() -> Json:
    """Capture gradients of a whole and of a sharded model."""
    found = {}
    for point in ("accumulated", "step"):
        for kind, model, batch in whole_and_sharded():
            keep = {"id": "keep", "action": "capture", "params": "*", "at": point}
            with gradsurgeon.apply(model, rules(keep)) as session:
                steps(model, batch, 1)
                kept = session.captured("keep")
                found[f"{kind} {point}"] = {name: whole(t) for (name, _, _), t in kept.items()}
    return found


def mixed_precision() -> Json:
    """Clip with parameters and reduction in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = shard(make(), mp_policy=policy)
    clip = {"id": "clip", "action": "clip-norm", "params": "*", "max_norm": 0.01, "per": "rule"}
    with gradsurgeon.apply(model, rules(clip, {**LOG, "at": "step", "stats": ["l2"]})) as session:
        steps(model, mine, 2)
        names = [param.name for param in session.plan.manifest.params]
        norms = [session.latest(name) for name in names]
        return {
            "norm": sum(norm**2 for norm in norms) ** 0.5,
            "fired": session.status()["clip"].fired,
        }


def late() -> Json:
    """Apply before sharding."""
    trap = {"id": "trap", "action": "nan-trap", "params": "*"}
    zero = {"id": "zero", "action": "zero", "at": "step", "params": "0.*"}
    model = make()
    before = [whole(param) for param in model.parameters()]
    with gradsurgeon.apply(model, rules({**LOG, "stats": ["l2"]}, trap, zero)) as session:
        shard(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(model, mine)
        found: Json = {
            "warnings": [
                str(one.message)
                for one in caught
                if "gradsurgeon" in one.filename or issubclass(one.category, GradSurgeonWarning)
            ],
            "norms": session.history("0.weight"),
            "events": fields_of(session, "kind", "name"),
            "fired": fired(session),
        }
    after = [whole(param) for param in model.parameters()]
    found["moved"] = [one != other for one, other in zip(before, after, strict=True)]
    early = {"id": "early", "action": "clamp", "at": "backward", "params": "*", "max": 1.0}
    model = make()
    session = gradsurgeon.apply(model, rules(early))
    shard(model)
    found["refused"] = error(lambda: steps(model, mine))
    session.remove()
    found["lost"] = after_a_first_step()
    return found


def after_a_first_step() -> list[str]:
    """Shard once a step has gone by; return the warnings."""
    model = make()
    trap = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    with gradsurgeon.apply(model, rules(trap)):
        steps(model, mine, count=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            steps(shard(model), mine, count=1)
    return [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, GradSurgeonWarning)
    ]


def refused() -> Json:
    """Bind what cannot be honoured."""
    model = shard(make())
    by_action = {
        action: {"id": "early", "action": action, "at": "backward", "params": "*", **options}
        for action, options in (
            ("clamp", {"max": 1.0}),
            ("norm-log", {}),
            ("sanitize", {}),
        )
    }
    found = {
        name: error(partial(gradsurgeon.apply, model, rules(rule)))
        for name, rule in by_action.items()
    }
    flat = FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu"))
    found["FSDP1"] = error(lambda: gradsurgeon.apply(flat, rules(LOG)))
    module = {"id": "m", "action": "norm-log", "modules": "0", "tensor": "output"}
    found["FSDP1 modules"] = error(lambda: gradsurgeon.apply(flat, rules(module)))
    for original in (True, False):
        model = make()
        session = gradsurgeon.apply(model, rules(LOG))
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=original, device_id=torch.device("cpu")
        )
        found[f"FSDP1 later, {original}"] = error(partial(steps, wrapped, mine))
        session.remove()
    return found


def above_flat_parameters() -> list[str]:
    """Train a head on an encoder whose parameters are flat; return what checks of the head find."""
    encoder = FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu"))
    head = nn.Linear(1, 1)
    optimizer = sgd(head)
    with gradsurgeon.apply(head, "gradsurgeon:debug@1", optimizer=optimizer) as session:
        for step in range(25):
            take_step(optimizer, head(encoder(mine(step))).square().mean())
    return messages(session, "check")


def tensor_parallel() -> Json:
    """Compare rules on a divided block with rules on a whole one."""
    found: Json = {}
    for name, given in rules_of_workers("divided").items():
        stats = {"step": [*STATS, "projection"], "nothing": STATS}.get(name, [])
        for kind in ("whole", "divided"):
            model: Any = Block()
            if kind == "divided":
                model = divide(model)
            optimizer = sgd(model, 0.5)
            with attach(model, *given, optimizer=optimizer) as session:
                for step in range(3):
                    optimizer.zero_grad()
                    x = data(step).reshape(1, 8, 4)
                    if kind == "divided":
                        x = x.chunk(2, 1)[dist.get_rank()]
                    # Every rank has half of the sequence; the loss is the mean over all of it.
                    (model(x).square().sum() / 32).backward()
                    optimizer.step()
                found[f"{name} {kind}"] = {
                    "weights": [whole(param) for param in model.parameters()],
                    "told": told(session, columns(stats)) if stats else {},
                    "notices": fields_of(session, "rule", "message"),
                }
    model = divide(Block())
    clip = {"id": "c", "action": "clip-norm", "at": "backward", "params": "*", "max_norm": 1.0}
    found["refused"] = error(lambda: gradsurgeon.apply(model, rules(clip)))
    bound = {"id": "b", "action": "clamp", "at": "backward", "params": "norm.*", "max": 1.0}
    with gradsurgeon.apply(model, rules(bound)):
        x = data(0).reshape(1, 8, 4).chunk(2, 1)[dist.get_rank()]
        found["pending"] = error(lambda: model(x).sum().backward())
    return found


def redundancy() -> Json:
    """Halve gradients under an optimizer that has another one inside."""
    half = {"id": "half", "action": "scale", "at": "step", "params": "*", "factor": 0.5}
    early = {"id": "early", "action": "clamp", "at": "backward", "params": "0.*", "max": 0.02}
    out = {"id": "out", "action": "scale", "modules": "0", "tensor": "output.grad", "factor": 0.5}
    # Importing it warns, so that whoever only wants a name from this file must not.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found: Json = {}
    for kind in ("named", "found", "without", "plain"):
        model = DistributedDataParallel(make())
        optimizer: Any = sgd(model, 0.5)
        if kind != "plain":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
        session = None
        if kind != "without":
            given = optimizer if kind == "named" else None
            session = gradsurgeon.apply(model, rules(half, early, out, LOG), optimizer=given)
        for step in range(3):
            take_step(optimizer, model(mine(step)).square().mean())
        found[kind] = {"weights": [whole(param) for param in model.parameters()]}
        if session is not None:
            found[kind] |= {"step": session.step, "fired": session.status()["half"].fired}
            found[kind]["logged"] = steps_of(session, "0.weight")
            session.remove()
    return found


def main() -> Json:
    """Run every part."""
    parts = (
        statistics,
        together,
        edited_weights,
        recorded,
        captured,
        mixed_precision,
        late,
        refused,
        above_flat_parameters,
        tensor_parallel,
        redundancy,
    )
    return {part.__name__: part() for part in parts}


if __name__ == "__main__":
    work(main)
