"""Where a number that is not finite comes from: every operation of a replay is asked.

A *birth* is a NaN that came out of an operation with none among what went in. An infinity is one only if
it was made from finite tensors: masks of attention hold infinities that were written there on purpose.
What is not finite is followed by the memory that holds it, through all operations, from its birth to the
gradients of the parameters, so that what spoils nothing is not blamed.
"""

from __future__ import annotations

import math
import pdb  # noqa: T100 # for `replay --pdb`
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gradsurgeon import _dist, _torch
from gradsurgeon.diagnosis import Line, TensorFacts
from gradsurgeon.forensics.operations import (
    elements,
    ends,
    facts,
    is_real,
    lines_here,
    lines_of_node,
    named_tensors,
    nonfinite_kind,
    tensors_of,
)
from gradsurgeon.planning.manifest import ROOT

Kind = Literal["NaN", "Inf"]
Direction = Literal["forward", "backward"]

# What they return has not been written yet.
_UNWRITTEN = ("empty", "new_empty", "_efficientzerotensor", "resize")
_COPIES = ("clone", "_to_copy", "copy_", "detach", "contiguous")
_COLLECTIVE = ("c10d", "_c10d_functional")
# The last magnitudes before a birth.
_HISTORY = 20
# Births whose operation can be repeated: each keeps what went in.
_REPEATABLE = 64
# A tensor that is larger is not kept from before an operation that writes into it.
_LARGEST_COPY = 2**28


@dataclass(frozen=True, slots=True)
class Call:
    """An operation and what it was given, to be repeated.

    Attributes:
        func: as the dispatcher has it.
        name: of the operation.
        args: as they were before it, where it has written over them.
        kwargs: the same.
        written: the tensors that it has written over.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What was not finite before any operation: a weight, an input, a gradient from outside, a number.

    ``intended`` of infinities that the script wrote: nobody is to blame for them.
    """

    when: int
    what: Literal["weight", "buffer", "input", "output gradient", "literal", "unknown"]
    name: str
    facts: TensorFacts | None = None
    lines: tuple[Line, ...] = ()
    intended: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Birth:
    """An operation that made what is not finite out of finite tensors."""

    when: int
    kind: Kind
    operation: str
    direction: Direction
    module: str
    module_type: str
    node: str
    lines: tuple[Line, ...]
    inputs: tuple[TensorFacts, ...]
    output: TensorFacts
    output_number: int
    history: tuple[tuple[str, float], ...]
    call: Call | None


Source = Origin | Birth


@dataclass(slots=True, eq=False)
class ModuleCalls:
    """Which module runs, and which has built a node of the graph, told by the numbers of the nodes."""

    running: list[tuple[str, str]] = field(default_factory=list)
    # By first and last number, outer ones later.
    spans: list[tuple[int, int, str, str]] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)

    def enter(self, name: str, type_name: str) -> None:
        self.running.append((name, type_name))
        self.begun.append(_next_node())

    def leave(self) -> None:
        name, type_name = self.running.pop()
        self.spans.append((self.begun.pop(), _next_node(), name, type_name))

    def of_node(self, number: int) -> tuple[str, str]:
        for first, end, name, type_name in self.spans:
            if first <= number < end:
                return name, type_name
        return "", ""


def _next_node() -> int:
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001 # numbers nodes


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types there
    """Follows what is not finite through the operations that run under it, forward and backward."""

    def __init__(self, modules: ModuleCalls, stop_at: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self._modules = modules
        self._stop_at = stop_at
        self._when = 0
        self._history: deque[tuple[str, float]] = deque(maxlen=_HISTORY)
        # By storage; the storage is kept, so that no other one gets its address.
        self._sources: dict[int, tuple[Any, list[_Entry]]] = {}
        # Memory that the replay has made, that it has not written to yet, and what it has written over.
        self._made: dict[int, Any] = {}
        self._unwritten: set[int] = set()
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept = 0

    def seed(
        self,
        what: Literal["weight", "buffer", "input", "output gradient"],
        name: str,
        tensor: Tensor,
    ) -> Origin | None:
        """Note a tensor that is not finite before the operations begin, or between them."""
        with _disable_current_modes():
            kind = nonfinite_kind(tensor)
            measured = facts(tensor, name) if kind else None
        if not kind:
            return None
        # An infinity in an input or a buffer can be a mask.
        intended = kind == "Inf" and what in ("input", "buffer")
        origin = Origin(self._moment(), what, name, measured, intended=intended)
        self._remember(tensor, kind, origin)
        return origin

    def made(self, tensors: Iterable[Tensor]) -> None:
        """Note memory that belongs to the replay."""
        for tensor in tensors:
            storage = _place_of(tensor)[0]
            self._made[storage._cdata] = storage  # noqa: SLF001 # what two tensors share

    def source_of(self, tensor: Tensor) -> Source | None:
        """Return what made a tensor non-finite, ``None`` where it is finite."""
        with _disable_current_modes():
            kind = nonfinite_kind(tensor)
            if not kind:
                return None
            return _first_to_blame(self._known(tensor, kind)) or Origin(
                self._when, "unknown", "", facts(tensor)
            )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        named, name = kwargs or {}, name_of(func)
        if name.startswith(_COLLECTIVE):
            raise RuntimeError(f"{name} talks to other ranks, which do not take part in the replay")
        if name.removeprefix("aten.").startswith(_UNWRITTEN):
            out = func(*args, **named)
            fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.made(fresh)
            self._unwritten.update(_place_of(tensor)[0]._cdata for tensor in fresh)  # noqa: SLF001 # as above
            return out
        written = _written(func, args, named)
        for tensor in written:
            self._protect(tensor)
        before = {id(tensor): self._before(tensor) for tensor in written}
        out = func(*args, **named)
        if _is_view(func):
            return out
        call = _as_given(func, args, named, before)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.made(outputs)
        outputs += [t for t in written if not any(t is output for output in outputs)]
        measured = [
            self._judge(call, output, number)
            for number, output in enumerate(outputs)
            if is_real(output) and not output.is_meta
        ]
        # From here on it holds what was written.
        self._unwritten.difference_update(_place_of(t)[0]._cdata for t in written)  # noqa: SLF001 # as above
        finite = [largest for largest in measured if largest is not None]
        if finite and name.removeprefix("aten.") not in _COPIES:
            module = self._place()[0]
            label = name if module in ("", ROOT) else f"{module}: {name}"
            self._history.append((label, max(finite)))
        return out

    def _judge(self, call: Call, output: Tensor, number: int) -> float | None:
        """Return the largest magnitude of what an operation gave; note what made it non-finite, if it is."""
        values = elements(output)
        if not values.numel():
            return None
        low, high = ends(values)
        if math.isfinite(low) and math.isfinite(high):
            self._forget(output)
            return max(abs(low), abs(high))
        kind: Kind = "NaN" if math.isnan(low) or math.isnan(high) else "Inf"
        self._remember(output, kind, self._source(call, kind, output, number))
        return None

    def _before(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor as it is before an operation writes into it; memory that holds nothing yet as zeros."""
        part = elements(tensor)
        if tensor.is_meta or part.numel() * part.element_size() > _LARGEST_COPY:
            return None
        copy = tensor.detach().clone()
        unwritten = _place_of(tensor)[0]._cdata in self._unwritten  # noqa: SLF001 # as above
        return torch.zeros_like(copy) if unwritten else copy

    def _source(self, call: Call, kind: Kind, output: Tensor, number: int) -> Source:
        tensors = tensors_of(call.args, call.kwargs)
        bad = [(found, tensor) for tensor in tensors if (found := nonfinite_kind(tensor))]
        worst = "NaN" if any(found == "NaN" for found, _ in bad) else "Inf"
        # What was written over is known by the tensor that was given.
        given = [tensor for found, tensor in bad if found == worst]
        given += [tensor for tensor in call.written if bad]
        first = _first_to_blame([s for tensor in given for s in self._known(tensor, worst)])
        if bad and (worst == "NaN" or kind == "Inf"):
            where = facts(given[0])
            return first or Origin(self._moment(), "unknown", call.name, where)
        if first is not None and not (isinstance(first, Origin) and first.intended):
            # The NaN follows from an infinity that was made, or came in, before.
            return first
        literals = [n for n in tree_leaves((call.args, call.kwargs)) if _is_nonfinite(n)]
        if kind == "Inf" and (literals or not tensors):
            return Origin(
                self._moment(),
                "literal",
                call.name,
                facts(output),
                lines=lines_here(),
                intended=True,
            )
        if kind == "NaN" and not bad and (any(map(math.isnan, literals)) or not tensors):
            return Origin(self._moment(), "literal", call.name, facts(output), lines=lines_here())
        return self._birth(call, kind, output, number)

    def _birth(self, call: Call, kind: Kind, output: Tensor, number: int) -> Birth:
        node = _torch.current_node()
        module, module_type = self._place()
        lines = lines_here()
        if node is not None and not self._modules.running:
            lines = lines or lines_of_node(node)
        self._kept += 1
        when = self._moment()
        if when == self._stop_at:
            _stand_at(call, output, lines)
        return Birth(
            when=when,
            kind=kind,
            operation=call.name,
            direction="backward" if node is not None and not self._modules.running else "forward",
            module=module,
            module_type=module_type,
            node="" if node is None else node.name(),
            lines=lines,
            inputs=tuple(
                facts(tensor, argument)
                for argument, tensor in named_tensors(call.func, call.args, call.kwargs)
            ),
            output=facts(output),
            output_number=number,
            history=tuple(self._history),
            call=call if self._kept <= _REPEATABLE else None,
        )

    def _place(self) -> tuple[str, str]:
        """Return the module that runs, or the one that has built the node that runs."""
        if self._modules.running:
            return self._modules.running[-1]
        node = _torch.current_node()
        return ("", "") if node is None else self._modules.of_node(node._sequence_nr())  # noqa: SLF001

    def _moment(self) -> int:
        self._when += 1
        return self._when

    def _remember(self, tensor: Tensor, kind: str, source: Source) -> None:
        storage, first, end = _place_of(tensor)
        self._forget(tensor)
        entry = _Entry(first, end, kind, source)
        self._sources.setdefault(storage._cdata, (storage, []))[1].append(entry)  # noqa: SLF001 # what two tensors share

    def _forget(self, tensor: Tensor) -> None:
        """Forget what was not finite where an operation has written something else."""
        storage, first, end = _place_of(tensor)
        known = self._sources.get(storage._cdata)  # noqa: SLF001 # as above
        if known is not None and tensor.is_contiguous():
            known[1][:] = [e for e in known[1] if not (first <= e.first and e.end <= end)]

    def _known(self, tensor: Tensor, kind: str) -> list[Source]:
        """Return what has made a tensor NaN, or infinite, as far as that is known."""
        storage, first, end = _place_of(tensor)
        known = self._sources.get(storage._cdata, (None, []))[1]  # noqa: SLF001 # as above
        there = [e for e in known if e.first < end and first < e.end]
        return [e.source for e in there if e.kind == kind] or [e.source for e in there]

    def _protect(self, tensor: Tensor) -> None:
        """Copy what an operation is about to write into, unless the replay itself has made it."""
        storage = _place_of(tensor)[0]
        if storage._cdata not in self._made and storage._cdata not in self._saved:  # noqa: SLF001 # as above
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._saved[storage._cdata] = whole, whole.clone()  # noqa: SLF001 # as above

    def restore(self) -> None:
        """Put back what the replay has written over that it had not made itself."""
        with torch.no_grad():
            for whole, before in self._saved.values():
                whole.copy_(before)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where in a storage something is not finite, as element numbers, and what made it so."""

    first: int
    end: int
    kind: str
    source: Source


def _place_of(tensor: Tensor) -> tuple[Any, int, int]:
    """Return the storage of a tensor, and between which of its bytes it lies."""
    part = _dist.local(tensor.detach())
    if part.layout == torch.sparse_coo:
        part = part._values()  # noqa: SLF001 # no copy
    elif part.layout != torch.strided:
        part = part.values()
    size = part.element_size()
    first = int(part.storage_offset()) * size
    reach = sum((int(n) - 1) * int(by) for n, by in zip(part.shape, part.stride(), strict=True))
    return part.untyped_storage(), first, first + (reach + 1) * size if part.numel() else first


def name_of(func: Any) -> str:
    schema = getattr(func, "_schema", None)
    name = str(func) if schema is None else schema.name
    return str(name).replace("::", ".")


def _is_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    shown = [r for r in schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    return len(shown) > 0


def _first_to_blame(sources: Iterable[Source]) -> Source | None:
    """Return the earliest source; what the script meant to be infinite only if there is nothing else."""
    in_order = sorted(set(sources), key=lambda source: source.when)
    blamed = [s for s in in_order if not (isinstance(s, Origin) and s.intended)]
    return next(iter(blamed or in_order), None)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes into."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _as_given(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Mapping[int, Tensor | None]
) -> Call:
    """Return a call with what was written over as it was before."""
    if not before:
        return Call(func, name_of(func), args, kwargs)
    written: list[Tensor] = []

    def earlier(value: Any) -> Any:
        if not (isinstance(value, Tensor) and id(value) in before):
            return value
        written.append(value)
        copy = before[id(value)]
        return value if copy is None else copy

    return Call(
        func, name_of(func), tree_map(earlier, args), tree_map(earlier, kwargs), tuple(written)
    )


def _stand_at(call: Call, output: Tensor, lines: tuple[Line, ...]) -> None:
    """Stand in the debugger, with what went in and what came out of an operation in scope."""
    operation = call.name
    inputs = dict(named_tensors(call.func, call.args, call.kwargs))
    print(f"{operation} at {lines[-1] if lines else 'no line of the script'}: see inputs, output")  # noqa: T201 # for who asked for it
    pdb.set_trace()  # noqa: T100 # the same
    del inputs, output


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
