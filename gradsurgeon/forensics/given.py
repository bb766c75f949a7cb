"""What an operation was given that led to the elements of its result that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsurgeon.forensics.operations import is_real, kinds_in, nonfinite_kind, tensors_of, where_is
from gradsurgeon.forensics.sources import KINDS, Call, Kind


@dataclass(frozen=True, slots=True)
class Given:
    """What led to the elements of one kind.

    Attributes:
        nan: the tensors that are NaN there.
        infinite: the tensors that are infinite there, where none is NaN, and their sign.
        fresh: whether some of the elements were made of finite numbers alone.
    """

    nan: list[Tensor]
    infinite: list[tuple[Tensor, Kind]]
    fresh: bool


def given(call: Call, output: Tensor, kind: Kind) -> Given:
    """Return what led to the NaN, Inf or -Inf of a result. Waits for the device.

    Operations that work element by element are asked there; others as a whole.
    """
    sides = [(t, taken) for t, taken in _read(call) if is_real(t) and nonfinite_kind(t)]
    if not sides:
        return Given([], [], fresh=True)
    if (apart := _by_elements(call, sides, output, kind)) is not None:
        return apart
    nan: list[Tensor] = []
    infinite: list[tuple[Tensor, Kind]] = []
    for tensor, _ in sides:
        for found in kinds_in(tensor):
            if found == "NaN":
                nan.append(tensor)
            else:
                infinite.append((tensor, found))
    if kind == "NaN":
        infinite = [] if nan else infinite
    elif infinite:
        nan = []
    return Given(nan, infinite, fresh=False)


def _read(call: Call) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tensors that an operation reads, and where in them, if that is not everywhere."""
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
    """Look only where the result is of a kind; ``None`` where elements do not correspond."""
    tags = getattr(call.func, "tags", ())
    if torch.Tag.pointwise not in tags and call.stem != "copy":
        return None
    if any(t.layout != torch.strided or t.is_complex() for t in (output, *(t for t, _ in sides))):
        return None
    there = where_is(output, kind)
    read = [(t, there if taken is None else there & taken) for t, taken in sides]
    found = {k: [_at(tensor, k, place) for tensor, place in read] for k in KINDS}
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
    for k in KINDS[1:]:
        for place in found[k]:
            left = left & ~place
    nan = [t for (t, _), place in zip(read, found["NaN"], strict=True) if bool(place.any())]
    return Given(nan, infinite, fresh=bool(left.any()))


def _at(tensor: Tensor, kind: Kind, place: Tensor) -> Tensor:
    return where_is(tensor, kind) & place
