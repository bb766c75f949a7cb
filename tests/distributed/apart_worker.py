"""Ranks that differ: in their rules, in what they pause, in what became of a gradient on one of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from distributed.batches import whole
from distributed.patterns import Net
from ranks import Json
from small import fields_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon
from gradsurgeon.distributed import session_discovery
from gradsurgeon.tensors import _job_store

STEPS = 5
FAULT = 2
NAN = float("nan")


def trap(then: str = "skip-step", **options: Any) -> Json:
    """Return a trap on all parameters."""
    return {"id": "trap", "action": "nan-trap", "params": "*", "then": then, **options}


BOUND = {"id": "bound", "action": "clamp", "params": "*", "at": "step", "min": -0.01, "max": 0.01}
CLIP = {"id": "clip", "action": "clip-norm", "params": "*", "max_norm": 1.0, "per": "rule"}
EARLY = {"id": "early", "action": "scale", "params": "*", "factor": 0.5}
NORMS = {"id": "norms", "action": "norm-log", "params": "*"}


def rank() -> int:
    """Return the number of this process."""
    return dist.get_rank()


def data(step: int) -> Tensor:
    """Return this rank's part of a batch."""
    whole = torch.randn(4 * dist.get_world_size(), 4, generator=torch.Generator().manual_seed(step))
    return whole.chunk(dist.get_world_size())[rank()]


def averaged(net: Net, *, but: tuple[str, ...] = (), **options: Any) -> DistributedDataParallel:
    """Return a model under DDP that leaves some parameters alone."""
    named = list(but)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, named)
    return DistributedDataParallel(net, **options)


def values(net: nn.Module, *but: str) -> list[list[float]]:
    """Return the weights."""
    return [whole(param) for name, param in net.named_parameters() if name not in but]


class Run:
    """Trains one model, and keeps what came of it.

    Args:
        net: what the optimizer updates.
        called: what the script calls.
        kind: of optimizer.
    """

    def __init__(
        self, net: nn.Module, called: nn.Module | None = None, kind: Any = torch.optim.AdamW
    ) -> None:
        self.net = net
        self.called = called or net
        self.optimizer = kind(net.parameters(), lr=0.05)
        self.session: gradsurgeon.Session | None = None
        self.said: list[str] = []
        self.error: str | None = None
        self.weights: list[Any] = []

    def apply(self, *rules: Json, **options: Any) -> None:
        """Put rules on."""
        given = {"version": 1, "rules": list(rules)}
        with self.listening():
            self.session = gradsurgeon.apply(self.net, given, optimizer=self.optimizer, **options)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Keep warnings, and an error that would end the script: go on without rules."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                yield
            except gradsurgeon.GradSurgeonError as error:
                self.error = self.error or str(error)
                if self.session is not None:
                    self.session.remove()
        self.said += [
            str(one.message)
            for one in seen
            if issubclass(one.category, gradsurgeon.GradSurgeonWarning)
        ]

    def step(
        self, number: int, spoil: Callable[[], None] | None = None, *, late: bool = False
    ) -> None:
        """Take one step, with a fault in step ``FAULT`` as soon as the gradient is there.

        ``late``: between backward and update.
        """
        with self.listening(), spoiling(self.net, None if late or number != FAULT else spoil):
            self.optimizer.zero_grad()
            self.called(data(number)).square().mean().backward()
        if late and spoil is not None and number == FAULT:
            spoil()
        with self.listening():
            self.optimizer.step()
        self.weights.append(values(self.net, "part.own"))

    def all(self, spoil: Callable[[], None] | None = None, *, late: bool = False) -> Json:
        """Take all steps, and tell of them."""
        for number in range(STEPS):
            self.step(number, spoil, late=late)
        return self.told()

    def told(self) -> Json:
        """Return what came of it."""
        events = []
        if self.session is not None:
            events = fields_of(self.session, "kind", "step", "name", "message")
            with self.listening():
                self.session.remove()
        return {
            "weights": self.weights,
            "said": self.said,
            "error": self.error,
            "events": events,
            "clock": None if self.session is None else self.session.step,
        }


def spoiled(net: Net, on: int, name: str = "part.own") -> Callable[[], None]:
    """Return what makes one gradient NaN on one rank; of a sharded one, the part that lies there."""

    def spoil() -> None:
        if rank() == on:
            grad = net.get_parameter(name).grad
            if grad is None:  # it has yet to come
                return
            (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(NAN)

    return spoil


@contextmanager
def spoiling(net: nn.Module, spoil: Callable[[], None] | None) -> Iterator[None]:
    """Call a function when the last gradient of a pass has been accumulated, and before DDP hands its averages over."""
    with ExitStack() as stack:
        if spoil is not None:
            for param in net.parameters():
                stack.callback(param.register_post_accumulate_grad_hook(lambda _: spoil()).remove)
        yield


def on_one_rank(*rules: Json) -> Json:
    """Train with rules on rank 0 alone."""
    net = Net()
    run = Run(net, averaged(net))
    if rank() == 0:
        run.apply(*rules)
    return run.all()


def plans_differ(*both: Json) -> Json:
    """Train with other rules on each rank."""
    net = Net()
    run = Run(net, averaged(net))
    run.apply(both[rank()])
    return run.all()


def ignored(then: str, *, on: int, mode: str = "act") -> Json:
    """Spoil a parameter that DDP was told to leave alone."""
    net = Net()
    run = Run(net, averaged(net, but=("part.own",)))
    run.apply(trap(then), mode=mode)
    return run.all(spoiled(net, on))


def hooked() -> Json:
    """Train under a communication hook that does not reduce; rank 1 spoils what it hands over."""
    net = Net()
    called = averaged(net)

    def hook(_state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        buffer = bucket.buffer()
        if rank() == 1 and net.number == FAULT:
            buffer.fill_(NAN)
        future.set_result(buffer)
        return future

    hook.__annotations__.clear()  # torch compares them with types, and here they are texts
    called.register_comm_hook(None, hook)
    run = Run(net, called)
    run.apply(trap())
    for number in range(STEPS):
        net.number = number  # type: ignore[assignment]
        run.step(number)
    return run.told()


def edited(then: str, **options: Any) -> Json:
    """Spoil a reduced gradient by the script on rank 1."""
    net = Net()
    run = Run(net, averaged(net, **options))
    run.apply(trap(then))
    return run.all(spoiled(net, 1, "last.bias"), late=True)


def paused(*rules: Json, sharded: bool = False, faulty: int | None = None) -> Json:
    """Pause rank 1 in steps 1 to 3; another rank trips meanwhile."""
    net = Net()
    if sharded:
        fully_shard(net)
    run = Run(net, net if sharded else averaged(net, but=("part.own",)))
    run.apply(trap(), NORMS, *rules)
    assert run.session is not None
    for number in range(STEPS):
        if rank() == 1:
            run.session.pause() if 1 <= number <= 3 else run.session.resume()
        run.step(number, None if faulty is None else spoiled(net, faulty))
    norms = run.error or run.session.history("first.weight", rule="norms")
    return {**run.told(), "norms": norms}


def alone() -> Json:
    """Train without DDP, though the processes know each other; rank 1 spoils a gradient of its own."""
    net = Net()
    run = Run(net)
    run.apply(trap())
    return run.all(spoiled(net, 1, "last.bias"))


def later() -> Json:
    """Rank 1 comes with its rules after two steps."""
    net = Net()
    run = Run(net, averaged(net))
    if rank() == 0:
        run.apply(trap("raise"))
    for number in range(STEPS):
        if number == 2 and rank() == 1:
            run.apply(trap("raise"), start_step=2)
        run.step(number)
    return run.told()


def sharded_on_one_rank(*rules: Json) -> Json:
    """Shard a model, and put rules on rank 0 alone."""
    net = Net()
    fully_shard(net)
    run = Run(net)
    if rank() == 0:
        run.apply(*rules)
    return run.all()


def scaled() -> Json:
    """Train under a scaler; rank 1 has an infinity that its scaler alone sees."""
    net = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run = Run(net, averaged(net, but=("part.own",)))
    run.apply(trap(), scaler=scaler)
    for number in range(STEPS):
        run.optimizer.zero_grad()
        with spoiling(net, spoiled(net, 1) if number == FAULT else None):
            scaler.scale(run.called(data(number)).square().mean()).backward()
        with run.listening():
            scaler.step(run.optimizer)
        scaler.update()
        run.weights.append(values(net, "part.own"))
    return run.told()


def kept_keys() -> list[str]:
    """Return our keys in the store of the job."""
    store: Any = _job_store.store()
    # Older releases of torch cannot list keys.
    keys = store.list_keys() if hasattr(store, "list_keys") else []
    return [key[key.index("gradsurgeon") :] for key in keys if "gradsurgeon" in key]


def main() -> Json:
    """Run every part."""
    found: Json = {}
    # Nobody comes, however long a rank waits.
    session_discovery.LIMIT = 0.5
    for name, rule in {
        "raise": trap("raise"),
        "skip-step": trap(),
        "warn": trap("warn"),
        "bound": BOUND,
        "early": EARLY,
        "norms": NORMS,
    }.items():
        found[f"one rank, {name}"] = on_one_rank(rule)
    found["later"] = later()
    found["sharded on one"] = sharded_on_one_rank(NORMS)
    found["bounded on one"] = sharded_on_one_rank(CLIP)
    # Enough for two ranks that have just reduced a gradient together.
    session_discovery.LIMIT = 4.0
    found["plans, raise"] = plans_differ(trap("raise"), {**trap("raise"), "give_up_after": 3})
    found["plans, skip"] = plans_differ(trap(), trap("raise"))
    found["plans, records"] = plans_differ(NORMS, {**NORMS, "at": "step"})
    for then in ("skip-step", "raise", "warn"):
        found[f"ignored, {then}"] = ignored(then, on=1)
    found["ignored, first"] = ignored("skip-step", on=0)
    found["ignored, observed"] = ignored("skip-step", on=1, mode="observe")
    found["hooked"] = hooked()
    for then in ("skip-step", "raise", "warn"):
        found[f"edited, {then}"] = edited(then)
    for faulty in (None, 0):
        found[f"paused, {faulty}"] = paused(faulty=faulty)
        found[f"paused sharded, {faulty}"] = paused(sharded=True, faulty=faulty)
    late = {**NORMS, "id": "late", "at": "step"}
    found["paused records"] = paused(late, sharded=True)
    found["alone"] = alone()
    found["scaled"] = scaled()
    dist.barrier()
    found["keys"] = kept_keys()
    return found


if __name__ == "__main__":
    work(main)
