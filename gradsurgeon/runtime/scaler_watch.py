"""Loss scaling: what a gradient is worth while a `GradScaler` has its scale on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon import _live, _torch
from gradsurgeon._patching import Patch
from gradsurgeon.compiler import Program
from gradsurgeon.errors import BindError
from gradsurgeon.runtime.compile_support import uncompiled


class Scaling:
    """Which gradients of a session carry the scale of a `GradScaler`, and which scale.

    A process can train several models with several scalers, or one of them without any. So each
    backward pass is asked for itself: it carries a scale where it began at a loss that was scaled.

    Args:
        scaler: the one the caller has named; others are then none of the session's business.
    """

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self._named = None if scaler is None else weakref.ref(scaler)
        # A named scaler may be asked for its scale only, and the loss be multiplied by hand.
        self._by_hand = scaler is not None
        # Running backward passes that began at a scaled loss, by graph task. Nothing but the pass keeps
        # them: one that raises ends as well.
        self._running: WeakValueDictionary[int, _Scaled] = WeakValueDictionary()
        # But compiled autograd runs nothing at the end of a pass, and so keeps nothing.
        self._kept: dict[int, _Scaled] = {}
        # The scalers that are stepping an optimizer, or about to decide that they do not.
        self._stepping: dict[int, weakref.ref[GradScaler]] = {}

    def _concerns(self, scaler: GradScaler) -> bool:
        return scaler.is_enabled() and (self._named is None or self._named() is scaler)

    def scaled(self, scaler: GradScaler, losses: Sequence[Tensor]) -> None:
        """Take notice of losses that a scaler has scaled: their backward passes carry its scale."""
        if not self._concerns(scaler):
            return
        self._by_hand = False
        own, by = weakref.ref(self), weakref.ref(scaler)

        @uncompiled
        def begins(_grad: Tensor) -> None:
            scaling, scaler = own(), by()
            if scaling is not None and scaler is not None:
                scaling.began(scaler)

        for loss in losses:
            if loss.requires_grad:
                _torch.register_hook(loss, begins)

    def began(self, scaler: GradScaler) -> None:
        """Take notice of a backward pass that begins at a scaled loss."""
        task, thread = _torch.graph_task(), threading.get_ident()
        running = self._running[task] = _Scaled(_scale_of(scaler), thread)
        if _torch.in_compiled_autograd():
            self._kept[thread] = running
        else:
            _torch.queue_callback(running)

    def stepped(self) -> None:
        """Forget the pass that led to a step of this thread."""
        self._kept.pop(threading.get_ident(), None)

    @property
    def scale(self) -> Tensor | None:
        """The scale on the gradients of the running backward pass, as a 0-dim tensor: no wait."""
        if self._by_hand:
            scaler = self._named() if self._named is not None else None
            return None if scaler is None or not scaler.is_enabled() else scaler._scale  # noqa: SLF001
        if not self._running:
            return None
        found = self._running.get(_torch.graph_task())
        if found is None:
            # A pass inside another one, as of reentrant checkpointing, has its gradients from that one,
            # which runs in the same thread. What other threads train is none of its business.
            thread = threading.get_ident()
            mine = [t for t, scaled in list(self._running.items()) if scaled.thread == thread]
            found = self._running.get(max(mine)) if mine else None
        return None if found is None else found.scale

    @contextmanager
    def steps(self, scaler: GradScaler, optimizer: Optimizer) -> Iterator[bool]:
        """Take notice of a scaler that is about to step an optimizer, or to leave it alone.

        Yields:
            Whether it is news: not where a derived class calls the method of its base.
        """
        key = id(_torch.stepping(optimizer) or optimizer)
        if not self._concerns(scaler) or key in self._stepping:
            yield False
            return
        self._stepping[key] = weakref.ref(scaler)
        try:
            yield True
        finally:
            del self._stepping[key]

    def stepping(self, optimizer: Optimizer) -> Tensor | None:
        """The scale of the scaler that is stepping an optimizer, as a 0-dim tensor."""
        reference = self._stepping.get(id(_torch.stepping(optimizer) or optimizer))
        scaler = None if reference is None else reference()
        return None if scaler is None else _scale_of(scaler)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class _Scaled:
    """A running backward pass that carries a scale; the engine keeps it and calls it at the end."""

    scale: Tensor
    thread: int

    def __call__(self) -> None:
        """Do nothing: that it was kept is all."""


def _scale_of(scaler: GradScaler) -> Tensor:
    found: Tensor | None = scaler._scale  # noqa: SLF001 # `get_scale` waits for the device
    # It is made when the first loss is scaled.
    return torch.ones((), device="cpu") if found is None else found


def unscaled(grad: Tensor, scale: Tensor | None) -> Tensor:
    """Return a gradient in true units. Half precision becomes float32, which holds what is small."""
    if scale is None:
        return grad
    values = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
    return values / scale.to(grad.device)


def in_true_units(
    edit: Callable[[Tensor], Tensor], scale: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """Return an edit that works on scaled gradients as ``edit`` does on true ones.

    Non-finite elements pass: the scaler must see its overflow, or it would never back off. The scale
    is a power of two, so that dividing by it loses nothing.
    """
    if scale is None:
        return edit

    def scaled(grad: Tensor) -> Tensor:
        out = edit(unscaled(grad, scale)) * scale.to(grad.device)
        return torch.where(grad.isfinite(), out.to(grad.dtype), grad)

    return scaled


def refuse_scaling(program: Program) -> None:
    """Refuse rules that would hide from a scaler what it has to see.

    Raises:
        BindError: naming them.
    """
    rules = {rule.id: rule for own in program.per_tensor.values() for rule in own}
    rules |= {rule.id: rule for rule, _ in program.site_rules}
    refused = [rule.id for rule in rules.values() if rule.hides_overflow]
    if refused:
        raise BindError(
            [
                f"rule {rule}: an enabled GradScaler must see its overflow to back off, so that non-finite "
                "elements cannot be replaced before it looks; use `nan-trap` with `then: skip-step`"
                for rule in refused
            ]
        )


def _tensors(found: object) -> Iterator[Tensor]:
    """Yield the tensors of what a scaler returns; what it makes of an iterator is not consumed."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


@contextmanager
def watched(
    on_scale: Callable[[GradScaler, Sequence[Tensor]], None],
    around_step: Callable[[GradScaler, Optimizer], AbstractContextManager[None]],
) -> Iterator[None]:
    """Take notice of every use of a scaler: there is no hook for it.

    Classes derived from `GradScaler` may scale and step in their own ways, as `ShardedGradScaler` does,
    and may be defined later than this: those are known from their first object on.

    Args:
        on_scale: called with a scaler and the losses that it has scaled.
        around_step: what to be in while a scaler steps an optimizer, or decides not to.
    """
    patches: dict[type, list[Patch]] = {}

    def scale(original: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        found = original(scaler, *args, **kwargs)
        on_scale(scaler, list(_tensors(found)))
        return found

    def step(
        original: Callable[..., Any],
        scaler: GradScaler,
        optimizer: Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with around_step(scaler, optimizer):
            return original(scaler, optimizer, *args, **kwargs)

    def construct(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        watch(type(args[0]))
        original(*args, **kwargs)

    def watch(kind: type[Any]) -> None:
        for base in kind.__mro__:
            if issubclass(base, GradScaler) and base not in patches:
                methods = {"scale": scale, "step": step}
                own = {name: way for name, way in methods.items() if name in vars(base)}
                patches[base] = [Patch(base, name, way) for name, way in own.items()]

    for kind in _live.derived(GradScaler):
        watch(kind)
    patches.setdefault(GradScaler, []).append(Patch(GradScaler, "__init__", construct))
    try:
        yield
    finally:
        for patch in [patch for own in patches.values() for patch in own]:
            patch.undo()
