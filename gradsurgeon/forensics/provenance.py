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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

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
    held,
    taken_from,
)
from gradsurgeon.language.planning.manifest import ROOT
from gradsurgeon.tensors import _torch

# These return memory that nothing was written to.
_UNWRITTEN = ("empty", "new_empty", "_efficientzerotensor", "resize")
_COPIES = ("clone", "_to_copy", "copy", "detach", "contiguous")
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

    def seed(self, what: str, name: str, tensor: Tensor) -> NonfiniteSource | None:
        """Note a tensor if it is non-finite before the operations begin, or between them."""
        with _disable_current_modes():
            kind = nonfinite_kind(tensor)
            if not kind:
                return None
            mask = what in ("input", "buffer") or (what == "weight" and not tensor.requires_grad)
            intended = kind == "Inf" and mask and name.rpartition(".")[2] not in _STATISTICS
            source = held(self._moment(), what, name, facts(tensor, name), intended=intended)
            self.memory.remember(tensor, dict.fromkeys(kinds_in(tensor), (source,)))
        return source

    def source_of(self, tensor: Tensor) -> NonfiniteSource | None:
        """Return the source of a non-finite tensor, ``None`` for a finite one, or below `vmap`."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 # no public name
            return None
        with _disable_current_modes():
            kinds = kinds_in(tensor)
            if not kinds:
                return None
            known = self.memory.sources(tensor, kinds[0])
            if known:
                return min(known, key=lambda source: (source.intended, source.when))
            where = "unknown"
            intended = kinds[0] != "NaN" and not self.memory.known_about(tensor).made
            if intended:
                where = "literal"
            return held(self._when, where, "", facts(tensor), intended=intended)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if kwargs is None:
            kwargs = {}
        name = name_of(func)
        if name.startswith(_COLLECTIVE):
            raise RuntimeError(f"{name} talks to other ranks, which do not take part in the replay")
        if name.removeprefix("aten.").startswith(_UNWRITTEN):
            out = func(*args, **kwargs)
            self.memory.add_own(tensors_of(out))
            if "empty" in name:
                # What the memory held before is no result.
                out.zero_()
            return out
        written = Call(func, args, kwargs).written_into()
        # An operation is judged by what it was given, so tensors are copied before it writes over them.
        copies: dict[int, Tensor] = {}
        originals: dict[int, Tensor] = {}
        for tensor in written:
            self.memory.protect(tensor)
            copy = self._before(tensor)
            if copy is not None and id(tensor) not in copies:
                copies[id(tensor)] = copy
                originals[id(copy)] = tensor
        given = (args, kwargs)
        if copies:
            given = tree_map(lambda value: copies.get(id(value), value), given)
        out = func(*args, **kwargs)
        if _returns_view(func):
            return out
        outputs = tensors_of(out)
        self.memory.add_own(outputs)
        returned = {id(output) for output in outputs}
        outputs += [tensor for tensor in written if id(tensor) not in returned]
        self._follow(Call(func, *given, originals), outputs)
        return out

    def _follow(self, call: Call, outputs: Sequence[Tensor]) -> None:
        largest = None
        for index, output in enumerate(outputs):
            if not is_real(output) or output.is_meta:
                continue
            values = elements(output)
            if not values.numel():
                continue
            low, high = ends(values)
            if not (math.isfinite(low) and math.isfinite(high)):
                self._remember(call, output, index)
                continue
            self.memory.forget(output)
            # Some operations also return statistics for backward.
            if index == 0:
                largest = max(abs(low), abs(high))
        self.memory.follow_lost_constants(call, outputs)
        if largest is not None and call.stem not in _COPIES:
            label = call.name
            module = self._modules.place(_torch.current_node())[0]
            if module not in ("", ROOT):
                label = f"{module}: {label}"
            self._history.append((label, largest))

    def _remember(self, call: Call, output: Tensor, index: int) -> None:
        """Note the sources of a non-finite output."""
        birth = cache(partial(self._birth, call, output, index))
        sources: dict[Kind, list[NonfiniteSource]] = {}
        for kind in kinds_in(output):
            sources[kind] = self._of_kind(kind, call, output, birth)
        self.memory.remember(output, sources)

    @staticmethod
    def _before(tensor: Tensor) -> Tensor | None:
        """Return a copy of a tensor that an operation writes into, unless it is very large."""
        part = elements(tensor)
        if tensor.is_meta or part.numel() * part.element_size() > _LARGEST_COPY:
            return None
        return tensor.detach().clone()

    def _of_kind(
        self, kind: Kind, call: Call, output: Tensor, birth: Callable[[], NonfiniteSource]
    ) -> list[NonfiniteSource]:
        inputs, fresh = taken_from(call, output, kind)
        infinite = []
        sources = []
        of_script = False
        for tensor, input_kind in inputs:
            if input_kind != "NaN":
                infinite.append((tensor, input_kind))
                if kind == "NaN":
                    continue
            known = self._known(call, tensor, input_kind)
            sources += known
            if not known:
                of_script = True
        if kind == "NaN":
            if infinite:
                sources.append(self._of_infinities(call, infinite, birth))
            if fresh or of_script:
                sources.append(birth())
        elif of_script or (fresh and (call.nonfinite_numbers or not call.tensors)):
            # The script wrote or holds the number: a mask.
            when = self._moment()
            lines = lines_here()
            sources.append(held(when, "literal", call.name, facts(output), lines, intended=True))
        elif fresh:
            sources.append(birth())
        return sources

    def _known(self, call: Call, tensor: Tensor, kind: Kind) -> list[NonfiniteSource]:
        """Return the sources of a non-finite tensor; none if the script holds the tensor."""
        passed = call.passed(tensor)
        sources = self.memory.sources(passed, kind)
        if not sources and self.memory.known_about(passed).made:
            sources = [held(self._moment(), "unknown", call.name, facts(tensor))]
        return sources

    def _of_infinities(
        self,
        call: Call,
        infinite: Sequence[tuple[Tensor, Kind]],
        birth: Callable[[], NonfiniteSource],
    ) -> NonfiniteSource:
        """Return the infinity to blame for a NaN, or the operation if all infinities were masks."""
        masks = []
        faults = []
        for tensor, kind in infinite:
            for source in self._known(call, tensor, kind):
                if source.may_mask(kind):
                    masks.append(source)
                # An infinite input may be a mask or a mistake: its use decides.
                elif not source.intended or source.diagnosis.where == "input":
                    faults.append(source)
        takes_masks = any(word in call.name for word in _MASKED) and "backward" not in call.name
        blamed = faults
        if not faults and not takes_masks:
            blamed = masks
        if not blamed:
            return birth()
        first = min(blamed, key=lambda source: source.when)
        if not first.is_operation:
            # A mask that makes a NaN was none, or was misused.
            return replace(first, intended=False)
        if not faults or takes_masks:
            return first
        return replace(first, rival=_rival(first, masks))

    def _birth(self, call: Call, output: Tensor, index: int) -> NonfiniteSource:
        node = _torch.current_node()
        node_name = ""
        if node is not None:
            node_name = node.name()
        module, module_type = self._modules.place(node)
        lines = lines_here()
        where = "forward"
        differentiated = ""
        if node is not None and not self._modules.running:
            where = "backward"
            differentiated = node_name
            if not lines:
                lines = lines_of_node(node)
        when = self._moment()
        measured = facts(output)
        inputs = dict(call.named())
        if when == self._stop_at:
            _stand_at(lines, {"operation": call.name, "inputs": inputs, "output": output})
        diagnosis = replace(
            BLANK,
            what=measured.kind or "NaN",
            where=where,
            module=module,
            module_type=module_type,
            operation=call.name,
            node=node_name,
            lines=lines,
            inputs=tuple(facts(tensor, argument) for argument, tensor in inputs.items()),
            output=measured,
            rows=measured.rows,
            history=tuple(self._history),
            cause=self._cause(call, index, differentiated),
        )
        trained = any(tensor.requires_grad for tensor in inputs.values())
        return NonfiniteSource(when, diagnosis, constant=where == "forward" and not trained)

    def _cause(self, call: Call, index: int, differentiated: str) -> Cause:
        """Return the cause of a result; ``differentiated`` names the node that backward runs, if it runs one."""
        if any(math.isnan(number) for number in call.nonfinite_numbers):
            return cause("bad input", f"the script itself passes the number NaN to {call.name}")
        for name, tensor in call.named():
            if nonfinite_kind(tensor) != "NaN":
                continue
            if not self.memory.known_about(call.passed(tensor)).made:
                return cause(
                    "bad input",
                    f"{name} of {call.name} was NaN before: a tensor that the script holds or has just "
                    "made (an attribute, a global, a constant, an array of numpy)",
                )
        lost = self.memory.lost_constant(call)
        return cause_of_call(call, index, differentiated, lost=lost)

    def _moment(self) -> int:
        self._when += 1
        return self._when


def _rival(first: NonfiniteSource, masks: Iterable[NonfiniteSource]) -> str:
    """Return operation and line of a mask that may be to blame instead of ``first``."""
    for mask in masks:
        if mask.is_operation and not mask.constant and mask.when != first.when:
            rival = mask.diagnosis.operation
            if mask.diagnosis.lines:
                rival += f" at {mask.diagnosis.lines[-1]}"
            return rival
    return ""


def _returns_view(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    aliases = [result.alias_info for result in schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _stand_at(lines: tuple[Line, ...], scope: Mapping[str, Any]) -> None:
    """Open the debugger in the line of the script that called an operation, with more names in ``scope``."""
    frame = sys._getframe()  # noqa: SLF001 # documented
    for caller, line in traceback.walk_stack(frame):
        # The backward pass runs no line of the model.
        if lines and (caller.f_code.co_filename, line) == (lines[-1].file, lines[-1].line):
            frame = caller
            break
    known = frame.f_locals
    for name, value in scope.items():
        known.setdefault(name, value)
    print(f"{scope['operation']}: see {', '.join(scope)} (`q` to go on)")  # noqa: T201 # the user asked for it
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise bdb.BdbQuit
