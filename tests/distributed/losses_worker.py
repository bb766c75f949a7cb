"""Combines the losses of several ranks in every set-up; each rank writes down what it got."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Json
from several_losses import Checkpointed, Heads, applied, flat_grads, rules, trunk_of, two
from small import attach, equal, fields_of, refusal, sgd, weights_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon
from gradsurgeon import GradSurgeonError
from gradsurgeon.actions._methods import Weigher

STEPS, WORLD = 3, 2
# Of two gradients PCGrad gives the same in either order; of six the order that is drawn counts.
DRAWN, SIX = "pcgrad of six", ("seg", "depth", "a", "b", "c", "d")
METHODS = ("upgrad", "pcgrad", "mgda", "imtl-g", "aligned-mtl", DRAWN)
SETUPS: dict[str, Json] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "no_sync": {},
}
# Each method under plain DDP, and one of them in the other set-ups: no method knows what wraps the model.
RUNS = [
    *((method, "plain") for method in METHODS),
    *(("upgrad", setup) for setup in SETUPS if setup != "plain"),
]
FEATURES = ("plain", "bucket views", "static graph", "unused", "FSDP2")
SHARDED = ("FSDP2", "FSDP1", "tensor parallel")


def data(step: int) -> Tensor:
    """Return the whole batch of a step, the same on every rank."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def make() -> Heads:
    """Return the model with the same weights each time."""
    torch.manual_seed(0)
    return Heads().double()


def six(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    outputs = torch.cat(model(x), dim=1)
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(len(SIX), 5, generator=generator, dtype=torch.float64)
    return dict(zip(SIX, (outputs @ directions.T).mean(0), strict=True))


def run(method: str, setup: str, *, ranks: int) -> Json:
    """Train under one method, and return the end and what was recorded."""
    model = make()
    called: Any = model
    combine: Json = {"action": "combine", "method": method}
    losses_of = two
    if method == DRAWN:
        combine.update(method="pcgrad", losses=SIX)
        losses_of = six
    session = applied(model, combine, {"action": "conflict"})
    if ranks > 1:
        called = DistributedDataParallel(model, **SETUPS[setup])
    optimizer = sgd(model)
    # What a rank draws by itself must make no difference.
    torch.manual_seed(dist.get_rank() + 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = micro_batches(data(step), 2 if setup == "no_sync" else 1, ranks)
        for number, (part, share) in enumerate(parts):
            quiet = ranks > 1 and number < len(parts) - 1
            with called.no_sync() if quiet else contextlib.nullcontext():
                losses = {name: loss * share for name, loss in losses_of(called, part).items()}
                gradsurgeon.backward(losses)
        optimizer.step()
    found = {
        "weights": [param.detach().flatten().tolist() for param in model.parameters()],
        "cosines": session.history("seg/depth", "cosine"),
        "weight": session.history("seg", "weight"),
    }
    session.remove()
    return found


def micro_batches(batch: Tensor, count: int, ranks: int) -> list[tuple[Tensor, float]]:
    """Return the micro-batches of this rank, each with its share of the loss.

    Of several only the last one is averaged over ranks, and weighed by all of them: to one process the others are
    passes by themselves.
    """
    *alone, last = batch.chunk(count)
    parts = [part for whole in alone for part in whole.chunk(WORLD)]
    share = 1.0 / count / WORLD
    if ranks > 1:
        parts, share = parts[dist.get_rank() :: WORLD], 1.0 / count
    final = last.chunk(ranks)[dist.get_rank() % ranks]
    return [*((part, share) for part in parts), (final, 1.0 / count)]


def nan() -> Json:
    """Let a loss of one rank be NaN: all of them must see it, and leave the weights alone."""
    model = make()
    before = weights_of(model)
    called = DistributedDataParallel(model)
    file = rules({"action": "combine", "method": "pcgrad"})
    file["rules"].append({"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"})
    optimizer = sgd(model)
    session = gradsurgeon.apply(model, file)
    losses = two(called, data(0).chunk(2)[dist.get_rank()])
    if dist.get_rank() == 1:
        losses["seg"] = losses["seg"] * float("nan")
    gradsurgeon.backward(losses)
    optimizer.step()
    return {
        "unmoved": equal(before, model.parameters()),
        "said": fields_of(session, "message", rule="combine"),
    }


def refused(kind: str) -> str:
    """Combine on parameters that are sharded, and return what is said."""
    model = make().float()
    called: nn.Module = model
    if kind == "FSDP2":
        fully_shard(model)
    elif kind == "FSDP1":
        called = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"trunk.0": ColwiseParallel()})
    return refusal(lambda: applied(called, {"action": "combine", "method": "mgda"}))


def late() -> str:
    """Shard after the rules are on."""
    model = make().float()
    session = applied(model, {"action": "combine", "method": "mgda"})
    fully_shard(model)
    said = refusal(lambda: gradsurgeon.backward(two(model, data(0).float())))
    session.remove()
    return said


ON_HEADS = {"modules": ["seg", "depth"], "tensor": "input.grad"}


def on_features(setup: str) -> Json:
    """Combine what the heads send back to their features, each rank by itself; return what all of them got."""
    model = make()
    rule = {"id": "heads", "action": "combine", "method": "mgda", **ON_HEADS}
    session = attach(model, rule)
    called: Any = model
    if setup == "FSDP2":
        fully_shard(model.trunk)
        fully_shard(model)
    elif setup == "alone":
        pass
    else:
        called = DistributedDataParallel(model, **SETUPS[setup])
    part = data(0).chunk(2)[dist.get_rank()]
    seg, depth = called(part)
    (seg.square().mean() * 5 - depth[:, :1].sum()).backward()
    grads: list[Any] = [p.grad for p in trunk_of(model)]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
    return {
        "grads": [grad.flatten().tolist() for grad in whole],
        "changed": session.status()["heads"].changed,
    }


def heads_sharded_later(what: Sequence[str]) -> Json:
    """Shard parts after a rule is on what heads send back; return how often it has fired in three passes, and what is said."""
    model = make().float()
    rule = {"id": "heads", "action": "combine", "method": "mgda", **ON_HEADS}
    session = attach(model, rule)
    for part in what:
        fully_shard(model.get_submodule(part))
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        sum(two(model, data(step).float()).values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    fired = session.status()["heads"].fired
    session.remove()
    said = fields_of(session, "message", rule="heads")
    return {"fired": fired, "said": said}


UNLIKE_PASSES = ("paused", "plain", "another name", "on another model", "no_sync")


def unlike_pass(what: str) -> Json:
    """Let rank 1 do something else than rank 0 in one pass, and return what is refused and what fires."""
    model, apart = make(), make()
    called = DistributedDataParallel(model)
    session = applied(model, {"action": "combine", "method": "mgda"})
    refused, alone = [], dist.get_rank() == 1
    for step in range(3):
        model.zero_grad()
        part = data(step).chunk(2)[dist.get_rank()]
        if step == 1 and alone and what == "paused":
            session.pause()
        if step == 1 and alone and what == "on another model":
            sum(two(apart, part).values()).backward()  # type: ignore[union-attr]
        with called.no_sync() if what == "no_sync" else contextlib.nullcontext():
            losses = two(called, part)
            try:
                if step == 1 and alone and what in ("plain", "no_sync"):
                    sum(losses.values()).backward()  # type: ignore[union-attr]
                elif step == 1 and alone and what == "another name":
                    gradsurgeon.backward({"seg": losses["seg"], "deep": losses["depth"]})
                else:
                    gradsurgeon.backward(losses)
            except GradSurgeonError as error:
                refused.append(str(error))
                break
        session.resume()
    return {"refused": refused, "fired": session.status()["combine"].fired}


def failing_on_one() -> Json:
    """Let the solver fail on rank 0 in one step, and on rank 1 in the next one: all do as rank 0 does."""
    model, plain = make(), make()
    called, other = DistributedDataParallel(model), DistributedDataParallel(plain)
    applied(model, {"action": "combine", "method": "mgda"})
    weigh, same, grads = Weigher.__call__, [], []

    def fail(weigher: Weigher, products: Tensor) -> Tensor:
        if dist.get_rank() == step:
            raise ValueError("it failed")
        return weigh(weigher, products)

    for step in range(3):
        model.zero_grad()
        plain.zero_grad()
        part = data(step).chunk(2)[dist.get_rank()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Weigher, "__call__", fail)
            gradsurgeon.backward(two(called, part))
        sum(two(other, part).values()).backward()  # type: ignore[union-attr]
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        same.append(all(torch.equal(a.grad, b.grad) for a, b in pairs))  # type: ignore[arg-type]
        grads += flat_grads(trunk_of(model)).tolist()
    return {"same": same, "grads": grads}


def reentrant() -> str:
    """Return how a trunk is refused if single losses run through a part of its graph only."""
    trunk = nn.Sequential(Checkpointed(reentrant=True), nn.Linear(8, 8))
    model = Heads(trunk).double()
    applied(model, {"action": "combine", "method": "mgda"})
    called = DistributedDataParallel(model)
    losses = two(called, data(0).chunk(2)[dist.get_rank()])
    return refusal(lambda: gradsurgeon.backward(losses))


def main() -> Json:
    warnings.simplefilter("ignore")
    found: Json = {}
    for method in METHODS:
        found[f"{method}, one process"] = run(method, "plain", ranks=1)
    found["upgrad, one process, no_sync"] = run("upgrad", "no_sync", ranks=1)
    for method, setup in RUNS:
        found[f"{method}, {setup}"] = run(method, setup, ranks=2)
    found["nan"] = nan()
    found["refused"] = {kind: refused(kind) for kind in SHARDED}
    found["late"] = late()
    found["heads sharded later"] = heads_sharded_later(["seg", "depth", ""])
    found["trunk sharded later"] = heads_sharded_later(["trunk", ""])
    found["unlike passes"] = {what: unlike_pass(what) for what in UNLIKE_PASSES}
    found["reentrant"] = reentrant()
    found["failing on one"] = failing_on_one()
    found["on features"] = {kind: on_features(kind) for kind in ("alone", *FEATURES)}
    return found


if __name__ == "__main__":
    work(main)
