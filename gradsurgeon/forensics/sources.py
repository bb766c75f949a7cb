"""Where non-finite numbers come from: operations, tensors, and the memory that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsurgeon.common.diagnosis import Cause, Diagnosis, Line, TensorFacts
from gradsurgeon.forensics.cause import cause
from gradsurgeon.forensics.operations import (
    KINDS,
    Call,
    Kind,
    elements,
    kinds_in,
    lines_here,
    nonfinite_kind,
    tensors_of,
    where_is,
)
from gradsurgeon.tensors import _dist

# A replay of one call knows neither the step nor how certain the result is.
BLANK = Diagnosis("not reproduced", (), 0, 0)
# Operations with which scripts guard a division, a root or a logarithm.
_GUARDS = ("add", "sub", "rsub", "clamp", "clamp_min", "maximum", "full", "full_like", "fill")
_LOGARITHMS = ("aten.log", "aten.log2", "aten.log10", "aten.log1p")
_WRITTEN = "no operation that PyTorch shows made it: something else wrote into its memory"
_LOOK_AT_LOSS = (
    "look at the divisions, roots, powers and logarithms among the operations of the loss"
)


@dataclass(frozen=True, slots=True, eq=False)
class NonfiniteSource:
    """An operation that made non-finite numbers, or a tensor or number that was non-finite before.

    Attributes:
        diagnosis: what a diagnosis reports of it; an ``operation`` only if that made the numbers.
        intended: whether the script wrote the infinity itself: it is never blamed.
        constant: whether no input of the operation leads back to a parameter.
        rivals: other operations that made infinities at the same elements, if they cannot be told apart.
    """

    when: int
    diagnosis: Diagnosis
    intended: bool = False
    constant: bool = False
    rivals: tuple[NonfiniteSource, ...] = ()

    @property
    def is_operation(self) -> bool:
        return bool(self.diagnosis.operation)

    @property
    def is_outside(self) -> bool:
        return self.diagnosis.where == "output gradient"

    def may_mask(self, infinite: Tensor) -> bool:
        """Tell whether its infinities may be a mask although no script wrote it: log(0), constants, an input.

        Only its use decides that: the softmax of such a mask is fine, ``0 * log(0)`` is not.
        """
        if bool(elements(infinite).isposinf().any()):
            return False
        if not self.is_operation:
            return self.diagnosis.where == "input"
        return self.constant or self.diagnosis.operation.rstrip("_") in _LOGARITHMS


def held(
    when: int,
    where: str,
    name: str,
    measured: TensorFacts,
    lines: tuple[Line, ...] = (),
    *,
    intended: bool = False,
) -> NonfiniteSource:
    """Return a tensor or number that was non-finite before any operation as a source."""
    why = cause("bad input")
    if where == "output gradient":
        text = "the gradient that came back to the model was non-finite already"
        why = Cause("unknown", (text,), _LOOK_AT_LOSS)
    elif where == "unknown":
        why = cause("unknown", _WRITTEN)
    diagnosis = replace(
        BLANK,
        what=measured.kind,
        where=where,
        name=name,
        lines=lines,
        output=measured,
        rows=measured.rows,
        cause=why,
    )
    return NonfiniteSource(when, diagnosis, intended)


Taken = list[tuple[Tensor, Kind]]


def taken_from(call: Call, output: Tensor, kind: Kind) -> tuple[Taken, bool]:
    """Return the non-finite inputs that led to the NaN or the infinities of a result, each with its kind.

    The second value tells whether finite numbers alone made some of these elements. Elementwise operations are
    compared by element, others as a whole. Waits for the device.
    """
    inputs = list(filter(nonfinite_kind, _read(call)))
    if not inputs:
        return [], True
    if _is_elementwise(call, [output, *inputs]):
        with suppress(RuntimeError):  # shapes may differ
            return _taken_by_element(inputs, where_is(output, kind), kind)
    of_any_kind = []
    of_this_kind = []
    for tensor in inputs:
        for kind_of_input in kinds_in(tensor):
            pair = (tensor, kind_of_input)
            of_any_kind.append(pair)
            if kind_of_input == kind:
                of_this_kind.append(pair)
    if of_this_kind:
        return of_this_kind, False
    return of_any_kind, False


def _taken_by_element(
    inputs: Sequence[Tensor], unexplained: Tensor, made: Kind
) -> tuple[Taken, bool]:
    """Return inputs as `taken_from` does, by a mask of the elements in question."""
    taken: Taken = []
    # No NaN makes an infinity.
    for kind in KINDS[KINDS.index(made) :]:
        explained = unexplained.logical_not()
        for tensor in inputs:
            place = where_is(tensor, kind)
            if bool((place & unexplained).any()):
                taken.append((tensor, kind))
            explained |= place
        unexplained = explained.logical_not()
    return taken, bool(unexplained.any())


def _is_elementwise(call: Call, tensors: Iterable[Tensor]) -> bool:
    pointwise = torch.Tag.pointwise in getattr(call.func, "tags", ()) or call.stem == "copy"
    return pointwise and all(t.layout == torch.strided and not t.is_complex() for t in tensors)


def _read(call: Call) -> list[Tensor]:
    if call.stem == "copy":
        return tensors_of(call.args[1:])
    kwargs = dict(call.kwargs)
    kwargs.pop("out", None)
    return tensors_of(call.args, kwargs)


class _Entry(NamedTuple):
    """The bytes of a storage between which numbers are non-finite, and their source."""

    first: int
    end: int
    kind: Kind
    source: NonfiniteSource


@dataclass(slots=True, eq=False)
class _Known:
    """One storage, kept alive so no new storage gets its address.

    The replay has ``made`` it, or it belongs to the script and ``before`` has its bytes before the replay wrote over
    it.
    """

    storage: Any
    made: bool = False
    entries: list[_Entry] = field(default_factory=list)
    before: Tensor | None = None


class Memory:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def add_own(self, tensors: Iterable[Tensor]) -> None:
        """Note memory that belongs to the replay."""
        for tensor in tensors:
            self.known_about(tensor).made = True

    def remember(self, tensor: Tensor, kind: Kind, sources: Iterable[NonfiniteSource]) -> None:
        """Note the sources of the numbers of one kind in a tensor."""
        _, first, end = place_of(tensor)
        entries = self.known_about(tensor).entries
        entries += [_Entry(first, end, kind, source) for source in dict.fromkeys(sources)]

    def forget(self, tensor: Tensor) -> None:
        """Forget what a tensor held before it was written."""
        if tensor.is_contiguous():
            _, first, end = place_of(tensor)
            entries = self.known_about(tensor).entries
            entries[:] = [entry for entry in entries if entry.first < first or end < entry.end]

    def sources(self, tensor: Tensor, kind: Kind) -> list[NonfiniteSource]:
        """Return the sources of one kind of non-finite elements, else all known sources of the tensor."""
        _, first, end = place_of(tensor)
        entries = self.known_about(tensor).entries
        entries = [entry for entry in entries if entry.first < end and first < entry.end]
        alike = [entry.source for entry in entries if entry.kind == kind]
        if alike:
            return alike
        return [entry.source for entry in entries]

    def protect(self, tensor: Tensor) -> None:
        """Copy the memory that an operation is about to write to, unless the replay made it."""
        known = self.known_about(tensor)
        if not known.made and known.before is None:
            known.before = _bytes(known.storage).clone()

    def restore(self) -> None:
        with torch.no_grad():
            for known in self._known.values():
                if known.before is not None:
                    _bytes(known.storage).copy_(known.before)

    def known_about(self, tensor: Tensor) -> _Known:
        storage = place_of(tensor)[0]
        # The same for tensors that share memory.
        return self._known.setdefault(int(storage._cdata), _Known(storage))  # noqa: SLF001 # no public name


def _bytes(storage: Any) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage)


def rounded_constant(call: Call, output: Tensor) -> str:
    """Return the sentence on a constant that the format of a result rounds to zero, if the operation has one."""
    if call.stem not in _GUARDS or not output.is_floating_point():
        return ""
    for number in tree_leaves((call.args, call.kwargs)):
        # The dispatcher passes some numbers as tensors.
        if isinstance(number, Tensor) and not number.dim() and number.is_cpu:
            number = number.item()  # noqa: PLW2901 # the same number
        if isinstance(number, float) and number and not torch.tensor(number, dtype=output.dtype):
            name = str(output.dtype).removeprefix("torch.")
            places = [call.name, *map(str, lines_here()[-1:])]
            return f"{name} rounds the constant {number:g} to 0: {' at '.join(places)}"
    return ""


def place_of(tensor: Tensor) -> tuple[Any, int, int]:
    """Return the storage of a tensor, and the bytes of it from which and to which the tensor reaches."""
    part = _dist.local(tensor.detach())
    if part.layout == torch.sparse_coo:
        part = part._values()  # noqa: SLF001 # no copy
    elif part.layout != torch.strided:
        part = part.values()
    size = part.element_size()
    first = int(part.storage_offset()) * size
    if not part.numel():
        return part.untyped_storage(), first, first
    last = 0
    for length, stride in zip(part.shape, part.stride(), strict=True):
        last += (int(length) - 1) * int(stride)
    return part.untyped_storage(), first, first + (last + 1) * size
