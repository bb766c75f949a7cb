"""Engines of DeepSpeed, which average gradients, keep them and update weights by themselves. DeepSpeed is never imported here.

From ZeRO 1 on, an engine takes each gradient out of `.grad` and keeps this rank's part of the average, flat, until it
updates this rank's part of the weights in float32. These parts are read in place, without a collective.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon.common import _live
from gradsurgeon.common._patching import Patch
from gradsurgeon.tensors import _dist, _numbers
from gradsurgeon.tensors._flat_part import FlatPart

# Optimizers of DeepSpeed keep the parameters of the model in these attributes, a list for each flat tensor.
_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")

# The method of an engine that updates the weights.
UPDATE = "_take_model_step"


class EngineOptimizer(Optimizer):
    """Stands for an optimizer of DeepSpeed: it has the parameters of the model, and its step is the update of an engine.

    Attributes:
        update: runs the update of the engine.
        grad_scale: the loss scale, ``None`` if it is 1.
        found_inf: under a loss scale, whether a gradient on this rank is not finite.
        left_out: whether the engine has left the last update out, because a gradient was not finite.
    """

    update: Callable[[], object]
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    left_out = False

    def step(self, closure: None = None) -> None:  # type: ignore[override] # an engine takes no closure
        """Run the update of the engine."""
        del closure
        self.update()


class Engine:
    """An engine, as far as the rules of its model need it. It is reached weakly.

    Attributes:
        optimizer: the optimizer of torch that steps the parameters of the model, or a stand-in.
        is_divided: whether ranks keep parts of gradients and of weights in float32 (ZeRO 1, 2, 3).
        may_leave_out: whether it may leave an update out.
    """

    def __init__(self, engine: Any) -> None:
        self._inner = weakref.ref(engine.optimizer)
        self.is_divided = int(engine.zero_optimization_stage()) > 0
        self.may_leave_out = not isinstance(engine.optimizer, Optimizer)
        self.optimizer: Any = engine.optimizer
        if self.may_leave_out:
            # Rules and records know an optimizer by the name of its class.
            kind = type(type(engine.basic_optimizer).__name__, (EngineOptimizer,), {})
            self.optimizer = kind(_groups_of(engine.optimizer), {})
        self._divided: set[int] = set()
        if self.is_divided:
            for group in self.optimizer.param_groups:
                self._divided.update(map(id, group["params"]))
        self._is_updating = False

    def run(self, update: Callable[[], object], before: Callable[[Engine], None]) -> None:
        """Run an update as a step of the optimizer, with the hooks of torch; ``before`` is called right before."""
        self._is_updating = True
        try:
            if self.may_leave_out:
                self._prepare(self._inner(), update)
                update = self.optimizer.step
            before(self)
            update()
        finally:
            self._is_updating = False
            # It refers to the engine.
            vars(self.optimizer).pop("update", None)

    def _prepare(self, inner: Any, update: Callable[[], object]) -> None:
        optimizer = self.optimizer

        def run() -> None:
            update()
            optimizer.left_out = bool(inner.overflow)

        optimizer.update = run
        optimizer.left_out = False
        wait = getattr(inner, "_wait_for_offload_copies", None)
        if wait is not None:
            # The host has gradients that are still on their way.
            wait()
        params = []
        # Schedules write into the groups of the inner optimizer.
        for group, settings in zip(optimizer.param_groups, inner.param_groups, strict=True):
            params += group["params"]
            group.update({**settings, "params": group["params"]})
        scale = float(getattr(inner, "loss_scale", 1.0))
        optimizer.grad_scale = None
        optimizer.found_inf = None
        if scale != 1.0:
            optimizer.grad_scale = torch.tensor(scale)
            grads = []
            for param in params:
                grad = self.grad_of(param)
                if grad is not None:
                    grads.append(grad)
            norms = _numbers.norms(_dist.parts(grads))
            optimizer.found_inf = norms.isfinite().all().logical_not()

    def grad_of(self, param: Any) -> Tensor | None:
        """Return the averaged gradient of a parameter, or this rank's part of it; ``None`` between updates."""
        if param is None or not self._is_updating:
            return None
        if not self.is_divided:
            return param.grad  # type: ignore[no-any-return] # of a parameter
        return _part_of(param, weight=False) if id(param) in self._divided else None

    def weight_of(self, param: Any) -> Tensor | None:
        """Return a parameter, or this rank's part of its copy in float32."""
        return _part_of(param, weight=True) if id(param) in self._divided else param

    def groups_of(self, param: Any) -> _dist.Groups:
        """Return the process groups over which a parameter is divided."""
        return (_group_of(param),) if id(param) in self._divided else ()


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameters of the model by group of the inner optimizer, with its settings."""
    held: list[list[Tensor]] = []
    for name in _GROUPS:
        held = held or getattr(optimizer, name, [])
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    # ZeRO 3 divides groups.
    numbers = getattr(optimizer, "sub_group_to_group_id", {})
    for place, params in enumerate(held):
        groups[numbers.get(place, place)]["params"] += params
    return groups


def _group_of(param: Any) -> Any:
    return getattr(param, "ds_process_group", None) or param._dp_group  # noqa: SLF001 # no public name


def _part_of(param: Any, *, weight: bool) -> Tensor | None:
    """Return this rank's part of the gradient or the weight of a parameter, ``None`` if there is none now."""
    group = _group_of(param)
    # The public names run a collective, or copy.
    if hasattr(param, "ds_id"):
        name = "_get_fp32_opt_state_partition" if weight else "_get_fp32_grad_state_partition"
        read = getattr(param._z3_optimizer, name)  # noqa: SLF001 # see above
        elements, _ = read(param, release_swap_buffers=True)
        # All parts are equally long: the last ones may have padding.
        start = elements.numel() * torch.distributed.get_rank(group)
        elements = elements.reshape(-1)[: max(0, param.ds_numel - start)]
        return FlatPart.of(elements, param.ds_numel, start, group)
    mapping = param._hp_mapping  # noqa: SLF001 # see above
    if mapping is None:
        return FlatPart.of(torch.empty(0, device=param.device), param.numel(), 0, group)
    place = mapping.lp_fragment_address
    if weight:
        elements = mapping.get_hp_fragment()
    else:
        try:
            elements = mapping.get_lp_grad_fragment(param._index_in_param_group).reshape(-1)  # noqa: SLF001
        except ValueError:
            return None
        if len(elements) > place.numel:
            # The optimizer for bfloat16 keeps whole gradients on each rank.
            elements = elements[place.start : place.start + place.numel]
    return FlatPart.of(elements, param.numel(), place.start, group)


def is_inside_engine(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is the inner one of an engine, which steps it on flat tensors."""
    kind = _engine_class()
    if kind is None:
        return False
    return any(vars(engine).get("basic_optimizer") is optimizer for engine in _live.instances(kind))


def _engine_class() -> Any:
    return getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)


class EngineWatch:
    """Knows the engines once the script has imported DeepSpeed; ``before`` is called before each update of one.

    Attributes:
        is_blind: whether there are engines of a version of DeepSpeed whose updates cannot be seen.
    """

    is_blind = False

    def __init__(self, before: Callable[[Engine], None]) -> None:
        self._before = before
        self._patches = ExitStack()
        self._kind: Any = None
        self._engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()

    def engines(self) -> list[Engine]:
        kind = _engine_class()
        if kind is None:
            return []
        if kind is not self._kind:
            self._kind = kind
            engines = _live.instances(kind)
            if not hasattr(kind, UPDATE):
                self.is_blind = bool(engines)
                return []
            self._patches.callback(Patch(kind, "__init__", self._make).undo)
            self._patches.callback(Patch(kind, UPDATE, self._update).undo)
            for engine in engines:
                self._note(engine)
        return list(self._engines.values())

    def _make(self, make: Callable[..., None], engine: Any, *args: Any, **kwargs: Any) -> None:
        make(engine, *args, **kwargs)
        self._note(engine)

    def _note(self, engine: Any) -> None:
        # An engine for inference has no optimizer.
        if engine not in self._engines and hasattr(engine.optimizer, "param_groups"):
            self._engines[engine] = Engine(engine)

    def _update(self, update: Callable[..., None], engine: Any, *args: Any) -> None:
        self._note(engine)
        run = partial(update, engine, *args)
        if engine in self._engines:
            self._engines[engine].run(run, self._before)
        else:
            run()

    def close(self) -> None:
        self._patches.close()
        self._kind = None
        self.is_blind = False
        self._engines.clear()
