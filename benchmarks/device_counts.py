"""What rules ask of a device per step: counted on one made of Python, so that any machine gives the same numbers.

Where there is a CUDA device, the kernels that are really launched are counted as well.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import rule_sets, workers
from benchmarks.cases import Attached, Case, step_of
from benchmarks.nets import DeepMlp
from benchmarks.overhead import Row
from benchmarks.workloads import Task

GROUP = "device counts"
BARE = "bare step"
CLIP = "clip_grad_norm_(foreach=True)"
# Numbers of parameters, and the dtypes that layers have in turn.
Size = tuple[int, tuple[str, ...]]
SIZES: Sequence[Size] = (
    (10, ("float32",)),
    (100, ("float32",)),
    (1000, ("float32",)),
    (100, ("float32", "bfloat16")),
)
_QUICK = 2
_WIDTH = 32
# The first steps make counters, caches and what the optimizer keeps.
_SETTLING = 3
_TIMEOUT = 1200
# What the profiler calls the launch of a kernel.
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")


class Mlp(DeepMlp):
    """Linear layers, each of the next dtype in turn."""

    def __init__(self, layers: int, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__(layers, _WIDTH)
        self._dtypes = dtypes
        for number, layer in enumerate(self.layers):
            layer.to(dtype=dtypes[number % len(dtypes)])

    def forward(self, features: Tensor) -> Tensor:
        """Map ``[batch, width]`` to the same shape."""
        for number, layer in enumerate(self.layers):
            features = torch.tanh(layer(features.to(self._dtypes[number % len(self._dtypes)])))
        return features


def task(size: Size, place: Callable[[Mlp, Tensor], Tensor]) -> Task:
    """Return a model of a size; ``place`` puts it on a device, in place, and returns the features there."""
    torch.manual_seed(0)
    params, dtypes = size
    model = Mlp(params // 2, [getattr(torch, name) for name in dtypes])
    features = place(model, torch.randn(2, _WIDTH))
    # As torch chooses on CUDA by itself.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)

    def backward() -> None:
        model(features).float().square().mean().backward()

    return Task(model, optimizer, backward)


def _clip(task: Task) -> Attached:
    clip = partial(nn.utils.clip_grad_norm_, task.params, 1e-3, foreach=True)
    return Attached(after_backward=clip)


def cases() -> list[Case]:
    """Return what is counted: the bare step, torch's own clipping, then rules."""
    together = rule_sets.together()
    wanted = (rule_sets.OBSERVE, rule_sets.CLIP_IDLE, rule_sets.CLIP_BITES, rule_sets.IDLE)
    return [
        Case(BARE, "baseline", lambda _: Attached()),
        Case(CLIP, "peer", _clip),
        *(rule_sets.case(title, together[title]) for title in wanted),
        rule_sets.fingerprint(),
        *(rule_sets.case(title, rules) for title, rules in rule_sets.on_modules().items()),
        *(
            rule_sets.case(title, [rule])
            for title, rule in rule_sets.alone()
            # The device made of Python draws no random numbers.
            if rule["action"] not in ("perturb", "noise")
        ),
    ]


def settled(task: Task, case: Case) -> tuple[Callable[[], None], Attached]:
    """Return a step with a case on the model, after some that settle in, and what takes it off."""
    with warnings.catch_warnings():
        # That a rule alone makes no sense is not what is counted here.
        warnings.simplefilter("ignore")
        attached = case.attach(task)
        step = step_of(task, attached)
        for _ in range(_SETTLING):
            step()
    return step, attached


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per size and case, the bare step first, of all others what they add; on CUDA with its kernels."""
    sizes = SIZES[:_QUICK] if quick else SIZES
    launched = launches(sizes) if device == "cuda" else {}
    for row in counted(sizes, [case.name for case in cases()]):
        key = row["params"], row["dtypes"], row["case"]
        yield {"group": GROUP} | row | {"launches": launched.get(key)}


def label(dtypes: Sequence[str]) -> str:
    return " and ".join(dtypes)


def counted(sizes: Sequence[Size], names: Sequence[str]) -> list[Row]:
    """Count cases by name in a process of its own, where the device made of Python is registered."""
    request = json.dumps([[sizes, names]])
    return workers.rows(("-m", "benchmarks.device_worker"), request, timeout=_TIMEOUT)


def launches(sizes: Iterable[Size]) -> dict[tuple[int, str, str], int]:
    """Return how many kernels CUDA launches in the bare step of each model, and how many more in each case."""

    def place(model: Mlp, features: Tensor) -> Tensor:
        model.cuda()
        return features.cuda()

    found: dict[tuple[int, str, str], int] = {}
    for size in sizes:
        params, dtypes = size[0], label(size[1])
        for case in cases():
            step, attached = settled(task(size, place), case)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                step()
                torch.cuda.synchronize()
            attached.detach()
            names = [event.name() for event in seen.profiler.kineto_results.events()]
            base = found.get((params, dtypes, BARE), 0)
            found[params, dtypes, case.name] = (
                sum(name.startswith(_LAUNCHES) for name in names) - base
            )
    return found
