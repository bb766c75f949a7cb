"""Hooks on modules: what they take and what they return, as values and as gradients.

No full backward hooks: they break where a module works in place, and miss mappings. The gradient of
an output is had by a hook on the output tensor; that of an input by a hook on a view of it that this
module alone consumes, so that it is this module's own contribution and not the sum over consumers.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradsurgeon.actions import Rule, spelled
from gradsurgeon.compiler import ModuleProgram
from gradsurgeon.runtime.compiled import on_site
from gradsurgeon.runtime.sites import Sites, is_numeric
from gradsurgeon.runtime.structure import Path, describe, resolve, tensors_in, with_tensors
from gradsurgeon.runtime.timetable import Due, Timetable


class ModuleHook:
    """A hook on a module that reaches its session weakly."""

    def __init__(self, sites: Sites, name: str, rules: Sequence[Rule]) -> None:
        self._sites = weakref.ref(sites)
        self._owner = name
        self._timetable = Timetable(rules, name)
        # Where a module takes or returns one tensor, and no rule names a part, all is known ahead.
        self._whole = not any(rule.ref.path for rule in rules)
        self._names = dict.fromkeys((rule.id for rule in rules), name)

    def _due(self, module: nn.Module) -> tuple[Sites, Due] | None:
        """Return what there is to do, ``None`` if nothing."""
        sites = self._sites()
        if sites is None or sites.state.paused:
            return None
        due = self._timetable.due(sites.state, sites.clock_of, training=module.training)
        return None if due is None else (sites, due)

    def _act(
        self,
        sites: Sites,
        due: Due,
        structure: Any,
        *,
        paths: Callable[[Path], Path],
        view: Callable[[Tensor], bool],
    ) -> dict[Path, Tensor]:
        """Run rules on the tensors of a structure; return those to be exchanged, by path."""
        exchanged: dict[Path, Tensor] = {}
        done: dict[tuple[int, tuple[str, ...]], Tensor] = {}
        rules = (*due.values, *due.grads)
        chosen = {rule.id: self._chosen(sites, rule, structure, paths) for rule in rules}
        for path, tensor in tensors_in(structure):
            values, grads = (
                tuple(rule for rule in some if _lies_in(path, chosen[rule.id])) for some in due
            )
            if not values and not grads:
                continue
            # One tensor in several places, as query, key and value, is acted on once.
            key = (id(tensor), tuple(rule.id for rule in (*values, *grads)))
            if key not in done:
                # A rule that names one tensor by path gives it the name of the module.
                names = {
                    rule.id: self._name(structure, path, chosen[rule.id] or ())
                    for rule in (*values, *grads)
                }
                done[key] = self._one(sites, Due(values, grads), names, tensor, view)
            if done[key] is not tensor:
                exchanged[path] = done[key]
        return exchanged

    def _one(
        self,
        sites: Sites,
        due: Due,
        names: Mapping[str, str],
        tensor: Tensor,
        view: Callable[[Tensor], bool],
    ) -> Tensor:
        out = sites.value(due.values, names, tensor, self._owner)
        if due.grads and is_numeric(out) and out.requires_grad and torch.is_grad_enabled():
            if out is tensor and view(tensor):
                out = tensor.view_as(tensor)
            sites.gradient(due.grads, names, out, self._owner)
        return out

    def _chosen(
        self,
        sites: Sites,
        rule: Rule,
        structure: Any,
        paths: Callable[[Path], Path],
    ) -> Path | None:
        wanted = paths(rule.ref.path)
        found = resolve(structure, wanted)
        if found is None:
            text = f"{self._owner} has no {rule.ref}: its {rule.ref.side} is {describe(structure)}"
            step = sites.clock_of(self._owner).step
            sites.state.journal.once("path", text, rule=rule.id, step=step, warn=True)
        return found

    def _name(self, structure: Any, path: Path, chosen: Path) -> str:
        del structure
        return f"{self._owner}{spelled(path[len(chosen) :])}"


class InputHook(ModuleHook):
    """Forward pre-hook: rules on what a module takes."""

    @on_site
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with exchanged tensors, ``None`` to leave them as they are."""
        if (found := self._due(module)) is None:
            return None
        sites, due = found

        def view(_: Tensor) -> bool:
            # On a view, an operation in place would leave the hook on a tensor that no longer counts.
            return getattr(module, "inplace", False) is not True

        if self._whole and not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            one = self._one(sites, due, self._names, args[0], view)
            return None if one is args[0] else ((one,), kwargs)
        arguments = _Arguments(module, args, kwargs)
        new = self._act(sites, due, arguments.named, paths=arguments.path, view=view)
        return arguments.exchange(new) if new else None

    def _name(self, structure: Any, path: Path, chosen: Path) -> str:
        if not chosen and len(list(tensors_in(structure))) == 1:
            return self._owner
        return super()._name(structure, path, chosen)


class OutputHook(ModuleHook):
    """Forward hook: rules on what a module returns."""

    @on_site
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Return the output with exchanged tensors, ``None`` to leave it as it is."""
        if (found := self._due(module)) is None:
            return None
        sites, due = found

        def view(tensor: Tensor) -> bool:
            # A module may return its input, or a parameter. What others make of it must be told from
            # its output, and a hook on a leaf would stay there.
            return tensor.is_leaf or any(one is tensor for _, one in tensors_in((args, kwargs)))

        if self._whole and isinstance(output, Tensor):
            one = self._one(sites, due, self._names, output, view)
            return None if one is output else one
        new = self._act(sites, due, output, paths=lambda path: path, view=view)
        return with_tensors(output, new) if new else None


class _Arguments:
    """Arguments of a call under the names of the signature, positional and by keyword alike."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._names = _positional(type(module), len(args))
        self.named: dict[int | str, Any] = dict(enumerate(args))
        self.named.update(kwargs)

    def path(self, path: Path) -> Path:
        """Return a path with its first step as it stands in this call."""
        if not path:
            return path
        first = path[0]
        if isinstance(first, str) and first not in self._kwargs and first in self._names:
            index = self._names.index(first)
            first = index if index < len(self._args) else first
        elif isinstance(first, int) and len(self._args) <= first < len(self._names):
            first = self._names[first]
        return (first, *path[1:])

    def exchange(self, new: Mapping[Path, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with exchanged tensors."""
        whole = with_tensors(self.named, new)
        args = tuple(whole[index] for index in range(len(self._args)))
        return args, {key: whole[key] for key in self._kwargs}


def _positional(kind: type[nn.Module], count: int) -> list[str]:
    """Return the names of the positional parameters of ``forward``, without ``self``."""
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in parameters if one.kind in kinds]
    return names if len(names) >= count else []


def _lies_in(path: Path, chosen: Path | None) -> bool:
    return chosen is not None and path[: len(chosen)] == chosen


class _Copied:
    """What copies and saved files get of a table of hooks: the entries that are not ours.

    Torch copies and pickles the tables of a module along with it. This stands on the table itself as
    ``__reduce__``, which whoever copies or pickles asks it for, so that the table remains the very
    one that handles of the script hold, of the type that torch and its compiler expect.
    """

    def __init__(self, table: OrderedDict[int, Any]) -> None:
        self._table = weakref.ref(table)
        self.ours: set[int] = set()

    def __call__(self) -> tuple[Any, ...]:
        """Return what to build the table of the copy from, as ``__reduce__`` does."""
        table = self._table()
        items = () if table is None else table.items()
        theirs = [(number, entry) for number, entry in items if number not in self.ours]
        return type(table), (), None, None, iter(theirs)


def _tables(handle: RemovableHandle) -> list[OrderedDict[int, Any]]:
    """Return the tables of a module in which a hook has entries."""
    found = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    return [table for table in found if table is not None]


def _leave_behind(handle: RemovableHandle) -> RemovableHandle:
    """Keep a hook out of the copies of its module."""
    for table in _tables(handle):
        copied = vars(table).setdefault("__reduce__", _Copied(table))
        copied.ours.add(handle.id)
    return handle


def _take_off(handle: RemovableHandle) -> None:
    """Take a hook off its module, and with the last of ours what kept it out of copies."""
    tables = _tables(handle)
    handle.remove()
    for table in tables:
        copied = vars(table)["__reduce__"]
        copied.ours.discard(handle.id)
        if not copied.ours:
            del vars(table)["__reduce__"]


class ModuleHooks:
    """The hooks of one session on the modules of its model."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._on: dict[str, tuple[weakref.ref[nn.Module], list[RemovableHandle]]] = {}

    def attach(self, modules: Mapping[str, nn.Module]) -> None:
        """Put the hooks of the program on modules by name; on failure none stays."""
        try:
            for program in self._sites.state.program.modules:
                self._put(program, modules[program.name])
        except BaseException:
            self.detach()
            raise

    def refresh(self, modules: Mapping[str, nn.Module]) -> list[tuple[str, bool]]:
        """Put the hooks on the modules that now stand under the names.

        Returns:
            The names of those that were exchanged, and whether there is one in their place.
        """
        found = []
        for program in self._sites.state.program.modules:
            module = modules.get(program.name)
            hooked = self._on.get(program.name)
            if (None if hooked is None else hooked[0]()) is not module:
                self._take_off(program.name)
                if module is not None:
                    self._put(program, module)
                found.append((program.name, module is not None))
        return found

    def detach(self) -> None:
        """Take all hooks off."""
        for name in list(self._on):
            self._take_off(name)
        self._sites.let_go()

    def _put(self, program: ModuleProgram, module: nn.Module) -> None:
        handles: list[RemovableHandle] = []
        self._on[program.name] = (weakref.ref(module), handles)
        if program.on_input:
            before = InputHook(self._sites, program.name, program.on_input)
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            handles.append(_leave_behind(handle))
        if program.on_output:
            after = OutputHook(self._sites, program.name, program.on_output)
            handle = module.register_forward_hook(after, with_kwargs=True)
            handles.append(_leave_behind(handle))

    def _take_off(self, name: str) -> None:
        _, handles = self._on.pop(name, (None, []))
        for handle in handles:
            _take_off(handle)
