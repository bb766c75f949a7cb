"""Follows non-finite numbers through every operation of a replay, to find the operation that made them.

A *birth* is an operation that returns NaN without a NaN among its inputs. For an infinity all inputs must be finite:
attention masks hold infinities on purpose. If infinities make a NaN, the infinity that is no mask is blamed, or the
operation if all of them are masks. Numbers are followed from the birth to the gradients of the parameters, so an
infinity that spoils no gradient is not blamed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gradsurgeon import _torch
from gradsurgeon.diagnosis import Cause
from gradsurgeon.forensics.cause import cause, cause_of_call
from gradsurgeon.forensics.debugging import stand_at
from gradsurgeon.forensics.memory import LostConstants, Memory
from gradsurgeon.forensics.operations import (
    Kind,
    elements,
    ends,
    facts,
    is_real,
    kinds_in,
    lines_here,
    lines_of_node,
    named_tensors,
    nonfinite_kind,
    tensors_of,
)
from gradsurgeon.forensics.sources import (
    Birth,
    Call,
    Origin,
    Source,
    first_to_blame,
    given,
    is_intended,
    may_mask,
)
from gradsurgeon.planning.manifest import ROOT

# These return memory that nothing was written to.
_UNWRITTEN = ("empty", "new_empty", "_efficientzerotensor", "resize")
_COPIES = ("clone", "_to_copy", "copy_", "detach", "contiguous")
_COLLECTIVE = ("c10d", "_c10d_functional")
# How many magnitudes before a birth are kept.
_HISTORY = 20
# The births whose operation is repeated, which takes several runs.
_MOST_JUDGED = 64
# These buffers are no masks.
_STATISTICS = ("running_mean", "running_var")
# The inputs of these may hold minus infinity.
_MASKED = ("softmax", "logsumexp", "logcumsumexp", "logaddexp", "attention")
# Larger tensors are not copied before an operation writes into them.
_LARGEST_COPY = 2**28


@dataclass(slots=True, eq=False)
class ModuleCalls:
    """Which module runs, and which module built a node of the graph: nodes have ascending numbers."""

    running: list[tuple[str, str]] = field(default_factory=list)
    # First and last number of the nodes of each call, inner calls first.
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
    """Follows non-finite numbers through the operations that run under it, forward and backward."""

    def __init__(self, modules: ModuleCalls, stop_at: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self._modules = modules
        self._stop_at = stop_at
        self._when = 0
        self._history: deque[tuple[str, float]] = deque(maxlen=_HISTORY)
        self.memory = Memory()
        self._lost = LostConstants()
        self._judged = 0

    def seed(
        self,
        what: Literal["weight", "buffer", "input", "output gradient"],
        name: str,
        tensor: Tensor,
    ) -> Origin | None:
        """Note a tensor if it is non-finite before the operations begin, or between them."""
        with _disable_current_modes():
            kind = nonfinite_kind(tensor)
            measured = facts(tensor, name) if kind else None
        if not kind:
            return None
        mask = what in ("input", "buffer") or (what == "weight" and not tensor.requires_grad)
        intended = kind == "Inf" and mask and name.rpartition(".")[2] not in _STATISTICS
        origin = Origin(self._moment(), what, name, measured, intended=intended)
        with _disable_current_modes():
            self.memory.remember(tensor, {one: [origin] for one in kinds_in(tensor)})
        return origin

    def source_of(self, tensor: Tensor) -> Source | None:
        """Return the source of a non-finite tensor, ``None`` for a finite one, or below `vmap`."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 # no public name
            return None
        with _disable_current_modes():
            kind = nonfinite_kind(tensor)
            if not kind:
                return None
            known = self.memory.known(tensor, kinds_in(tensor)[0])
            if not known and kind == "Inf" and not self.memory.is_made(tensor):
                return Origin(self._when, "literal", "", facts(tensor), intended=True)
            return first_to_blame(known) or Origin(self._when, "unknown", "", facts(tensor))

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
        # The new content is in memory from here on.
        self.memory.written(written)
        self._lost.follow(call, outputs)
        finite = [largest for largest in measured if largest is not None]
        if finite and name.removeprefix("aten.") not in _COPIES:
            module = self._place()[0]
            label = name if module in ("", ROOT) else f"{module}: {name}"
            self._history.append((label, max(finite)))
        return out

    def _judge(self, call: Call, output: Tensor, number: int) -> float | None:
        """Return the largest magnitude of a finite result; note the sources of a non-finite one."""
        values = elements(output)
        if not values.numel():
            return None
        low, high = ends(values)
        if math.isfinite(low) and math.isfinite(high):
            self.memory.forget(output)
            return max(abs(low), abs(high))
        self.memory.remember(output, self._sources(call, output, number))
        return None

    def _before(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor that an operation is about to write into; zeros for memory not written to yet."""
        part = elements(tensor)
        if tensor.is_meta or part.numel() * part.element_size() > _LARGEST_COPY:
            return None
        copy = tensor.detach().clone()
        return torch.zeros_like(copy) if self.memory.is_unwritten(tensor) else copy

    def _sources(self, call: Call, output: Tensor, number: int) -> dict[Kind, list[Source]]:
        """Return the sources of a non-finite result by kind."""
        birth = cache(lambda: self._birth(call, output, number))
        return {kind: self._of_kind(kind, call, output, birth) for kind in kinds_in(output)}

    def _of_kind(
        self, kind: Kind, call: Call, output: Tensor, birth: Callable[[], Birth]
    ) -> list[Source]:
        nan, infinite, fresh = given(call, output, kind)
        by_tensor = [self._known(call, tensor, "NaN") for tensor in nan]
        found = [source for sources in by_tensor for source in sources]
        if kind == "NaN":
            if infinite:
                found.append(self._of_infinities(call, infinite, birth))
            if fresh or not all(by_tensor):
                found.append(birth())
            return found
        by_tensor = [self._known(call, *one) for one in infinite]
        found += [source for sources in by_tensor for source in sources]
        numbers = [n for n in tree_leaves((call.args, call.kwargs)) if _is_nonfinite(n)]
        is_written = fresh and (numbers or not tensors_of(call.args, call.kwargs))
        if is_written or not all(by_tensor):
            # The script wrote or holds the number: a mask.
            lines, measured = lines_here(), facts(output)
            found.append(
                Origin(self._moment(), "literal", call.name, measured, lines, intended=True)
            )
        elif fresh:
            found.append(birth())
        return found

    def _known(self, call: Call, tensor: Tensor, kind: Kind) -> list[Source]:
        """Return the sources of a non-finite tensor; none if the script holds the tensor."""
        # An overwritten tensor is known by the tensor that was passed.
        place = call.written.get(id(tensor), tensor)
        found = self.memory.known(place, kind)
        if not found and self.memory.is_made(place):
            found = [Origin(self._moment(), "unknown", call.name, facts(tensor))]
        return found

    def _of_infinities(
        self, call: Call, infinite: Sequence[tuple[Tensor, Kind]], birth: Callable[[], Birth]
    ) -> Source:
        """Return the infinity to blame for a NaN, or the operation if all infinities were masks."""
        found = [
            (source, kind)
            for tensor, kind in infinite
            for source in self._known(call, tensor, kind)
        ]
        masks = [source for source, kind in found if may_mask(source, kind)]
        # An infinite input may be a mask or a mistake: its use decides.
        faults = [
            s
            for s, kind in found
            if not may_mask(s, kind)
            and (not is_intended(s) or (isinstance(s, Origin) and s.what == "input"))
        ]
        hides = any(word in call.name for word in _MASKED) and "backward" not in call.name
        if not faults:
            first = None if hides else min(masks, key=lambda source: source.when, default=None)
            if first is None:
                return birth()
            # A mask that makes a NaN was none, or was misused.
            return replace(first, intended=False) if isinstance(first, Origin) else first
        first = min(faults, key=lambda source: source.when)
        if isinstance(first, Origin):
            return replace(first, intended=False)
        rivals = [
            s for s in masks if isinstance(s, Birth) and not s.constant and s.when != first.when
        ]
        return replace(first, rival=_named(rivals[0])) if rivals and not hides else first

    def _birth(self, call: Call, output: Tensor, number: int) -> Birth:
        node = _torch.current_node()
        module, module_type = self._place()
        backward = node is not None and not self._modules.running
        lines = lines_here() or (lines_of_node(node) if backward else ())
        when, measured = self._moment(), facts(output)
        inputs = dict(named_tensors(call.func, call.args, call.kwargs))
        if when == self._stop_at:
            stand_at(call.name, lines, {"inputs": inputs, "output": output})
        name = "" if node is None else node.name()
        return Birth(
            when=when,
            kind=measured.kind or "NaN",
            operation=call.name,
            direction="backward" if backward else "forward",
            module=module,
            module_type=module_type,
            node=name,
            lines=lines,
            inputs=tuple(facts(tensor, argument) for argument, tensor in inputs.items()),
            output=measured,
            history=tuple(self._history),
            cause=self._cause(call, number, name if backward else ""),
            constant=not backward and not any(tensor.requires_grad for tensor in inputs.values()),
        )

    def _cause(self, call: Call, number: int, node: str) -> Cause:
        if any(math.isnan(n) for n in tree_leaves((call.args, call.kwargs)) if _is_nonfinite(n)):
            return cause("bad input", f"the script itself passes the number NaN to {call.name}")
        for name, tensor in named_tensors(call.func, call.args, call.kwargs):
            place = call.written.get(id(tensor), tensor)
            if nonfinite_kind(tensor) == "NaN" and not self.memory.is_made(place):
                return cause(
                    "bad input",
                    f"{name} of {call.name} was NaN before: a tensor that the script holds or has just "
                    "made (an attribute, a global, a constant, an array of numpy)",
                )
        self._judged += 1
        if self._judged > _MOST_JUDGED:
            return cause(
                "unknown", "many operations had made such numbers before: this one was not repeated"
            )
        return cause_of_call(
            call, number, node, history=tuple(self._history), lost=self._lost.among(call)
        )

    def _place(self) -> tuple[str, str]:
        """Return the module that runs, or the module that built the running node."""
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


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes into."""
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
    """Return a call with the earlier content of tensors that were written over."""
    if not before:
        return Call(func, name_of(func), args, kwargs)
    written: dict[int, Tensor] = {}

    def earlier(value: Any) -> Any:
        copy = before.get(id(value)) if isinstance(value, Tensor) else None
        if copy is None:
            return value
        written[id(copy)] = value
        return copy

    return Call(func, name_of(func), tree_map(earlier, args), tree_map(earlier, kwargs), written)


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _named(birth: Birth) -> str:
    return f"{birth.operation} at {birth.lines[-1]}" if birth.lines else birth.operation
