"""Follows non-finite numbers through every operation of a replay, to find the operation that made them.

A *birth* is an operation that returns NaN without a NaN among its inputs. For an infinity all inputs must be finite:
attention masks hold infinities on purpose. If infinities make a NaN, one that is no mask is blamed, or the operation.
Numbers are followed to the gradients of the parameters, so an infinity that spoils no gradient is not blamed.
"""

import bdb
import math
import pdb  # noqa: T100 # the user asked for it
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from gradsurgeon.common.diagnosis import Cause, Line
from gradsurgeon.forensics.cause import cause, cause_of_call
from gradsurgeon.forensics.operations import (
    Call,
    Kind,
    ModuleCalls,
    elements,
    ends,
    facts,
    is_real,
    kinds_in,
    lines_here,
    lines_of_node,
    name_of,
    nonfinite_kind,
    tensors_of,
)
from gradsurgeon.forensics.sources import (
    BLANK,
    Memory,
    NonfiniteSource,
    first_to_blame,
    held,
    taken_from,
)
from gradsurgeon.language.planning.manifest import ROOT
from gradsurgeon.tensors import _torch

Seed = Literal["weight", "buffer", "input", "output gradient"]
# These return memory that nothing was written to.
_UNWRITTEN = ("empty", "new_empty", "_efficientzerotensor", "resize")
_COPIES = ("clone", "_to_copy", "copy", "detach", "contiguous")
# Forward passes of these return statistics for backward after their result.
_SAVES = ("norm", "attention", "nll_loss")
_COLLECTIVE = ("c10d", "_c10d_functional")
_HISTORY = 20
# These buffers are no masks.
_STATISTICS = ("running_mean", "running_var")
# The inputs of these may hold minus infinity.
_MASKED = ("softmax", "logsumexp", "logcumsumexp", "logaddexp", "attention")
# Larger tensors are not copied before an operation writes into them.
_LARGEST_COPY = 2**28


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types there
    def __init__(self, modules: ModuleCalls, stop_at: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self._modules = modules
        self._stop_at = stop_at
        self._when = 0
        self._history: deque[tuple[str, float]] = deque(maxlen=_HISTORY)
        self.memory = Memory()

    def seed(self, what: Seed, name: str, tensor: Tensor) -> NonfiniteSource | None:
        """Note a tensor if it is non-finite before the operations begin, or between them."""
        with _disable_current_modes():
            if not (kind := nonfinite_kind(tensor)):
                return None
            mask = what in ("input", "buffer") or (what == "weight" and not tensor.requires_grad)
            intended = kind == "Inf" and mask and name.rpartition(".")[2] not in _STATISTICS
            source = held(self._moment(), what, name, facts(tensor, name), intended=intended)
            self.memory.remember(tensor, {one: [source] for one in kinds_in(tensor)})
        return source

    def source_of(self, tensor: Tensor) -> NonfiniteSource | None:
        """Return the source of a non-finite tensor, ``None`` for a finite one, or below `vmap`."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 # no public name
            return None
        with _disable_current_modes():
            if not (kinds := kinds_in(tensor)):
                return None
            if known := first_to_blame(self.memory.sources(tensor, kinds[0])):
                return known
            meant = kinds[0] != "NaN" and not self.memory.known_about(tensor).made
            where = "literal" if meant else "unknown"
            return held(self._when, where, "", facts(tensor), intended=meant)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        named = kwargs or {}
        name = name_of(func)
        if name.startswith(_COLLECTIVE):
            raise RuntimeError(f"{name} talks to other ranks, which do not take part in the replay")
        if name.removeprefix("aten.").startswith(_UNWRITTEN):
            out = func(*args, **named)
            self.memory.add_own(tensors_of(out), empty=True)
            return out
        schema = getattr(func, "_schema", None)
        written = [] if schema is None else _written(schema, args, named)
        for tensor in written:
            self.memory.protect(tensor)
        # An operation is judged by what it was given, and not by what it has left.
        copies = {id(t): copy for t in written if (copy := self._before(t)) is not None}
        originals = {id(copies[id(t)]): t for t in written if id(t) in copies}
        given = (args, named)
        if copies:
            given = tree_map(lambda value: copies.get(id(value), value), given)
        out = func(*args, **named)
        shown = [] if schema is None else [result.alias_info for result in schema.returns]
        if any(alias is not None and not alias.is_write for alias in shown):  # a view
            return out
        outputs = tensors_of(out)
        self.memory.add_own(outputs)
        outputs += [t for t in written if not any(t is output for output in outputs)]
        self._follow(Call(func, *given, originals), outputs, written)
        return out

    def _follow(self, call: Call, outputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        magnitudes = []
        saves = any(word in call.stem for word in _SAVES) and "backward" not in call.stem
        for number, output in enumerate(outputs):
            if not is_real(output) or output.is_meta or not (values := elements(output)).numel():
                continue
            low, high = ends(values)
            if math.isfinite(low) and math.isfinite(high):
                self.memory.forget(output)
                if not (saves and number):
                    magnitudes.append(max(abs(low), abs(high)))
            else:
                birth = cache(partial(self._birth, call, output, number))
                sources = {
                    kind: self._of_kind(kind, call, output, birth) for kind in kinds_in(output)
                }
                self.memory.remember(output, sources)
        for tensor in written:
            self.memory.known_about(tensor).unwritten = False
        self.memory.follow_lost_constants(call, outputs)
        if magnitudes and call.stem not in _COPIES:
            module = self._modules.place(_torch.current_node())[0]
            label = call.name if module in ("", ROOT) else f"{module}: {call.name}"
            self._history.append((label, max(magnitudes)))

    def _before(self, tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor that an operation writes into; zeros for unwritten memory."""
        part = elements(tensor)
        if tensor.is_meta or part.numel() * part.element_size() > _LARGEST_COPY:
            return None
        copy = tensor.detach().clone()
        return torch.zeros_like(copy) if self.memory.known_about(tensor).unwritten else copy

    def _of_kind(
        self, kind: Kind, call: Call, output: Tensor, birth: Callable[[], NonfiniteSource]
    ) -> list[NonfiniteSource]:
        taken, fresh = taken_from(call, output, kind)
        infinite = [one for one in taken if one[1] != "NaN"]
        known = [self._known(call, *one) for one in taken if kind != "NaN" or one[1] == "NaN"]
        found = [source for sources in known for source in sources]
        of_script = not all(known)
        if kind == "NaN":
            if infinite:
                found.append(self._of_infinities(call, infinite, birth))
            if fresh or of_script:
                found.append(birth())
        elif of_script or (fresh and (call.nonfinite_numbers or not call.tensors)):
            # The script wrote or holds the number: a mask.
            when = self._moment()
            lines = lines_here()
            found.append(held(when, "literal", call.name, facts(output), lines, intended=True))
        elif fresh:
            found.append(birth())
        return found

    def _known(self, call: Call, tensor: Tensor, kind: Kind) -> list[NonfiniteSource]:
        """Return the sources of a non-finite tensor; none if the script holds the tensor."""
        place = call.passed(tensor)
        found = self.memory.sources(place, kind)
        if not found and self.memory.known_about(place).made:
            found = [held(self._moment(), "unknown", call.name, facts(tensor))]
        return found

    def _of_infinities(
        self,
        call: Call,
        infinite: Sequence[tuple[Tensor, Kind]],
        birth: Callable[[], NonfiniteSource],
    ) -> NonfiniteSource:
        """Return the infinity to blame for a NaN, or the operation if all infinities were masks."""
        found = [(source, kind) for t, kind in infinite for source in self._known(call, t, kind)]
        masks = [source for source, kind in found if source.may_mask(kind)]
        # An infinite input may be a mask or a mistake: its use decides.
        faults = [
            source
            for source, kind in found
            if not source.may_mask(kind)
            and (not source.intended or source.diagnosis.where == "input")
        ]
        hides = any(word in call.name for word in _MASKED) and "backward" not in call.name
        blamed = faults or ([] if hides else masks)
        if not blamed:
            return birth()
        first = min(blamed, key=lambda source: source.when)
        if not first.is_operation:
            # A mask that makes a NaN was none, or was misused.
            return replace(first, intended=False)
        others = [one.diagnosis for one in masks if not one.constant and one.when != first.when]
        rival = next((one for one in others if one.operation), None)
        if rival is None or not faults or hides:
            return first
        return replace(first, rival=" at ".join(map(str, (rival.operation, *rival.lines[-1:]))))

    def _birth(self, call: Call, output: Tensor, number: int) -> NonfiniteSource:
        node = _torch.current_node()
        module, module_type = self._modules.place(node)
        backward = node is not None and not self._modules.running
        lines = lines_here() or (lines_of_node(node) if backward else ())
        when = self._moment()
        measured = facts(output)
        inputs = dict(call.named())
        if when == self._stop_at:
            _stand_at(call.name, lines, {"inputs": inputs, "output": output})
        name = "" if node is None else node.name()
        diagnosis = replace(
            BLANK,
            what=measured.kind or "NaN",
            where="backward" if backward else "forward",
            module=module,
            module_type=module_type,
            operation=call.name,
            node=name,
            lines=lines,
            inputs=tuple(facts(tensor, argument) for argument, tensor in inputs.items()),
            output=measured,
            history=tuple(self._history),
            cause=self._cause(call, number, name if backward else ""),
        )
        constant = not backward and not any(tensor.requires_grad for tensor in inputs.values())
        return NonfiniteSource(when, diagnosis, constant=constant)

    def _cause(self, call: Call, number: int, node: str) -> Cause:
        if any(map(math.isnan, call.nonfinite_numbers)):
            return cause("bad input", f"the script itself passes the number NaN to {call.name}")
        for name, tensor in call.named():
            if (
                nonfinite_kind(tensor) == "NaN"
                and not self.memory.known_about(call.passed(tensor)).made
            ):
                return cause(
                    "bad input",
                    f"{name} of {call.name} was NaN before: a tensor that the script holds or has just "
                    "made (an attribute, a global, a constant, an array of numpy)",
                )
        lost = self.memory.lost_constant(call)
        return cause_of_call(call, number, node, history=tuple(self._history), lost=lost)

    def _moment(self) -> int:
        self._when += 1
        return self._when


def _written(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_of(given)
    return found


def _stand_at(operation: str, lines: tuple[Line, ...], scope: Mapping[str, Any]) -> None:
    """Open the debugger in the line of the script that called an operation, with more names in ``scope``."""
    frame = sys._getframe()  # noqa: SLF001 # documented
    for caller, line in traceback.walk_stack(frame):
        # The backward pass runs no line of the model.
        if lines and (caller.f_code.co_filename, line) == (lines[-1].file, lines[-1].line):
            frame = caller
            break
    known = frame.f_locals
    for name, value in {"operation": operation, **scope}.items():
        known.setdefault(name, value)
    at = lines[-1] if lines else "no line of the script"
    print(f"{operation} at {at}: see operation, {', '.join(scope)} (`q` to go on)")  # noqa: T201 # the user asked for it
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise bdb.BdbQuit
