"""P9: what rules take of the memory of a device in each step, and that it does not grow.

An allocation is a tensor that an operation returns in memory which none of its arguments has.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from models import data
from small import attach, linears, sgd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradsurgeon
from gradsurgeon.tensors import _numbers, _torch

pytestmark = pytest.mark.slow

LAYERS = 10
STEPS = 50
PARAMS = 2 * LAYERS
WIDTH = 16
LOG = '  - {id: norms, action: norm-log, params: "*"}\n'
CLIP = '  - {id: clip, action: clip-norm, params: "*", at: step, max_norm: 0.5, per: rule}\n'
CLAMP = '  - {id: bound, action: clamp, params: "*", at: step, min: -0.1, max: 0.1}\n'
TRAP = '  - {id: trap, action: nan-trap, params: "*", then: skip-step}\n'
HEAD = "version: 1\nrules:\n"


class Allocations(TorchDispatchMode):
    """Sizes of what is allocated, and how many are alive at the same time at most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.alive = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_of(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and storage_of(one) not in given:
                self.sizes.append(one.numel())
                if one.ndim == 0:  # the norms of all gradients are taken together
                    continue
                self.alive += 1
                self.most = max(self.most, self.alive)
                weakref.finalize(one, self._freed)
        return out

    def _freed(self) -> None:
        self.alive -= 1


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


class Run:
    """Trains and counts, in each step, allocations and what is alive after it."""

    def __init__(self, rules: str, steps: int = 8) -> None:
        torch.manual_seed(0)
        model = linears(*[WIDTH] * (LAYERS + 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        self.sizes: list[Counter[int]] = []
        # At the update alone: a backward pass has many tensors of its own.
        self.most: list[int] = []
        self.live: list[int] = []
        session = gradsurgeon.apply(model, HEAD + rules, optimizer=optimizer) if rules else None
        for number in range(steps):
            optimizer.zero_grad()
            loss = model(data(number, 3, WIDTH)).square().mean()
            with Allocations() as backward:
                loss.backward()
            with Allocations() as update:
                optimizer.step()
            self.sizes.append(Counter(backward.sizes + update.sizes))
            self.most.append(update.most)
            if steps == STEPS and session is not None:
                # What waits to travel is bounded in number, and leaves nothing once it has arrived.
                session.status()
                session.history("0.weight")
                gc.collect()
                self.live.append(sum(isinstance(one, Tensor) for one in gc.get_objects()))
        gradsurgeon.remove(model)


@pytest.fixture(autouse=True)
def _a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "is_host", lambda _: False)
    # Norms are taken as on a device: one call over the list.
    for few in ("_FEW", "_FEW_FOR_NORM"):
        monkeypatch.setattr(_numbers, few, -1)
    monkeypatch.setattr(_numbers, "_WIDE", set())


ALL = LOG + TRAP + CLIP + CLAMP


def test_nothing_stays_from_one_step_to_the_next() -> None:
    run = Run(LOG.replace("}", ", stats: [l2, linf]}") + TRAP + CLIP + CLAMP, STEPS)
    assert len(set(run.live[2:])) == 1


@pytest.mark.parametrize("host", [False, True])
def test_a_trap_keeps_no_graph_of_an_earlier_micro_batch(
    monkeypatch: pytest.MonkeyPatch, host: bool
) -> None:
    monkeypatch.setattr(_torch, "is_host", lambda _: host)
    kept: weakref.WeakSet[Any] = weakref.WeakSet()

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept.add(ctx)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    model: Any = linears(4, 4, 4)
    optimizer = sgd(model)
    with gradsurgeon.apply(model, HEAD + TRAP) as session:
        for bad in (False, True):
            for micro_batch in range(4):
                # The first layer that backward reaches stays finite.
                out = model[1](Keeps.apply(model[0](data(0, 2, 4))))
                hook = model[0].weight.register_hook(
                    lambda grad, spoil=bad and micro_batch == 1: (
                        grad * (float("nan") if spoil else 1)
                    )
                )
                out.sum().backward()
                hook.remove()
                del out
                assert len(kept) <= 1
            optimizer.step()
            assert not kept
        message = session.events[0].message
    assert "micro-batch 2 of 4" in message
    assert message.index("finite  1.") < message.index("NaN     0.weight")


def test_a_bound_takes_the_masks_of_one_gradient_at_a_time() -> None:
    run = Run(ALL)
    assert all(one == run.sizes[2] for one in run.sizes[2:])
    # Of one gradient two masks and their sum, and the few of the norms.
    assert max(run.most[2:]) <= 8


def test_the_norm_of_half_precision_copies_a_part_at_a_time() -> None:
    grad = torch.ones(2**20, dtype=torch.bfloat16)
    with Allocations() as allocations:
        assert _numbers.norm(grad).item() == 2.0**10
    assert max(allocations.sizes) <= grad.numel() // 4


def test_losses_take_one_copy_of_the_matched_gradients_each() -> None:
    losses = 4
    depth = 4
    width = 768
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.ModuleDict({"trunk": nn.Sequential(*layers), "head": nn.Linear(width, losses)})
    names = [f"loss{number}" for number in range(losses)]
    rule = {"id": "r", "action": "combine", "method": "mgda", "params": "trunk.*", "losses": names}
    matched = sum(4 * param.numel() for param in model["trunk"].parameters())
    with attach(model, rule):
        for _ in range(2):  # the first call looks whether the gradients add up
            model.zero_grad()
            out = model["head"](model["trunk"](torch.randn(2, width))).square().mean(0)
            with torch.profiler.profile(profile_memory=True) as profiled:
                gradsurgeon.backward(dict(zip(names, out.unbind(), strict=True)))
            assert losses < _most_bytes(profiled) / matched < losses + 2 / depth + 0.25


def _most_bytes(profiled: torch.profiler.profile) -> int:
    results: Any = profiled.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    sizes: list[int] = [
        event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())
    ]
    return max(accumulate(sizes))
