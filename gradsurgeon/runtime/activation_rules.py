"""What rules do to the values and gradients of activations: tensors of modules, and tagged ones."""

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
from gradsurgeon.runtime.activation_flags import Flag
from gradsurgeon.runtime.backward_watch import BackwardWatch
from gradsurgeon.runtime.compile_support import uncompiled
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.current_pass import is_taken
from gradsurgeon.runtime.edit_effect import NormClip, changes
from gradsurgeon.runtime.step_counter import StepCounter, StepCounters
from gradsurgeon.tensors.loss_scale import in_true_units, unscaled

_UNREADABLE = (
    "left a tensor alone that has no numbers to read (a batch of torch.func.vmap, jacrev or "
    "is_grads_batched; the meta device; torch.export at its trace): nothing was measured or edited there; "
    "compute this part in a loop, and export the model after session.remove()"
)
_SHARDED = (
    "measured nothing of a tensor that is divided over ranks (a DTensor): the whole of it would take a collective "
    "in the middle of a forward or backward pass; log another module, or let this one return its part "
    "(`use_local_output=True`)"
)


class NamedRule(NamedTuple):
    """A rule, and what it calls the tensor that it acts on in records and messages."""

    rule: Rule
    name: str


class Due(NamedTuple):
    """The rules that act at one moment, in file order: on the value of a tensor, then its gradient."""

    values: tuple[NamedRule, ...]
    grads: tuple[NamedRule, ...]


class ModuleSchedule:
    """Which of the rules at one place act in a step: asked in every call, worked out when it changes."""

    def __init__(
        self, rules: Sequence[Rule], owner: str, name: str, counters: ModuleCounters
    ) -> None:
        self.owner = owner
        # Whether a rule names one tensor of a structure.
        self.has_paths = any(rule.ref.path for rule in rules)
        # What the tensor of a rule is takes longer to work out than to act on a small one.
        self._rules = [(NamedRule(rule, name), rule.ref.grad) for rule in rules]
        self._counters = counters
        self._known = _Span(counters.of(owner), counters.all.version, range(0), training=True)

    def now(self, *, training: bool) -> tuple[Due | None, int]:
        """Return what is due, ``None`` for nothing, and the step. Most calls only compare two numbers."""
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
    """What is due in successive steps of a counter, as long as the counters are of this version."""

    counter: StepCounter
    version: int
    steps: range
    training: bool
    due: Due | None = None


class ModuleCounters:
    """The step counter of each module: that of the optimizer which owns its first parameter.

    It can become known as late as after the forward pass, so that whoever needs it asks anew.
    """

    def __init__(self, counters: StepCounters, param_names: Sequence[str]) -> None:
        self.all = counters
        self._first_params: dict[str, int] = {}
        for number, name in enumerate(param_names):
            while name:
                name = name.rpartition(".")[0]  # noqa: PLW2901 # that of the module around it
                self._first_params.setdefault(name, number)

    def of(self, module: str) -> StepCounter:
        if not self._first_params:
            return self.all.common
        # A module without parameters goes by the first one of the model.
        return self.all[self._first_params.get(module, 0)]


@dataclass(eq=False)
class ActivationRules:
    """Runs rules on activations. Each has an owner: the module whose step counter counts."""

    context: Context
    passes: BackwardWatch
    counters: ModuleCounters
    # The rules that have edited a tensor, by id.
    _edited: MutableMapping[Tensor, set[str]] = field(default_factory=WeakTensorKeyDictionary)
    # Replicas of one model run in threads, and autograd calls hooks in one thread per device.
    lock: RLock = field(default_factory=RLock)

    def on_value(self, rules: Sequence[NamedRule], tensor: Tensor, owner: str, step: int) -> Tensor:
        """Run rules on the value of a tensor of any shape and dtype; return the one to go on with."""
        if not rules or self.is_unreadable(tensor, rules, owner):
            return tensor
        # Checkpointing runs forward again inside backward: edits must repeat, records must not.
        again = _torch.graph_task() != -1
        out = tensor
        with self.lock:
            for rule, name in rules:
                if self._is_unfit(out, rule, name, owner):
                    continue
                if isinstance(rule, EditRule):
                    # Ids and masks are values too, but nothing that a bound or a factor is meant for.
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
        # The pass that trains comes after those that take the gradients of single losses: edits must repeat,
        # records must not.
        again = is_taken()
        with self.lock:
            # A session without rules on parameters learns from this that a backward pass is running.
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
        """Tell whether rules have to leave a tensor alone that has no numbers to read; say so once."""
        unreadable = _torch.is_unreadable(tensor)
        if unreadable:
            self.warn("unreadable", _UNREADABLE, rules, owner)
        return unreadable

    def _is_unfit(self, tensor: Tensor, rule: Rule, name: str, owner: str) -> bool:
        """Tell whether a rule has to leave a complex tensor alone, which of parameters is known before."""
        if not tensor.is_complex() or not (reason := rule.complex_problem()):
            return False
        text = f"left {name} alone: {reason}; leave it out by `exclude`"
        self.warn("complex", text, [NamedRule(rule, name)], owner)
        return True

    def warn(self, topic: str, text: str, rules: Sequence[NamedRule], owner: str) -> None:
        step = self.counters.of(owner).step
        for rule, _ in rules:
            self.context.event_log.notice_once(topic, text, rule=rule.id, step=step, warn=True)

    def has_edited(self, rule: Rule, tensor: Tensor) -> bool:
        """Tell whether a rule has edited this very tensor, or is about to edit its gradient."""
        # A container returns the tensor of its last child; a rule that matches both acts once.
        return isinstance(rule, EditRule) and rule.id in self._edited.get(tensor, ())

    def mark_edited(self, rule: Rule, tensor: Tensor) -> None:
        # Weak references on parameters break the conversion of a model by swapping tensors.
        if isinstance(rule, EditRule) and not isinstance(tensor, nn.Parameter):
            self._edited.setdefault(tensor, set()).add(rule.id)

    def _edit(
        self, rule: Rule, tensor: Tensor, step: int | None, scale: Tensor | None, *, is_grad: bool
    ) -> Tensor:
        """Return an edited value or gradient. Without a ``step`` it repeats an edit that was counted."""
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
            # What comes out as it is need not be written; autograd has to know of an edit of a value.
            if changed is False and is_grad:
                return tensor
        return _numbers.on_values(in_true_units(edit.apply, scale), tensor)

    def _observe(
        self, rule: Rule, name: str, tensor: Tensor, owner: str, step: int, *, is_grad: bool
    ) -> None:
        if isinstance(rule, CaptureRule):  # counts by itself
            with _torch.aside(tensor) as plain:
                self.context.captures.keep(rule, name, step, plain)
        elif is_numeric(tensor):
            if isinstance(rule, ObserverRule):
                if _dist.is_sharded(tensor):
                    self.warn("sharded", _SHARDED, [NamedRule(rule, name)], owner)
                    return
                # Asked here: to enter a context takes a third of the time of copying a small tensor.
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
            # On a leaf the hooks of all passes would stay.
            if tensor.requires_grad and not tensor.is_leaf:
                feeds = FeedsHook(flag)
                flag.graph = weakref.ref(feeds)
                _torch.register_hook(tensor, feeds)
            else:
                flag.waits = True
        self.context.flags.add(flag, again=again)


class FeedsHook:
    """Tensor hook that tells a trap that a value takes part in a backward pass."""

    __torch_unserializable__ = True

    def __init__(self, flag: Flag) -> None:
        self._flag = flag
        self.__name__ = f"{flag.rule.id}:{flag.name}"

    @uncompiled
    def __call__(self, _grad: Tensor | None) -> None:
        self._flag.fed = True


def is_numeric(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
