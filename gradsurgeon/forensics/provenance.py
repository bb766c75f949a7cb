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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gradsurgeon import _torch
from gradsurgeon.diagnosis import Line
from gradsurgeon.forensics.memory import Memory
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
from gradsurgeon.forensics.sources import (
    Birth,
    Call,
    Kind,
    Origin,
    Source,
    first_to_blame,
    is_intended,
)
from gradsurgeon.planning.manifest import ROOT

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
        self.memory = Memory()
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
        self.memory.remember(tensor, kind, origin)
        return origin

    def source_of(self, tensor: Tensor) -> Source | None:
        """Return what made a tensor non-finite, ``None`` where it is finite, or one of many below `vmap`."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 # no public name
            return None
        with _disable_current_modes():
            kind = nonfinite_kind(tensor)
            if not kind:
                return None
            return first_to_blame(self.memory.known(tensor, kind)) or Origin(
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
            fresh = tensors_of(out)
            self.memory.made(fresh, empty=True)
            return out
        written = _written(func, args, named)
        for tensor in written:
            self.memory.protect(tensor)
        before = {id(tensor): self._before(tensor) for tensor in written}
        out = func(*args, **named)
        if _is_view(func):
            return out
        call = _as_given(func, args, named, before)
        outputs = tensors_of(out)
        self.memory.made(outputs)
        outputs += [t for t in written if not any(t is output for output in outputs)]
        measured = [
            self._judge(call, output, number)
            for number, output in enumerate(outputs)
            if is_real(output) and not output.is_meta
        ]
        # From here on it holds what was written.
        self.memory.written(written)
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
            self.memory.forget(output)
            return max(abs(low), abs(high))
        kind: Kind = "NaN" if math.isnan(low) or math.isnan(high) else "Inf"
        self.memory.remember(output, kind, self._source(call, kind, output, number))
        return None

    def _before(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor as it is before an operation writes into it; memory that holds nothing yet as zeros."""
        part = elements(tensor)
        if tensor.is_meta or part.numel() * part.element_size() > _LARGEST_COPY:
            return None
        copy = tensor.detach().clone()
        return torch.zeros_like(copy) if self.memory.is_unwritten(tensor) else copy

    def _source(self, call: Call, kind: Kind, output: Tensor, number: int) -> Source:
        tensors = _chosen(call) or tensors_of(call.args, call.kwargs)
        bad = [(found, tensor) for tensor in tensors if (found := nonfinite_kind(tensor))]
        worst = "NaN" if any(found == "NaN" for found, _ in bad) else "Inf"
        # What was written over is known by the tensor that was given.
        given = [tensor for found, tensor in bad if found == worst]
        given += [tensor for tensor in call.written if bad]
        first = first_to_blame([s for tensor in given for s in self.memory.known(tensor, worst)])
        if bad and (worst == "NaN" or kind == "Inf"):
            where = facts(given[0])
            return first or Origin(self._moment(), "unknown", call.name, where)
        if first is not None and not is_intended(first):
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


def _chosen(call: Call) -> list[Tensor]:
    """Return what `where` has taken something from that is not finite; nothing of other operations."""
    if call.name != "aten.where" or len(call.args) != 3:  # noqa: PLR2004 # condition, one, other
        return []
    condition, one, other = call.args
    sides = ((one, condition), (other, condition.logical_not()))
    return [side for side, taken in sides if bool((side.isfinite().logical_not() & taken).any())]


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
        found += tensors_of(value)
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
