"""Loss scaling: the scale of a `GradScaler` on the gradients of a backward pass, and arithmetic with it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon.actions import Rule
from gradsurgeon.common import _live
from gradsurgeon.common._patching import Patch
from gradsurgeon.distributed.deepspeed_engine import EngineOptimizer
from gradsurgeon.errors import BindError
from gradsurgeon.runtime.refusals import Guard
from gradsurgeon.tensors import _numbers, _torch
from gradsurgeon.tensors._torch import uncompiled

# A pass that raises, or returns gradients, leaves its entry behind.
_MOST_PASSES = 16


class Scaling:
    """The gradients of a session that carry the scale of a `GradScaler`, and that scale.

    A process can train several models, some with a scaler. The scale is therefore known per backward pass: a pass carries
    one if it began at a scaled loss. If the caller has named a scaler, all others are ignored.
    """

    def __init__(self, scaler: GradScaler | None, guard: Guard) -> None:
        self._guard = guard
        self._named = None if scaler is None else weakref.ref(scaler)
        # Whether a loss of the running pass may have been scaled.
        self.in_use = False
        # Backward passes that began at a scaled loss, by graph task.
        self._passes: dict[int, Tensor] = {}
        # The scalers that are stepping an optimizer, or about to skip its step.
        self._stepping: dict[int, GradScaler] = {}

    def _concerns(self, scaler: GradScaler) -> bool:
        if not scaler.is_enabled():
            return False
        return self._named is None or self._named() is scaler

    def scaled(self, scaler: GradScaler, losses: Sequence[Tensor]) -> None:
        """Mark losses that a scaler has scaled: their backward passes carry its scale."""
        if not self._concerns(scaler):
            return
        self.in_use = True
        scaling_ref = weakref.ref(self)
        scaler_ref = weakref.ref(scaler)

        @uncompiled
        def begins(_grad: Tensor) -> None:
            scaling = scaling_ref()
            scaler = scaler_ref()
            if scaling is not None and scaler is not None:
                with scaling._guard:  # noqa: SLF001 # of this class
                    scaling.began(scaler)

        for loss in losses:
            if loss.requires_grad:
                _torch.register_hook(loss, begins)

    def began(self, scaler: GradScaler) -> None:
        """Record a backward pass that begins at a scaled loss."""
        while len(self._passes) >= _MOST_PASSES:
            self._passes.pop(next(iter(self._passes)), None)
        self._passes[_torch.graph_task()] = _scale_of(scaler)

    def began_inside(self, inner: int, outer: int) -> None:
        """Record a pass that gets its gradients from the pass around it."""
        if outer in self._passes:
            self._passes[inner] = self._passes[outer]

    def pop_scale(self, tasks: Sequence[int]) -> Tensor | None:
        """Return the scale on the gradients of a finished pass, given its task numbers."""
        scales = []
        for task in tasks:
            scale = self._passes.pop(task, None)
            if scale is not None:
                scales.append(scale)
        return scales[0] if scales else None

    @property
    def scale(self) -> Tensor | None:
        """The scale on the gradients of the running backward pass, as a 0-dim tensor, without waiting."""
        return self._passes.get(_torch.graph_task()) if self._passes else None

    @contextmanager
    def steps(self, scaler: GradScaler, optimizer: Optimizer) -> Iterator[bool]:
        """Mark a scaler that steps an optimizer, or skips its step; yield whether no call of a base class is under way."""
        key = _key(optimizer)
        if not self._concerns(scaler) or key in self._stepping:
            yield False
            return
        self._stepping[key] = scaler
        try:
            yield True
        finally:
            del self._stepping[key]

    def scale_of_step(self, optimizer: Optimizer) -> Tensor | None:
        if isinstance(optimizer, EngineOptimizer):
            return optimizer.grad_scale
        if not self._stepping:
            return None
        scaler = self._stepping.get(_key(optimizer))
        return None if scaler is None else _scale_of(scaler)


def _key(optimizer: Optimizer) -> int:
    """Return one key for a wrapper and its wrapped optimizer."""
    return id(_torch.hooked_optimizer(optimizer) or optimizer)


def _scale_of(scaler: GradScaler) -> Tensor:
    scale: Tensor | None = scaler._scale  # noqa: SLF001 # `get_scale` waits for the device
    if scale is None:
        # The scaler makes its scale when it scales the first loss.
        return torch.ones((), device="cpu")
    return scale


def unscaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    """Return a gradient in true units. Half precision becomes float32, which holds small values."""
    if scale is None:
        return grad
    return _numbers.in_float32(grad) / scale.to(grad.device)


def in_true_units(
    edit: Callable[[Tensor], Tensor], scale: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return an edit that treats scaled gradients as ``edit`` treats true ones.

    Non-finite elements pass unchanged: the scaler must see its overflow, or it would never back off.
    """
    if scale is None:
        return edit

    def scaled(grad: Tensor) -> Tensor:
        out = edit(unscaled(grad, scale)) * scale.to(grad.device)
        return torch.where(grad.isfinite(), out.to(grad.dtype), grad)

    return scaled


def refuse_scaling(rules: Iterable[Rule]) -> None:
    """Refuse rules that act before a `GradScaler` looks for its overflow, and hide it."""
    refused = dict.fromkeys(rule.id for rule in rules if rule.hides_overflow)
    if refused:
        text = (
            "an enabled GradScaler must see its overflow to back off, so non-finite elements cannot be "
            "replaced before the scaler looks; use `nan-trap` with `then: skip-step`"
        )
        raise BindError([f"rule {rule}: {text}" for rule in refused])


@contextmanager
def watched(
    on_scale: Callable[[GradScaler, Sequence[Tensor]], None],
    around_step: Callable[[GradScaler, Optimizer], AbstractContextManager[None]],
) -> Iterator[None]:
    """Intercept every GradScaler call: torch has no hook for it. Derived classes may have methods of their own."""

    def scale(original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        # If a scaler returns an iterator, the iterator is not consumed.
        losses = scaled if isinstance(scaled, list | tuple) else [scaled]
        on_scale(scaler, [loss for loss in losses if isinstance(loss, Tensor)])
        return scaled

    def step(original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        optimizer = args[0] if args else kwargs["optimizer"]
        with around_step(scaler, optimizer):
            return original(scaler, *args, **kwargs)

    with ExitStack() as patches:
        for kind in _live.derived(GradScaler):
            for name, around in (("scale", scale), ("step", step)):
                if name in vars(kind):
                    patches.callback(Patch(kind, name, around).undo)
        yield
