"""Rules on single tensors that exist for a moment: of modules and of tags."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import RLock

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurgeon import _numbers, _statistics, _torch
from gradsurgeon.actions import ByNorm, Rule
from gradsurgeon.match import compile_pattern
from gradsurgeon.planning import ROOT
from gradsurgeon.runtime.clock import Clock
from gradsurgeon.runtime.compiled import in_backward
from gradsurgeon.runtime.deciding import changes
from gradsurgeon.runtime.flags import Flag
from gradsurgeon.runtime.passes import Passes
from gradsurgeon.runtime.scaling import in_true_units, unscaled
from gradsurgeon.runtime.shortening import Shortening
from gradsurgeon.runtime.state import State
from gradsurgeon.runtime.timetable import Timetable
from gradsurgeon.store import Key

_BATCHED = (
    "left a tensor of vmap alone, which stands for a whole batch and cannot be looked into "
    "(torch.func.vmap, jacrev, is_grads_batched): compute this part in a loop if the rule is to act there"
)
_HOLLOW = (
    "left a tensor alone that has a shape and no numbers (the meta device, or torch.export at its trace): "
    "nothing was measured or edited there; export the model after session.remove()"
)


@dataclass(slots=True)
class Arrival:
    """A hook on a tensor that waits for its gradient, to be missed if none comes."""

    name: str
    rules: tuple[str, ...]
    owner: str
    tensor: weakref.ref[Tensor]
    version: int


@dataclass(eq=False)
class Sites:
    """Acts on the values and gradients of tensors as they come along."""

    state: State
    passes: Passes
    # The clock of the optimizer that owns a module; it may become known after the forward pass.
    clock_of: Callable[[str], Clock]
    _acted: dict[int, tuple[weakref.ref[Tensor], set[str]]] = field(default_factory=dict)
    # Each leaves with its tensor: a loop that only predicts never comes to an update.
    _waiting: dict[int, Arrival] = field(default_factory=dict)
    _tagged: dict[str, Timetable] = field(default_factory=dict)
    _on_leaves: dict[str, list[RemovableHandle]] = field(default_factory=dict)
    _keys: dict[tuple[str, str], list[Key]] = field(default_factory=dict)
    # Replicas of one model run in threads, and autograd calls hooks in one thread per device.
    _lock: RLock = field(default_factory=RLock)

    def value(
        self, rules: Sequence[Rule], names: Mapping[str, str], tensor: Tensor, owner: str
    ) -> Tensor:
        """Run rules on the value of a tensor; return the tensor to go on with.

        Args:
            rules: in file order.
            names: by rule id, what the rule calls the tensor in records.
            tensor: of any shape and dtype.
            owner: the module whose clock counts.
        """
        if not rules or self.out_of_reach(rules, tensor, owner):
            return tensor
        # Checkpointing runs forward again inside backward: edits must repeat, records must not.
        again = _torch.graph_task() != -1
        out = tensor
        with self._lock:
            for rule in rules:
                if rule.role == "edit":
                    out = self._edit_value(rule, out, owner, count=not again)
                elif not again:
                    self._look(rule, names[rule.id], out, owner)
                elif rule.role == "trap" and not self.state.flags.is_known(rule.id, names[rule.id]):
                    self._flag(rule, names[rule.id], out, owner, again=True)
        return out if self.state.mode == "act" else tensor

    def _edit_value(self, rule: Rule, tensor: Tensor, owner: str, *, count: bool) -> Tensor:
        # Ids and masks are values too, but nothing that a bound or a factor is meant for.
        if not is_numeric(tensor) or not self._first(rule, tensor):
            return tensor
        edit = self.state.edits[rule.id]
        step = self.clock_of(owner).step
        if edit.by_norm is not None:
            out = self._shortened(rule, edit.by_norm, tensor, step if count else None)
        else:
            if count:
                with torch.no_grad(), _torch.aside(tensor) as seen:
                    self.state.journal.altered(rule.id, changes(edit, seen))
            out = _numbers.on_values(edit.apply, tensor)
        if count:
            self.state.journal.fired(rule.id, step)
        self._mark(rule, out)
        return out

    def gradient(
        self, rules: Sequence[Rule], names: Mapping[str, str], tensor: Tensor, owner: str
    ) -> None:
        """Put one hook on a tensor that runs rules on its gradient."""
        mine = [rule for rule in rules if rule.role != "edit" or self._first(rule, tensor)]
        if not mine or self.out_of_reach(mine, tensor, owner):
            return
        for rule in mine:
            self._mark(rule, tensor)
        key = self._wait(tuple(rule.id for rule in mine), names[mine[0].id], tensor, owner)
        hook = GradHook(self, tuple(mine), names, owner, key)
        handle = _torch.register_hook(tensor, hook)
        if tensor.is_leaf:
            self._replace(hook.__name__, handle)

    def _wait(self, rules: tuple[str, ...], name: str, tensor: Tensor, owner: str) -> int:
        """Note that a tensor waits for its gradient; return what the note goes by."""
        key = next(_numbers_of_notes)
        # Weak references on parameters break the conversion of a model by swapping tensors.
        if not isinstance(tensor, nn.Parameter):
            reference = weakref.ref(tensor, partial(self._waiting.pop, key))
            written = tensor._version  # noqa: SLF001 # counts writes
            self._waiting[key] = Arrival(name, rules, owner, reference, written)
        return key

    def _replace(self, label: str, handle: RemovableHandle) -> None:
        """Let a hook take the place of the one that an earlier forward has put on the same leaf.

        Other tensors go with their graph; a leaf stays, and its hooks would act once for each forward.
        """
        table = handle.hooks_dict_ref()
        there = self._on_leaves.setdefault(label, [])
        for old in [one for one in there if one.hooks_dict_ref() in (None, table)]:
            old.remove()
            there.remove(old)
        there.append(handle)

    def let_go(self) -> None:
        """Take the hooks off tensors that outlive their graph."""
        for handles in self._on_leaves.values():
            for handle in handles:
                handle.remove()
        self._on_leaves.clear()

    def tag(self, tensor: Tensor, name: str) -> Tensor:
        """Run the rules on tags on a tensor that the script has tagged."""
        if self.state.paused or not self.state.program.tags:
            return tensor
        if name not in self._tagged:
            rules = [
                rule
                for rule in self.state.program.tags
                if any(pattern.matches(name) for pattern in rule.patterns)
                and not any(compile_pattern(text).matches(name) for text in rule.exclude)
            ]
            self._tagged[name] = Timetable(rules, ROOT)
        due = self._tagged[name].due(self.state, self.clock_of, training=True)
        if due is None:
            return tensor
        names = dict.fromkeys((rule.id for rule in (*due.values, *due.grads)), name)
        out = self.value(due.values, names, tensor, ROOT)
        if due.grads and out.requires_grad and torch.is_grad_enabled():
            self.gradient(due.grads, names, out, ROOT)
        return out

    def out_of_reach(self, rules: Sequence[Rule], tensor: Tensor, owner: str) -> bool:
        """Tell whether rules have to leave a tensor alone that cannot be looked into; say so once."""
        if _torch.is_batched(tensor):
            topic, text = "vmap", _BATCHED
        elif _torch.is_hollow(tensor):
            topic, text = "hollow", _HOLLOW
        else:
            return False
        for rule in rules:
            step = self.clock_of(owner).step
            self.state.journal.once(topic, text, rule=rule.id, step=step, warn=True)
        return True

    def missed(self, clock: Clock) -> None:
        """Say which gradients of a step never came because their tensor was written in place."""
        for key, arrival in list(self._waiting.items()):
            if self.clock_of(arrival.owner) is not clock:
                continue
            self._waiting.pop(key, None)
            tensor = arrival.tensor()
            if tensor is not None and tensor._version != arrival.version:  # noqa: SLF001
                text = (
                    f"{arrival.name} was written in place by what follows it, so that no gradient "
                    "arrived: let the next operation work out of place, or name another module"
                )
                for rule in arrival.rules:
                    self.state.journal.once("in-place", text, rule=rule, step=clock.step, warn=True)

    def arrived(self, key: int) -> None:
        """Note that a gradient has come."""
        self._waiting.pop(key, None)

    def on_gradient(
        self, rules: Sequence[Rule], names: Mapping[str, str], grad: Tensor, owner: str
    ) -> Tensor:
        """Run rules on the gradient of a tensor; return the gradient to go on with."""
        with self._lock:
            # A session without rules on parameters learns from this that a backward pass is running.
            self.passes.current()
            out = self._on_gradient(rules, names, grad, owner)
        return out if self.state.mode == "act" else grad

    def _on_gradient(
        self, rules: Sequence[Rule], names: Mapping[str, str], grad: Tensor, owner: str
    ) -> Tensor:
        out, scale = grad, self.state.scaling.scale
        for rule in rules:
            if rule.role == "edit":
                edit = self.state.edits[rule.id]
                step = self.clock_of(owner).step
                self.state.journal.fired(rule.id, step)
                if edit.by_norm is not None:
                    out = self._shortened(rule, edit.by_norm, out, step, scale)
                    continue
                with torch.no_grad(), _torch.aside(out) as seen:
                    changed = changes(edit, unscaled(seen, scale))
                    self.state.journal.altered(rule.id, changed)
                if changed is not False:
                    out = _numbers.on_values(in_true_units(edit.apply, scale), out)
            else:
                self._look(rule, names[rule.id], unscaled(out, scale), owner)
        return out

    def _shortened(
        self,
        rule: Rule,
        by_norm: ByNorm,
        tensor: Tensor,
        step: int | None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Shorten a tensor where its norm says so; count it for a step, if one is given."""
        with _torch.aside(tensor) as seen:
            shortening = Shortening(by_norm, seen.detach(), scale)
            if step is not None:
                shortening.tell(self.state, rule.id, step)
        return shortening.of(tensor)

    def _look(self, rule: Rule, name: str, tensor: Tensor, owner: str) -> None:
        state, clock = self.state, self.clock_of(owner)
        if rule.role == "capture":
            with _torch.aside(tensor) as seen:
                state.captures.keep(rule, name, clock.step, seen)
        elif not is_numeric(tensor):
            return
        elif rule.role == "observe":
            with torch.no_grad(), _torch.aside(tensor) as seen:
                plain = seen.detach()
                for key in self._keys_of(rule, name):
                    value = _statistics.statistic(key.stat, plain)
                    state.recorder.add(key, clock.step, _ALONE, value, replace=False)
            state.journal.fired(rule.id, clock.step)
        else:
            self._flag(rule, name, tensor, owner)

    def _keys_of(self, rule: Rule, name: str) -> list[Key]:
        keys = self._keys.get((rule.id, name))
        if keys is None:
            stats: tuple[str, ...] = getattr(rule, "stats", ())
            keys = [Key(rule.id, stat, rule.point, (name,)) for stat in stats]
            self._keys[rule.id, name] = keys
        return keys

    def _flag(
        self, rule: Rule, name: str, tensor: Tensor, owner: str, *, again: bool = False
    ) -> None:
        if not is_numeric(tensor):
            return
        with torch.no_grad(), _torch.aside(tensor) as seen:
            bad = _numbers.nonfinite(seen)
        ref = rule.ref
        flag = Flag(rule, name, str(ref), partial(self.clock_of, owner), bad, fed=ref.grad or again)
        if flag.fed or not torch.is_grad_enabled():
            pass
        elif not tensor.requires_grad:
            flag.waits = True
        else:
            feeds = Feeds(flag)
            flag.graph = weakref.ref(feeds)
            _torch.register_hook(tensor, feeds)
        self.state.flags.add(flag, again=again)
        if not again:
            self.state.journal.fired(rule.id, self.clock_of(owner).step)

    def _first(self, rule: Rule, tensor: Tensor) -> bool:
        """Tell whether the rule has yet to edit this very tensor.

        A container returns the tensor of its last child; a rule that matches both acts once.
        """
        entry = self._acted.get(id(tensor))
        return entry is None or entry[0]() is not tensor or rule.id not in entry[1]

    def _mark(self, rule: Rule, tensor: Tensor) -> None:
        # Weak references on parameters break the conversion of a model by swapping tensors.
        if rule.role != "edit" or isinstance(tensor, nn.Parameter):
            return
        entry = self._acted.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            key, acted = id(tensor), self._acted
            entry = (weakref.ref(tensor, lambda _: acted.pop(key, None)), set())
            acted[key] = entry
        entry[1].add(rule.id)


# What waits for its gradient goes by these.
_numbers_of_notes = count()
# The columns of a row of one.
_ALONE = (0,)


class Feeds:
    """Tensor hook that tells a trap that a value takes part in a backward pass."""

    __torch_unserializable__ = True

    def __init__(self, flag: Flag) -> None:
        self._flag = flag
        self.__name__ = f"{flag.rule.id}:{flag.name}"

    @in_backward
    def __call__(self, _grad: Tensor | None) -> None:
        """Take notice of the backward pass."""
        self._flag.fed = True


class GradHook:
    """Tensor hook on an activation: the rules on its gradient, in file order."""

    __torch_unserializable__ = True

    def __init__(
        self,
        sites: Sites,
        rules: tuple[Rule, ...],
        names: Mapping[str, str],
        owner: str,
        key: int,
    ) -> None:
        self._sites = weakref.ref(sites)
        self._rules = rules
        self._names = names
        self._owner = owner
        self._key = key
        self.__name__ = f"{'+'.join(rule.id for rule in rules)}:{owner}"

    @in_backward
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Return the edited gradient, ``None`` to leave it as it is."""
        sites = self._sites()
        if sites is None:
            return None
        sites.arrived(self._key)
        if grad is None or sites.state.paused or sites.out_of_reach(self._rules, grad, self._owner):
            return None
        out = sites.on_gradient(self._rules, self._names, grad, self._owner)
        return None if out is grad else out


def is_numeric(tensor: Tensor) -> bool:
    """Tell whether a tensor holds numbers that can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()
