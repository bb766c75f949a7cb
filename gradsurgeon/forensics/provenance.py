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
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from gradsurgeon.common.diagnosis import Cause, Line
from gradsurgeon.forensics.cause import cause, cause_of_call, remedy_for
from gradsurgeon.forensics.operations import (
    Call,
    Kind,
    ModuleCalls,
    Place,
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
    rounded_constant,
    taken_from,
)
from gradsurgeon.language.planning.manifest import ROOT
from gradsurgeon.tensors import _torch

# These return memory that nothing was written to.
_UNWRITTEN = ("empty", "new_empty", "_efficientzerotensor", "resize")
_COPIES = ("clone", "_to_copy", "copy", "detach", "contiguous")
_COLLECTIVE = ("c10d", "_c10d_functional")
_HISTORY = 20
_PASSED = (
    "the script itself passes NaN to {}: {}, which it holds or has just made (an attribute, a global, a constant, an "
    "array of numpy)"
)
_NEGATIVE = "a determinant below 0 has no logarithm, and rounding can make that of a singular matrix negative"
# These buffers are no masks.
_STATISTICS = ("running_mean", "running_var")
# The inputs of these may hold minus infinity.
_MASKED = ("softmax", "logsumexp", "logcumsumexp", "logaddexp", "attention")


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch has no types there
    def __init__(self, modules: ModuleCalls, stop_at: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self._modules = modules
        self._stop_at = stop_at
        self._when = 0
        self._history: deque[tuple[str, float]] = deque(maxlen=_HISTORY)
        # Maps a module to a sentence on a constant that the format rounded to zero: an epsilon of 1e-8 is 0 in float16.
        self._lost: dict[Place, str] = {}
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
            for each in kinds_in(tensor):
                self.memory.remember(tensor, each, [source])
        return source

    def source_of(self, tensor: Tensor) -> NonfiniteSource | None:
        """Return the source of a non-finite tensor, ``None`` for a finite one, or below `vmap`."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001 # no public name
            return None
        with _disable_current_modes():
            kind = nonfinite_kind(tensor)
            if not kind:
                return None
            known = self._known("", tensor, kind)
            if not known:
                # The script holds it, and may mean an infinity.
                where = "unknown" if kind == "NaN" else "literal"
                known = [held(self._when, where, "", facts(tensor), intended=kind == "Inf")]
        return min(known, key=lambda source: (source.intended, source.when))

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
                # Old content of the memory is no result.
                out.zero_()
            return out
        written = Call(func, args, kwargs).written_into()
        # An operation is judged by what it was given, so tensors are copied before it writes over them.
        copies: dict[int, Tensor] = {}
        originals: dict[int, Tensor] = {}
        for tensor in written:
            self.memory.protect(tensor)
            copy = copies.setdefault(id(tensor), tensor.detach().clone())
            originals[id(copy)] = tensor
        given: tuple[Any, Any] = tree_map(
            lambda value: copies.get(id(value), value), (args, kwargs)
        )
        out = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return out
        outputs = tensors_of(out)
        self.memory.add_own(outputs)
        returned = set(map(id, outputs))
        outputs += [tensor for tensor in written if id(tensor) not in returned]
        before_args, before_kwargs = given
        self._follow(Call(func, before_args, before_kwargs, originals), outputs)
        return out

    def _follow(self, call: Call, outputs: Sequence[Tensor]) -> None:
        for index, output in enumerate(outputs):
            values = elements(output)
            if not is_real(output) or output.is_meta or not values.numel():
                continue
            place = self._modules.place(_torch.current_node())
            lost = rounded_constant(call, output)
            if lost:
                self._lost[place] = lost
            birth = cache(partial(self._birth, call, output, index))
            sources = {kind: self._of_kind(kind, call, output, birth) for kind in kinds_in(output)}
            self.memory.forget(output)
            for kind, of_kind in sources.items():
                self.memory.remember(output, kind, of_kind)
            # Some operations also return statistics for backward.
            if index == 0 and not sources and call.stem not in _COPIES:
                label = call.name
                if place[0] not in ("", ROOT):
                    label = f"{place[0]}: {label}"
                self._history.append((label, max(map(abs, ends(values)))))

    def _of_kind(
        self, kind: Kind, call: Call, output: Tensor, birth: Callable[[], NonfiniteSource]
    ) -> list[NonfiniteSource]:
        inputs, fresh = taken_from(call, output, kind)
        infinite = []
        sources = []
        of_script = False
        for tensor, input_kind in inputs:
            if input_kind == "Inf":
                infinite.append(tensor)
                if kind == "NaN":
                    continue
            known = self._known(call.name, call.passed(tensor), input_kind)
            sources += known
            of_script = of_script or not known
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

    def _known(self, name: str, tensor: Tensor, kind: Kind) -> list[NonfiniteSource]:
        """Return the sources of a non-finite tensor; none if the script holds the tensor."""
        sources = self.memory.sources(tensor, kind)
        if not sources and self.memory.known_about(tensor).made:
            sources = [held(self._moment(), "unknown", name, facts(tensor))]
        return sources

    def _of_infinities(
        self, call: Call, infinite: Sequence[Tensor], birth: Callable[[], NonfiniteSource]
    ) -> NonfiniteSource:
        """Return the infinity to blame for a NaN, or the operation if all infinities were masks."""
        takes_masks = any(word in call.name for word in _MASKED) and "backward" not in call.name
        faults = []
        masks = []
        for tensor in infinite:
            for source in self._known(call.name, call.passed(tensor), "Inf"):
                if source.may_mask(tensor):
                    masks.append(source)
                # An infinite input may be a mask or a mistake: its use decides.
                elif not source.intended or source.diagnosis.where == "input":
                    faults.append(source)
        if takes_masks:
            masks = []
        blamed = faults
        # No constant mask is in doubt.
        rivals = [mask for mask in masks if mask.is_operation and not mask.constant]
        if not faults:
            blamed = masks
            rivals = []
        if not blamed:
            return birth()
        first = min(blamed, key=lambda source: source.when)
        if first.is_operation:
            return replace(first, rivals=tuple(rivals))
        # A mask that makes a NaN was none, or was misused.
        return replace(first, intended=False)

    def _birth(self, call: Call, output: Tensor, index: int) -> NonfiniteSource:
        before = [*self._history][-1:]
        if call.stem == "scalar_tensor" and "slogdet" in str(before):
            # `torch.logdet` is made of others, and writes NaN itself.
            call = replace(call, func=torch.ops.aten.logdet.default)
        node = _torch.current_node()
        node_name = ""
        if node is not None:
            node_name = node.name()
        module, module_type = self._modules.place(node)
        lines = lines_here()
        where = "forward"
        if node is not None and not self._modules.running:
            where = "backward"
            if not lines:
                lines = lines_of_node(node)
        when = self._moment()
        inputs = dict(call.named())
        if when == self._stop_at:
            _stand_at(lines, {"operation": call.name, "inputs": inputs, "output": output})
        measured = facts(output)
        why = self._cause_in_script(call)
        if why is None:
            differentiated = node_name if where == "backward" else ""
            lost = self._lost.get((module, module_type), "")
            why = cause_of_call(call, index, differentiated, lost=lost)
        diagnosis = replace(
            BLANK,
            what=measured.kind,
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
            cause=why,
        )
        trained = any(tensor.requires_grad for tensor in inputs.values())
        return NonfiniteSource(when, diagnosis, constant=where == "forward" and not trained)

    def _cause_in_script(self, call: Call) -> Cause | None:
        """Return the cause of a NaN that the script itself, or `torch.logdet`, has passed."""
        if call.stem == "logdet":
            return cause("mathematics", _NEGATIVE, advice=remedy_for("mathematics", call.name))
        passed = []
        for name, tensor in call.named():
            is_own = self.memory.known_about(call.passed(tensor)).made
            if not is_own and nonfinite_kind(tensor) == "NaN":
                passed.append(name)
        if any(map(math.isnan, call.nonfinite_numbers)):
            passed.append("a number")
        if not passed:
            return None
        return cause("bad input", _PASSED.format(call.name, passed[0]))

    def _moment(self) -> int:
        self._when += 1
        return self._when


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
