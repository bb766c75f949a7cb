"""Scripts that make it hard for ranks to find each other's votes; each rank writes down what came of it."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Json
from small import fields_of, kinds_of, linears, rule_file, sgd, take_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worker import work

import gradsurgeon
from gradsurgeon.tensors import _channel

NAN = float("nan")


def trap(**options: Any) -> Json:
    """Return a rule set with one trap."""
    rule = {"id": "trap", "action": "nan-trap", "params": "*", "then": "skip-step"}
    return rule_file({**rule, "forensics": False, **options})


class Script:
    """A model under DDP, with a parameter that each rank keeps to itself, and what came of training it."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.net: Any = linears(4, 4, 4)
        self.net[0].own = nn.Parameter(torch.ones(4))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.net, ["0.own"])
        self.ddp = DistributedDataParallel(self.net)
        self.optimizer = sgd(self.net)
        self.apply(**options)
        self.moved: list[bool] = []
        self.error = ""

    def apply(self, *, replace: bool = False, **options: Any) -> None:
        """Put the trap on."""
        rules = trap(**options)
        self.session = gradsurgeon.apply(self.net, rules, optimizer=self.optimizer, replace=replace)

    def local(self, *, faulty: bool) -> None:
        """Run a pass; if ``faulty``, only the gradient of the parameter of this rank becomes NaN in it."""
        handle = self.net[0].own.register_hook(lambda grad: grad * NAN if faulty else grad)
        (self.ddp(torch.ones(2, 4)) * self.net[0].own).sum().backward()
        handle.remove()

    def update(self) -> None:
        """Make an update."""
        before = self.weights()
        try:
            self.optimizer.step()
        except gradsurgeon.NonFiniteGradientError as error:
            self.error = self.error or str(error)
        self.moved.append(self.weights() != before)
        self.optimizer.zero_grad()

    def weights(self) -> list[float]:
        """Return the weights that all ranks share."""
        return [float(one) for one in self.net[1].weight.detach().flatten()]

    def told(self) -> Json:
        """Return what came of it."""
        events = fields_of(self.session, "kind", "step", "message")
        self.session.remove()
        return {"moved": self.moved, "error": self.error, "events": events}


def restarted() -> Json:
    """Train, and train anew as an agent starts ranks again: in new processes, with the old store."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    first = Script()
    for _ in range(2):
        first.local(faulty=False)
        first.update()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    _channel._sessions.clear()
    again = Script()
    for step in range(3):
        again.local(faulty=step == 1 and dist.get_rank() == 1)
        again.update()
    first.session.remove()
    return again.told()


def experts() -> Json:
    """Train a trunk that all ranks share, and experts of single ranks that are not used in each step."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    net = nn.ModuleDict({"trunk": layer, "expert": nn.Linear(4, 4)})
    trunk = DistributedDataParallel(layer)
    expert = DistributedDataParallel(net["expert"], process_group=groups[rank])
    optimizer = sgd(net)
    moved = []
    with gradsurgeon.apply(net, trap(), optimizer=optimizer) as session:
        for step in range(4):
            hidden: Tensor = trunk(torch.ones(2, 4))
            out: Tensor = expert(hidden) if (step + rank) % 2 else hidden
            (out * (NAN if step == 2 and rank == 1 else 1.0)).sum().backward()
            before = layer.weight.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
            moved.append(not torch.equal(before, layer.weight))
        events = fields_of(session, "kind", "step", "message")
    return {"moved": moved, "error": "", "events": events}


def replaced_between() -> Json:
    """Exchange the session between a backward pass and its update, with a NaN that rank 1 alone has."""
    script = Script()
    script.local(faulty=False)
    script.update()
    script.local(faulty=dist.get_rank() == 1)
    script.apply(replace=True)
    script.update()
    return script.told()


def giving_up() -> Json:
    """Let one rank trip after the other, each once or twice."""
    script = Script(give_up_after=3)
    for step in range(4):
        script.local(faulty=step > 0 and dist.get_rank() == step % 2)
        script.update()
    return script.told()


def accumulated() -> Json:
    """Average in each of three micro-batches; rank 1 has a NaN in the first."""
    script = Script()
    for batch in range(3):
        x = torch.ones(2, 4) * (NAN if batch == 0 and dist.get_rank() == 1 else 1.0)
        script.ddp(x).sum().backward()
    script.update()
    return script.told()


def repaired() -> Json:
    """Let rank 1 repair its own gradient after the ranks have voted."""
    script = Script()
    script.local(faulty=dist.get_rank() == 1)
    script.net[0].own.grad.zero_()
    script.update()
    return script.told()


def missed_meeting() -> Json:
    """Let a trap with forensics trip twice; rank 1 leaves out the update of the first trip."""
    script = Script(forensics=True)
    began = time.monotonic()
    for step in range(3):
        script.local(faulty=step > 0 and dist.get_rank() == 0)
        if step == 1 and dist.get_rank() == 1:
            script.optimizer.zero_grad()
            continue
        script.update()
    return {**script.told(), "took": time.monotonic() - began}


def in_another_order() -> Json:
    """Train two models by one loss; the ranks put the rules on in different orders."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 4), nn.Linear(4, 3)]
    ddps = [DistributedDataParallel(net) for net in nets]
    optimizers = [sgd(net) for net in nets]
    sessions = {
        place: gradsurgeon.apply(nets[place], trap(), optimizer=optimizers[place])
        for place in ((0, 1) if dist.get_rank() else (1, 0))
    }
    began = time.monotonic()
    for _ in range(2):
        sum((ddp(torch.ones(2, 4)).sum() for ddp in ddps), torch.zeros(())).backward()
        for optimizer in optimizers:
            optimizer.step()
    took = time.monotonic() - began
    events = [event.kind for session in sessions.values() for event in session.events]
    for session in sessions.values():
        session.remove()
    return {"events": events, "took": took}


def beside_a_thread() -> Json:
    """Leave a branch that has rules out on rank 1, while another thread runs backward passes."""
    torch.manual_seed(0)
    trunk, branch = nn.Linear(4, 4), nn.Linear(4, 4)
    net = nn.ModuleDict({"trunk": trunk, "branch": branch})

    def forward(both: bool) -> Tensor:  # as DDP hands it on
        hidden: Tensor = trunk(torch.ones(2, 4))
        return hidden + branch(hidden) if both else hidden

    net.forward = forward
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = sgd(net)
    session = gradsurgeon.apply(branch, trap(), optimizer=optimizer)
    # A thread that has run a pass counts from then on.
    other = threading.Thread(target=lambda: nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward())
    other.start()
    other.join()
    began = time.monotonic()
    for step in range(4):
        take_step(optimizer, ddp(dist.get_rank() == 0 or step % 2 == 0).sum())
    took = time.monotonic() - began
    events = kinds_of(session)
    session.remove()
    return {"events": events, "took": took}


PARTS: tuple[Callable[[], Any], ...] = (
    experts,
    replaced_between,
    giving_up,
    accumulated,
    repaired,
    in_another_order,
    beside_a_thread,
)
# Ranks wait ten seconds for one that does not come.
WAITING: tuple[Callable[[], Any], ...] = (restarted, missed_meeting)


def main() -> Json:
    """Run the parts in which ranks wait in vain, or all others."""
    warnings.simplefilter("ignore")
    parts = WAITING if sys.argv[2:] == ["waiting"] else PARTS
    return {part.__name__: part() for part in parts}


if __name__ == "__main__":
    work(main)
