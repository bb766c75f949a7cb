"""Runs rules on the values and gradients of activations: module tensors and tagged tensors."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gradsurgeon import _dist, _numbers, _torch
from gradsurgeon.actions import CaptureRule, EditRule, ObserverRule, Rule, TrapRule
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.context import Context, Flag
from gradsurgeon.runtime.current_pass import is_taken
from gradsurgeon.runtime.due_rules import StepCounter, StepCounters
from gradsurgeon.runtime.gradients import NormClip, changes
from gradsurgeon.tensors.loss_scale import in_true_units, unscaled

_UNREADABLE = (
    "left a tensor alone that has no numbers to read (a batch of torch.func.vmap, jacrev or "
    "is_grads_batched; the meta device; a trace of torch.export): the rule neither measured nor edited it; "
    "compute this part in a loop, and export the model after session.remove()"
)
_SHARDED = (
    "did not measure a tensor that is sharded over ranks (a DTensor): measuring the full tensor would need a "
    "collective in the middle of a forward or backward pass; log another module, or make this module return its "
    "shard (`use_local_output=True`)"
)


class NamedRule(NamedTuple):
    """A rule, and the name of its tensor in records and messages."""

    rule: Rule
    name: str


class Due(NamedTuple):
    """The rules that act in one call, in file order: on the value of a tensor, and on its gradient."""

    values: tuple[NamedRule, ...]
    grads: tuple[NamedRule, ...]


class ModuleSchedule:
    """Returns the rules of one module or tag that act in a step, and computes them only when they change."""

    def __init__(
        self, rules: Sequence[Rule], owner: str, name: str, counters: ModuleCounters
    ) -> None:
        self.owner = owner
        # Whether a rule names one tensor of a structure.
        self.has_paths = any(rule.ref.path for rule in rules)
        # `ref.grad` is read once: computing it takes longer than a rule takes on a small tensor.
        self._rules = [(NamedRule(rule, name), rule.ref.grad) for rule in rules]
        self._counters = counters
        self._known = _Span(counters.of(owner), counters.all.version, range(0), training=True)

    def now(self, *, training: bool) -> tuple[Due | None, int]:
        """Return the due rules, or ``None``, and the step. Most calls only compare two numbers."""
        counter, version, steps, trains, due = self._known
        step = counter.step
        if step in steps and version == self._counters.all.version and training is trains:
            return due, step
        self._known = known = self._span(training=training)
        return known.due, known.counter.step

    def _span(self, *, training: bool) -> _Span:
        counter, version = self._counters.of(self.owner), self._counters.all.version
        step = counter.step
        acting = [
            (named, grad)
            for named, grad in self._rules
            if named.rule.steps.due(step) and (training or named.rule.when is None)
        ]
        end = min((named.rule.steps.alike_until(step) for named, _ in self._rules), default=step)
        due = None
        if acting:
            values = tuple([named for named, grad in acting if not grad])
            due = Due(values, tuple([named for named, grad in acting if grad]))
        return _Span(counter, version, range(step, end), training, due)


class _Span(NamedTuple):
    """The due rules in successive steps of a counter, valid for one version of the counters."""

    counter: StepCounter
    version: int
    steps: range
    training: bool
    due: Due | None = None


class ModuleCounters:
    """Looks up the step counter of a module: the optimizer that owns its first parameter has this counter.

    The owner may become known only after the forward pass, so callers ask each time.
    """

    def __init__(self, counters: StepCounters, param_names: Sequence[str]) -> None:
        self.all = counters
        self._first_params: dict[str, int] = {}
        for number, name in enumerate(param_names):
            while name:
                name = name.rpartition(".")[0]  # noqa: PLW2901 # the name of the parent module
                self._first_params.setdefault(name, number)

    def of(self, module: str) -> StepCounter:
        if not self._first_params:
            return self.all.common
        # A module without parameters uses the first parameter of the model.
        return self.all[self._first_params.get(module, 0)]


@dataclass(eq=False)
class ActivationRules:
    """Runs rules on activations. Each activation has an owner: the module whose step counter applies."""

    context: Context
    passes: BackwardWatch
    counters: ModuleCounters
    # The ids of the rules that edited each tensor.
    _edited: MutableMapping[Tensor, set[str]] = field(default_factory=WeakTensorKeyDictionary)
    # Replicas of a model run in several threads, and autograd calls hooks in one thread per device.
    lock: RLock = field(default_factory=RLock)

    def on_value(self, rules: Sequence[NamedRule], tensor: Tensor, owner: str, step: int) -> Tensor:
        """Run rules on the value of a tensor of any shape and dtype; return the value that replaces it."""
        if not rules or self.is_unreadable(tensor, rules, owner):
            return tensor
        # Checkpointing runs forward again inside backward: edits must repeat, records must not repeat.
        again = _torch.graph_task() != -1
        out = tensor
        with self.lock:
            for rule, name in rules:
                if self._is_unfit(out, rule, name, owner):
                    continue
                if isinstance(rule, EditRule):
                    # Token ids and masks are values too, but bounds and factors make no sense for them.
                    if is_numeric(out) and not self.has_edited(rule, out):
                        out = self._edit(rule, out, None if again else step, None, is_grad=False)
                        self.mark_edited(rule, out)
                elif not again:
                    self._observe(rule, name, out, owner, step, is_grad=False)
                elif isinstance(rule, TrapRule) and not self.context.flags.is_known(rule.id, name):
                    self._flag(rule, name, out, owner, fed=True, again=True)
        return out if self.context.mode == "act" else tensor

    def on_gradient(self, rules: Sequence[NamedRule], grad: Tensor, owner: str) -> Tensor:
        if self.is_unreadable(grad, rules, owner):
            return grad
        # Passes of single losses come before the training pass. Edits must act in all of these passes;
        # records come from the training pass alone.
        again = is_taken()
        with self.lock:
            # Without rules on parameters, this flag is all that shows the session a backward pass.
            self.passes.seen.module |= not again
            out, scale = grad, self.context.scaling.scale
            step = self.counters.of(owner).step
            for rule, name in rules:
                if self._is_unfit(out, rule, name, owner):
                    continue
                if isinstance(rule, EditRule):
                    out = self._edit(rule, out, None if again else step, scale, is_grad=True)
                elif not again:
                    self._observe(rule, name, unscaled(out, scale), owner, step, is_grad=True)
        return out if self.context.mode == "act" else grad

    def is_unreadable(self, tensor: Tensor, rules: Sequence[NamedRule], owner: str) -> bool:
        """Return whether a tensor has no numbers to read, so rules leave it alone; warn once."""
        unreadable = _torch.is_unreadable(tensor)
        if unreadable:
            self.warn("unreadable", _UNREADABLE, rules, owner)
        return unreadable

    def _is_unfit(self, tensor: Tensor, rule: Rule, name: str, owner: str) -> bool:
        """Return whether a rule must leave a complex tensor alone; for parameters, binding checks this."""
        if not tensor.is_complex() or not (reason := rule.complex_problem()):
            return False
        text = f"left {name} alone: {reason}; `exclude` it from the rule"
        self.warn("complex", text, [NamedRule(rule, name)], owner)
        return True

    def warn(self, topic: str, text: str, rules: Sequence[NamedRule], owner: str) -> None:
        step = self.counters.of(owner).step
        for rule, _ in rules:
            self.context.event_log.notice_once(topic, text, rule=rule.id, step=step, warn=True)

    def has_edited(self, rule: Rule, tensor: Tensor) -> bool:
        """Return whether a rule already edited this tensor object, or will edit its gradient."""
        # A container returns the tensor of its last child; a rule that matches both must act once.
        return isinstance(rule, EditRule) and rule.id in self._edited.get(tensor, ())

    def mark_edited(self, rule: Rule, tensor: Tensor) -> None:
        # Weak references to parameters would break a model conversion that swaps tensors.
        if isinstance(rule, EditRule) and not isinstance(tensor, nn.Parameter):
            self._edited.setdefault(tensor, set()).add(rule.id)

    def _edit(
        self, rule: Rule, tensor: Tensor, step: int | None, scale: Tensor | None, *, is_grad: bool
    ) -> Tensor:
        """Return an edited value or gradient. ``step`` is ``None`` to repeat an edit that was counted."""
        edit, event_log = self.context.edits[rule.id], self.context.event_log
        if step is not None:
            event_log.count_fired(rule.id, step)
        if edit.by_norm is not None:
            with _torch.aside(tensor) as plain:
                clip = NormClip(edit.by_norm, plain.detach(), scale)
                if step is not None:
                    clip.tell(self.context, rule.id, step)
            return clip.of(tensor)
        if step is not None:
            with torch.no_grad(), _torch.aside(tensor) as plain:
                changed = changes(edit, unscaled(plain, scale))
                event_log.count_changed(rule.id, changed)
            # An unchanged gradient is returned as it is. For a value, autograd must record the edit.
            if changed is False and is_grad:
                return tensor
        return _numbers.on_values(in_true_units(edit.apply, scale), tensor)

    def _observe(
        self, rule: Rule, name: str, tensor: Tensor, owner: str, step: int, *, is_grad: bool
    ) -> None:
        if isinstance(rule, CaptureRule):  # `keep` counts the firing
            with _torch.aside(tensor) as plain:
                self.context.captures.keep(rule, name, step, plain)
        elif is_numeric(tensor):
            if isinstance(rule, ObserverRule):
                if _dist.is_sharded(tensor):
                    self.warn("sharded", _SHARDED, [NamedRule(rule, name)], owner)
                    return
                # Entering a context takes a third of the time of copying a small tensor, so it is avoided.
                if _torch.in_transform():
                    with _torch.aside(tensor) as plain:
                        self.context.recorder.observe(rule, name, step, plain.detach())
                else:
                    self.context.recorder.observe(rule, name, step, tensor.detach())
            else:
                self._flag(rule, name, tensor, owner, fed=is_grad)
            self.context.event_log.count_fired(rule.id, step)

    def _flag(
        self, rule: Rule, name: str, tensor: Tensor, owner: str, *, fed: bool, again: bool = False
    ) -> None:
        if not is_numeric(tensor):
            return
        with _torch.aside(tensor) as plain:
            bad = _numbers.nonfinite(_dist.local(plain))
        flag = Flag(rule, name, partial(self.counters.of, owner), bad, fed=fed)
        if not flag.fed and torch.is_grad_enabled():
            # A leaf gets no hook: the hooks of all passes would pile up on it.
            if tensor.requires_grad and not tensor.is_leaf:
                feeds = FeedsHook(flag)
                flag.graph = weakref.ref(feeds)
                _torch.register_hook(tensor, feeds)
            else:
                flag.waits = True
        self.context.flags.add(flag, again=again)


class FeedsHook:
    """Tensor hook that marks a trap's flag once the flagged value takes part in a backward pass."""

    __torch_unserializable__ = True

    def __init__(self, flag: Flag) -> None:
        self._flag = flag
        self.__name__ = f"{flag.rule.id}:{flag.name}"

    @uncompiled
    def __call__(self, _grad: Tensor | None) -> None:
        self._flag.fed = True


def is_numeric(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
