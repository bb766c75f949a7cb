"""Where non-finite numbers can come from, and which tensors an operation took them from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gradsurgeon.diagnosis import Cause, Line, TensorFacts
from gradsurgeon.forensics.operations import (
    KINDS,
    Kind,
    is_real,
    kinds_in,
    nonfinite_kind,
    tensors_of,
    where_is,
)

_LOGARITHMS = ("aten.log", "aten.log2", "aten.log10", "aten.log1p")


@dataclass(frozen=True, slots=True)
class Call:
    """An operation and its arguments, to be repeated.

    Attributes:
        func: the operation, as the dispatcher has it.
        name: its name.
        args: the positional arguments, with copies of tensors that the operation has written over.
        kwargs: the keyword arguments, likewise.
        written: by identity of such a copy, the tensor that was written over.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The name without namespace and without the underscore of in-place operations."""
        return self.name.rpartition(".")[2].rstrip("_")


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """A tensor or number that was non-finite before any operation: a weight, an input, a gradient from outside.

    ``intended`` marks infinities that the script wrote itself: they are never blamed.
    """

    when: int
    what: Literal[
        "weight", "buffer", "input", "loss input", "output gradient", "literal", "unknown"
    ]
    name: str
    facts: TensorFacts | None = None
    lines: tuple[Line, ...] = ()
    intended: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Birth:
    """An operation that made non-finite numbers out of finite tensors, or out of masks.

    Attributes:
        constant: no input leads back to a parameter.
        rival: another operation that made an infinity at the same elements, if the two cannot be told apart.
        cause: the result of repeating the operation at once.
        repeated: whether all arguments are known, so the operation could be repeated.
    """

    when: int
    kind: Kind
    operation: str
    direction: Literal["forward", "backward"]
    module: str
    module_type: str
    node: str
    lines: tuple[Line, ...]
    inputs: tuple[TensorFacts, ...]
    output: TensorFacts
    history: tuple[tuple[str, float], ...]
    cause: Cause
    constant: bool = False
    rival: str = ""
    repeated: bool = True


Source = Origin | Birth


def is_intended(source: Source) -> bool:
    return isinstance(source, Origin) and source.intended


def may_mask(source: Source, kind: Kind) -> bool:
    """Tell whether an infinity may be a mask although no script wrote it: log(0), constants, an input.

    Only its use decides that: the softmax of such a mask is fine, ``0 * log(0)`` is not.
    """
    if kind != "-Inf":
        return False
    if isinstance(source, Origin):
        return source.what == "input"
    return source.constant or source.operation.rstrip("_") in _LOGARITHMS


def first_to_blame(sources: Iterable[Source]) -> Source | None:
    """Return the earliest source; an intended infinity only if there is no other source."""
    in_order = sorted(set(sources), key=lambda source: source.when)
    blamed = [s for s in in_order if not is_intended(s)]
    return next(iter(blamed or in_order), None)


# The inputs that led to the elements of one kind in a result: the tensors that are NaN there; the tensors that are
# infinite there, with the sign, if none is NaN; and whether some of the elements were made of finite numbers alone.
Given = tuple[list[Tensor], list[tuple[Tensor, Kind]], bool]


def given(call: Call, output: Tensor, kind: Kind) -> Given:
    """Return the inputs that led to the NaN, Inf or -Inf of a result. Waits for the device.

    Elementwise operations are compared element by element, others as a whole.
    """
    sides = [(t, taken) for t, taken in _read(call) if is_real(t) and nonfinite_kind(t)]
    if not sides:
        return [], [], True
    if (apart := _by_elements(call, sides, output, kind)) is not None:
        return apart
    found = [(tensor, one) for tensor, _ in sides for one in kinds_in(tensor)]
    nan = [tensor for tensor, one in found if one == "NaN"]
    infinite: list[tuple[Tensor, Kind]] = [(t, one) for t, one in found if one != "NaN"]
    if kind == "NaN":
        infinite = [] if nan else infinite
    elif infinite:
        nan = []
    return nan, infinite, False


def _read(call: Call) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tensors that an operation reads, each with the elements that it reads, ``None`` for all."""
    args = call.args
    if call.stem == "copy":
        yield args[1], None
    elif call.stem == "where" and len(args) == 3:  # noqa: PLR2004 # condition, one, other
        condition, one, other = args
        yield one, condition
        yield other, condition.logical_not()
    elif call.stem == "masked_fill":
        yield args[0], args[1].logical_not()
        if isinstance(args[2], Tensor):
            yield args[2], args[1]
    else:
        kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
        yield from ((tensor, None) for tensor in tensors_of(args, kwargs))


def _by_elements(
    call: Call, sides: list[tuple[Tensor, Tensor | None]], output: Tensor, kind: Kind
) -> Given | None:
    """Compare only the elements where the result is of a kind; ``None`` if elements do not correspond."""
    if torch.Tag.pointwise not in getattr(call.func, "tags", ()) and call.stem != "copy":
        return None
    if any(t.layout != torch.strided or t.is_complex() for t in (output, *(t for t, _ in sides))):
        return None
    there = where_is(output, kind)
    read = [(t, there if taken is None else there & taken) for t, taken in sides]
    found = {k: [where_is(tensor, k) & place for tensor, place in read] for k in KINDS}
    if any(place.shape != there.shape for places in found.values() for place in places):
        return None
    left = there
    for place in found["NaN"]:
        left = left & ~place
    infinite = [
        (tensor, k)
        for k in KINDS[1:]
        for (tensor, _), place in zip(read, found[k], strict=True)
        if bool((place & left).any())
    ]
    for place in (*found["Inf"], *found["-Inf"]):
        left = left & ~place
    nan = [t for (t, _), place in zip(read, found["NaN"], strict=True) if bool(place.any())]
    return nan, infinite, bool(left.any())
