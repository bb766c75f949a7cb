"""Scripts that touch gradients in and around a step, under rules that hide gradients or by hand.

By hand nothing is hidden: the optimizer leaves out what the rules would hide from it, and all code of the script finds
each `.grad` as without rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models import data
from small import fields_of, tanh_net
from torch import Tensor

import gradsurgeon

NAN = float("nan")
FROZEN = "0."
# What a step may do before and after its update, and a hook after the step.
INSIDE = ("nothing", "clear", "zero", "clear by hand", "backward", "assign", "raise")
# What a script may do between two steps.
BETWEEN = (
    "nothing", "clear", "zero", "clear by hand", "clear the model", "backward", "assign", "halve",
    "step again", "step in a thread", "the other optimizer steps", "remove",
)  # fmt: skip


class Raised(Exception):  # noqa: N818 # as the script means it
    """A step of the script has raised."""


@dataclass(frozen=True)
class Iteration:
    """One pass and one step: what happens in the step before its update and after it, in a hook after the step, and then."""

    bad: bool = False
    before: str = "nothing"
    after: str = "nothing"
    in_hook: str = "nothing"
    between: tuple[str, ...] = ("clear",)


@dataclass(frozen=True)
class Script:
    """A training.

    Attributes:
        frozen: the steps in which the first layer is frozen.
        traps: whether a trap skips steps.
        drops: whether the optimizer drops each gradient that it has used.
        closure: whether the steps get a closure.
        derived: whether the optimizer calls the step of its base class.
    """

    iterations: tuple[Iteration, ...]
    frozen: range = range(0)
    traps: bool = False
    drops: bool = False
    closure: bool = False
    derived: bool = False


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, which does in its step what a script says, and leaves out what it is told by hand."""

    def __init__(self, params: Any, *, drops: bool = False) -> None:
        super().__init__(params, {"lr": 0.05, "steps": 0, "weight": torch.zeros(())})
        self.drops = drops
        self.act: Callable[[str], None] = lambda _: None
        self.inside = ("nothing", "nothing")
        self.left_out: set[Tensor] = set()
        self.skips = False
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.act(self.inside[0])
        with torch.no_grad():
            if not self.skips:
                self.count()
            self.update()
        self.act(self.inside[1])
        return loss

    def count(self) -> None:
        self.calls += 1
        state: Any = self.state
        state["all"]["steps"] = state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            group["steps"] += 1
            group["weight"] += 0.5

    def update(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not (self.skips or param in self.left_out):
                    state = self.state[param]
                    state["momentum"] = state.get("momentum", 0.0) * 0.9 + param.grad
                    param.sub_(group["lr"] * (state["momentum"] + 0.1 * param))
                if self.drops:
                    param.grad = None

    def counts(self) -> list[Any]:
        group, state = self.param_groups[0], dict[Any, Any](self.state)
        moments = sorted(key.shape for key in state if isinstance(key, Tensor))
        steps = state.get("all", {}).get("steps", 0)
        return [self.calls, steps, group["steps"], float(group["weight"]), moments]


class Derived(Momentum):
    """Calls the step of its base class, around which torch calls all hooks as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Training:
    """One run of a script; ``seen`` has the gradients that the script saw, by moment."""

    def __init__(self, script: Script, *, by_hand: bool) -> None:
        torch.manual_seed(0)
        self.script, self.by_hand = script, by_hand
        self.model = tanh_net(3, 2, 2)
        self.params: Mapping[str, Tensor] = dict(self.model.named_parameters())
        kind = Derived if script.derived else Momentum
        self.first: Momentum = kind(self.model.parameters(), drops=script.drops)
        # Once it is made, torch calls hooks around the step of its class.
        self.second = Momentum(self.model.parameters())
        self.first.act = self.act
        self.first.register_step_post_hook(lambda *_: self.act(self.in_hook))
        self.in_hook = "nothing"
        self.number, self.clock = 0, 0
        self.trips: list[int] = []
        self.seen: list[tuple[str, list[Tensor | None]]] = []
        self.session: gradsurgeon.Session | None = None
        if not by_hand:
            rules = {"version": 1, "rules": self.rules()}
            optimizers = [self.first, self.second]
            self.session = gradsurgeon.apply(self.model, rules, optimizer=optimizers)
        self.removed = False
        self.actions: Mapping[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "clear": lambda: self.first.zero_grad(set_to_none=True),
            "zero": lambda: self.first.zero_grad(set_to_none=False),
            "clear the model": self.model.zero_grad,
            "clear by hand": lambda: self.assign(None),
            "assign": lambda: self.assign(0.25),
            "halve": self.halve,
            "backward": self.backward,
            "raise": self.fail,
            "step again": lambda: self.step(self.first),
            "step in a thread": self.step_in_a_thread,
            "the other optimizer steps": lambda: self.step(self.second),
            "remove": self.remove,
        }

    def rules(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"id": "norms", "action": "norm-log", "params": "*"}]
        if frozen := self.script.frozen:
            steps = {"from": frozen.start, "to": frozen.stop}
            freeze = {"id": "frozen", "action": "freeze", "params": f"{FROZEN}*", "steps": steps}
            found.append(freeze)
        if self.script.traps:
            options = {"then": "skip-step", "give_up_after": "never", "forensics": False}
            found.append({"id": "trap", "action": "nan-trap", "params": "*", **options})
        return found

    def run(self) -> Training:
        for number, iteration in enumerate(self.script.iterations):
            self.number = number
            if not self.script.closure:
                self.backward(bad=iteration.bad)
            self.first.inside, self.in_hook = (iteration.before, iteration.after), iteration.in_hook
            self.step(self.first, bad=iteration.bad)
            self.first.inside, self.in_hook = ("nothing", "nothing"), "nothing"
            for action in iteration.between:
                self.act(action)
                self.look(action)
        if self.session is not None:
            self.clock = self.session.step
            self.trips = fields_of(self.session, "step", kind="trap")
            self.session.remove()
        self.look("at the end")
        return self

    def step(self, optimizer: Momentum, *, bad: bool = False) -> None:
        def closure() -> float:
            self.backward(bad=bad)
            self.decide(optimizer)
            return 0.0

        try:
            if self.script.closure and optimizer is self.first:
                optimizer.step(closure)
            else:
                self.decide(optimizer)
                optimizer.step()
        except Raised:
            self.look("raised")
        optimizer.left_out, optimizer.skips = set(), False
        self.look("stepped")

    def decide(self, optimizer: Momentum) -> None:
        """Decide by hand what an optimizer leaves out, and count the step."""
        if self.removed or not self.by_hand:
            return
        grads = [param.grad for param in self.params.values() if param.grad is not None]
        if self.script.traps and not all(grad.isfinite().all() for grad in grads):
            optimizer.skips = True
            self.trips.append(self.clock)
        elif self.clock in self.script.frozen:
            named = self.params.items()
            optimizer.left_out = {param for name, param in named if name.startswith(FROZEN)}
        self.clock += 1

    def look(self, moment: str) -> None:
        grads = [
            None if param.grad is None else param.grad.clone() for param in self.params.values()
        ]
        self.seen.append((f"iteration {self.number}: {moment}", grads))

    def act(self, action: str) -> None:
        with torch.enable_grad():
            self.actions[action]()

    def backward(self, *, bad: bool = False) -> None:
        loss = self.model(data(self.number, 4, 3)).square().mean()
        (loss * (NAN if bad else 1.0)).backward()

    def assign(self, number: float | None) -> None:
        for param in self.params.values():
            param.grad = None if number is None else torch.full_like(param, number)

    def halve(self) -> None:
        for param in self.params.values():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def fail(self) -> None:
        raise Raised

    def step_in_a_thread(self) -> None:
        thread = threading.Thread(target=self.step, args=(self.first,))
        thread.start()
        thread.join()

    def remove(self) -> None:
        self.removed = True
        if self.session is not None:
            self.session.remove()

    def counts(self) -> list[Any]:
        return [self.clock, self.trips, self.first.counts(), self.second.counts()]


def check(script: Script) -> None:
    """Show that rules do what the script does by hand."""
    ruled, manual = (Training(script, by_hand=by_hand).run() for by_hand in (False, True))
    exactly: Any = {"rtol": 0, "atol": 0, "equal_nan": True}
    for (moment, found), (other, wanted) in zip(ruled.seen, manual.seen, strict=True):
        assert moment == other
        assert [grad is None for grad in found] == [grad is None for grad in wanted], moment
        pairs = zip(found, wanted, strict=True)
        for one, two in pairs:
            if one is not None:
                torch.testing.assert_close(one, two, **exactly, msg=moment)
    for name, param in ruled.params.items():
        torch.testing.assert_close(param, manual.params[name], **exactly, msg=name)
    assert ruled.counts() == manual.counts()
