"""Clips of the script by functions of torch, and those that come after an update or before a backward pass."""

import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from gradsurgeon.actions.checks.base import Finding, Findings, Pass, Update, owned_ids
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck, Streak
from gradsurgeon.common._patching import Patch
from gradsurgeon.common._script import running_lines
from gradsurgeon.tensors.sampling import sizes_of

# A script may clip in vain for a while, as before its first updates.
_IN_A_ROW = 10
_IN_VAIN = (
    "`{function}` at {place} comes after the update or before the backward pass, so it finds no gradients, or used ones. The {size} "
    "of the gradients in the update of step {step} is {now:.3g}, above the bound of {bound:.3g}. Call it between `backward()` and "
    "`step()`"
)


@dataclass(frozen=True, slots=True)
class Clip:
    """A call of `clip_grad_norm_` or `clip_grad_value_`, with the ids of its parameters."""

    function: str
    ids: AbstractSet[int]
    bound: Any
    place: str


listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_clips() -> Callable[[], object]:
    """Show each clip to the listeners, until the returned function is called."""
    patches = ExitStack()
    # A script may have imported `clip_grad_norm_` by name before: this is the function that it calls inside.
    within = partial(_clip, "clip_grad_norm_")
    patches.callback(Patch(clip_grad, "_clip_grads_with_norm_", within).undo)
    for module in (clip_grad, torch.nn.utils):
        by_value = partial(_clip, "clip_grad_value_")
        patches.callback(Patch(module, "clip_grad_value_", by_value).undo)
    return patches.close


def _clip(
    function: str, clip: Callable[..., Any], params: Any, bound: Any, *args: Any, **kwargs: Any
) -> Any:
    if torch.compiler.is_compiling():
        return clip(params, bound, *args, **kwargs)
    tensors = [params]
    if not isinstance(params, Tensor):
        tensors = list(params)
    result = clip(tensors, bound, *args, **kwargs)
    if listeners:
        line, _ = next(running_lines(), ("an unknown line", 0))
        seen = Clip(function, frozenset(map(id, tensors)), bound, line)
        for listener in tuple(listeners):
            listener.clipped(seen)
    return result


class ClipOrder(OptimizerCheck):
    """Looks at the clips between two updates of one optimizer."""

    def __init__(self) -> None:
        # The clips since the last update, each with whether a backward pass came before it.
        self._clips: list[tuple[Clip, bool]] = []
        self._has_pass = False
        self._in_a_row = Streak(_IN_A_ROW)
        listeners.add(self)

    def close(self) -> None:
        listeners.discard(self)

    def clipped(self, clip: Clip) -> None:
        if self.owner.looks:
            self._clips.append((clip, self._has_pass))

    def before_pass(self, starting: Pass) -> Findings:
        # Gradients that the script keeps feed the next update: their clip had an effect.
        if self._clips and not self._has_pass and starting.is_any(self.owner.sampled):
            self._clips = [(clip, True) for clip, _ in self._clips]
        return ()

    def after_pass(self, done: Pass) -> Findings:
        self._has_pass |= done.reaches(self.owner.indices)
        return ()

    def before_update(self, update: Update) -> Findings:
        """Yield a finding if no clip came between pass and update."""
        ids = {index: id(param) for index, param in update.originals.items()}
        theirs = set()
        for other in self.owner.others:
            for index in other.indices:
                theirs.add(ids.get(index))
        # An optimizer may have the parameters of several models.
        own = owned_ids(update.optimizer).union(ids.values()) - theirs
        updated = [ids.get(index) for index in update.groups]
        vain = None
        for clip, came_after_pass in self._clips:
            if clip.ids.isdisjoint(updated):
                continue
            # A clip of the parameters of several optimizers may be meant for another one.
            if came_after_pass or not clip.ids <= own:
                vain = None
                break
            vain = clip
        self._in_a_row.reaches(vain is not None and self._has_pass)
        if vain is not None and self._in_a_row.count >= _IN_A_ROW:
            clipped = [index for index in ids if ids[index] in vain.ids]
            yield from _in_vain(vain, update, clipped)

    def after_update(self, update: Update) -> Findings:  # noqa: ARG002 # the next pass begins anew
        self._clips = []
        self._has_pass = False
        return ()


def _in_vain(clip: Clip, update: Update, indices: Sequence[int]) -> Findings:
    sizes = sizes_of(update.grads, indices)
    bound = float(clip.bound)
    if not sizes:
        return
    size = "norm"
    now, most = sizes
    if clip.function == "clip_grad_value_":
        size = "largest element"
        now = most
    # An infinite bound only measures.
    if now > bound:
        text = _IN_VAIN.format(
            function=clip.function,
            place=clip.place,
            size=size,
            step=update.step,
            now=now,
            bound=bound,
        )
        yield Finding("clip order", text)
