"""Where non-finite numbers come from: operations, tensors, and the memory that holds them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradsurgeon.common.diagnosis import Cause, Diagnosis, Line, TensorFacts
from gradsurgeon.forensics.cause import cause
from gradsurgeon.forensics.operations import (
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
# Operations that make zero of zero.
_KEEP_ZERO = ("sqrt", "pow", "square", "abs", "clone", "_to_copy", "mul", "expand", "detach")
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
        rival: another operation that made an infinity at the same elements, if the two cannot be told apart.
        repeated: whether all arguments are known, so the operation could be repeated.
    """

    when: int
    diagnosis: Diagnosis
    intended: bool = False
    constant: bool = False
    rival: str = ""
    repeated: bool = True

    @property
    def is_operation(self) -> bool:
        return bool(self.diagnosis.operation)

    @property
    def is_outside(self) -> bool:
        return self.diagnosis.where == "output gradient"

    def may_mask(self, kind: Kind) -> bool:
        """Tell whether its infinity may be a mask although no script wrote it: log(0), constants, an input.

        Only its use decides that: the softmax of such a mask is fine, ``0 * log(0)`` is not.
        """
        if kind != "-Inf":
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


def taken_from(call: Call, output: Tensor, kind: Kind) -> tuple[list[tuple[Tensor, Kind]], bool]:
    """Return the non-finite inputs that led to the NaN, Inf or -Inf of a result, each with its kind.

    The second value tells whether finite numbers alone made some of these elements. Elementwise operations are
    compared by element, others as a whole. Waits for the device.
    """
    inputs = [(t, mask) for t, mask in _read(call) if nonfinite_kind(t)]
    if not inputs:
        return [], True
    if _is_elementwise(call, [output, *(tensor for tensor, _ in inputs)]):
        by_element = _taken_by_element(inputs, where_is(output, kind))
        if by_element is not None:
            return by_element
    whole: list[tuple[Tensor, Kind]] = []
    for tensor, _ in inputs:
        whole += [(tensor, kind_of_input) for kind_of_input in kinds_in(tensor)]
    alike = [taken for taken in whole if (taken[1] == "NaN") == (kind == "NaN")]
    if alike:
        return alike, False
    return whole, False


def _taken_by_element(
    inputs: Iterable[tuple[Tensor, Tensor | None]], result: Tensor
) -> tuple[list[tuple[Tensor, Kind]], bool] | None:
    """Return inputs as `taken_from` does, by a mask of the result; ``None`` if shapes differ.

    An infinity beside a NaN has not made the NaN.
    """
    unexplained = result
    taken: list[tuple[Tensor, Kind]] = []
    kinds: tuple[tuple[Kind, ...], ...] = (("NaN",), ("Inf", "-Inf"))
    for alike in kinds:
        explained = []
        for kind in alike:
            for tensor, mask in inputs:
                place = where_is(tensor, kind) & result
                if mask is not None:
                    place = place & mask
                if place.shape != result.shape:
                    return None
                if bool((place & unexplained).any()):
                    taken.append((tensor, kind))
                explained.append(place)
        for place in explained:
            unexplained = unexplained & ~place
    return taken, bool(unexplained.any())


def _is_elementwise(call: Call, tensors: Iterable[Tensor]) -> bool:
    pointwise = torch.Tag.pointwise in getattr(call.func, "tags", ()) or call.stem == "copy"
    return pointwise and all(t.layout == torch.strided and not t.is_complex() for t in tensors)


def _read(call: Call) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tensors that an operation reads, each with a mask of elements, ``None`` for all."""
    args = call.args
    if call.stem == "copy":
        yield args[1], None
    elif call.stem in ("where", "masked_fill") and len(args) == 3:  # noqa: PLR2004 # a mask and two values
        mask, chosen, other = args
        if call.stem == "masked_fill":
            other, mask, chosen = args
        yield other, mask.logical_not()
        if isinstance(chosen, Tensor):
            yield chosen, mask
    else:
        kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
        for tensor in tensors_of(call.args, kwargs):
            yield tensor, None


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
    it. ``lost`` is the sentence on a constant of which it holds a zero: an epsilon of 1e-8 is 0 in float16.
    """

    storage: Any
    made: bool = False
    entries: list[_Entry] = field(default_factory=list)
    before: Tensor | None = None
    lost: str = ""


class Memory:
    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def add_own(self, tensors: Iterable[Tensor]) -> None:
        """Note memory that belongs to the replay."""
        for tensor in tensors:
            self.known_about(tensor).made = True

    def remember(self, tensor: Tensor, sources: Mapping[Kind, Iterable[NonfiniteSource]]) -> None:
        """Note by kind the sources of the non-finite numbers of a tensor; forget earlier ones."""
        self.forget(tensor)
        _, first, end = place_of(tensor)
        entries = self.known_about(tensor).entries
        for kind, made_by in sources.items():
            for source in dict.fromkeys(made_by):
                entries.append(_Entry(first, end, kind, source))

    def forget(self, tensor: Tensor) -> None:
        entries = self.known_about(tensor).entries
        if entries and tensor.is_contiguous():
            _, first, end = place_of(tensor)
            entries[:] = [e for e in entries if e.first < first or end < e.end]

    def sources(self, tensor: Tensor, kind: Kind) -> list[NonfiniteSource]:
        """Return the sources of one kind of non-finite elements, else all known sources of the tensor."""
        _, first, end = place_of(tensor)
        sources: dict[bool, list[NonfiniteSource]] = {True: [], False: []}
        for entry in self.known_about(tensor).entries:
            if entry.first < end and first < entry.end:
                sources[entry.kind == kind].append(entry.source)
        if sources[True]:
            return sources[True]
        return sources[False]

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

    def follow_lost_constants(self, call: Call, outputs: Iterable[Tensor]) -> None:
        for output in outputs:
            lost = ""
            if call.stem in _KEEP_ZERO:
                lost = self.lost_constant(call)
            elif call.stem in _GUARDS and output.is_floating_point():
                lost = _rounded(call, output)
            if lost and not bool((elements(output) == 0).any()):
                lost = ""
            self.known_about(output).lost = lost

    def lost_constant(self, call: Call) -> str:
        for tensor in call.tensors:
            lost = self.known_about(call.passed(tensor)).lost
            if lost:
                return lost
        return ""

    def known_about(self, tensor: Tensor) -> _Known:
        storage = place_of(tensor)[0]
        # The same for tensors that share memory.
        return self._known.setdefault(int(storage._cdata), _Known(storage))  # noqa: SLF001 # no public name


def _bytes(storage: Any) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return whole.set_(storage)


def _rounded(call: Call, output: Tensor) -> str:
    limits = torch.finfo(output.dtype)
    smallest = limits.smallest_normal * limits.eps
    for number in _constants(call):
        if 0 < abs(number) <= smallest / 2:
            dtype = str(output.dtype).removeprefix("torch.")
            text = (
                f"{dtype} rounds the constant {number:g} to 0, as the smallest number that it holds is "
                f"{smallest:.1e}: {call.name}"
            )
            lines = lines_here()
            if lines:
                text += f" at {lines[-1]}"
            return text
    return ""


def _constants(call: Call) -> list[float]:
    numbers = []
    for argument in tree_leaves((call.args, call.kwargs)):
        # The dispatcher passes some numbers as tensors.
        if isinstance(argument, Tensor) and not argument.dim() and argument.is_cpu:
            argument = argument.item()  # noqa: PLW2901 # the same number
        if isinstance(argument, float):
            numbers.append(argument)
    return numbers


def place_of(tensor: Tensor) -> tuple[Any, int, int]:
    """Return the storage of a tensor, and the bytes of it from which and to which the tensor reaches."""
    part = _dist.local(tensor.detach())
    if part.layout == torch.sparse_coo:
        part = part._values()  # noqa: SLF001 # no copy
    elif part.layout != torch.strided:
        part = part.values()
    size = part.element_size()
    first = int(part.storage_offset()) * size
    end = first
    if part.numel():
        end += size
        for length, stride in zip(part.shape, part.stride(), strict=True):
            end += (int(length) - 1) * int(stride) * size
    return part.untyped_storage(), first, end
