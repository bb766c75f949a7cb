"""Where non-finite numbers can come from, and which tensors an operation took them from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsurgeon.diagnosis import ALREADY, Cause, Diagnosis, Line, TensorFacts
from gradsurgeon.forensics.cause import cause
from gradsurgeon.forensics.operations import Call, Kind, is_real, kinds_in, nonfinite_kind, where_is

# A replay of one call knows neither the step nor how certain the result is.
BLANK = Diagnosis("not reproduced", (), 0, 0)
_LOGARITHMS = ("aten.log", "aten.log2", "aten.log10", "aten.log1p")
_LOOK_AT_LOSS = (
    "compute the loss inside the forward pass of a module that holds the model, and the next diagnosis names the "
    "operation; until then look at the divisions, roots, powers and logarithms among its operations"
)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """An operation that made non-finite numbers, or a tensor or number that was non-finite before.

    An operation has made them if its inputs were finite, or masks.

    Attributes:
        when: its moment in the replay.
        told: what a diagnosis reports of it; an ``operation`` only if that made the numbers.
        intended: whether the script wrote the infinity itself: it is never blamed.
        constant: whether no input of the operation leads back to a parameter.
        rival: another operation that made an infinity at the same elements, if the two cannot be told apart.
        repeated: whether all arguments are known, so the operation could be repeated.
    """

    when: int
    told: Diagnosis
    intended: bool = False
    constant: bool = False
    rival: str = ""
    repeated: bool = True

    @property
    def is_operation(self) -> bool:
        return bool(self.told.operation)

    @property
    def is_outside(self) -> bool:
        """Whether the numbers came back to the model in the gradient of an output."""
        return self.told.where == "output gradient"

    def may_mask(self, kind: Kind) -> bool:
        """Tell whether its infinity may be a mask although no script wrote it: log(0), constants, an input.

        Only its use decides that: the softmax of such a mask is fine, ``0 * log(0)`` is not.
        """
        if kind != "-Inf":
            return False
        if not self.is_operation:
            return self.told.where == "input"
        return self.constant or self.told.operation.rstrip("_") in _LOGARITHMS


def held(
    when: int,
    where: str,
    name: str,
    measured: TensorFacts,
    lines: tuple[Line, ...] = (),
    *,
    intended: bool = False,
) -> Source:
    """Return a tensor or number that was non-finite before any operation as a source."""
    if where == "output gradient":
        text = "the gradient that came back to the model was non-finite already"
        why = Cause("unknown", (text,), _LOOK_AT_LOSS)
    elif where == "unknown":
        text = "no operation that PyTorch shows made it: something else wrote into its memory"
        why = cause("unknown", text)
    elif where == "literal":
        why = cause("bad input", "the script itself wrote the number")
    else:
        why = cause("bad input", f"{where} {name} was not finite {ALREADY[where]}")
    told = replace(
        BLANK,
        what=measured.kind,
        where=where,
        name=name,
        lines=lines,
        output=measured,
        cause=why,
    )
    return Source(when, told, intended)


def first_to_blame(sources: Iterable[Source]) -> Source | None:
    """Return the earliest source; an intended infinity only if there is no other source."""
    return min(sources, key=lambda source: (source.intended, source.when), default=None)


def taken_from(call: Call, output: Tensor, kind: Kind) -> tuple[list[tuple[Tensor, Kind]], bool]:
    """Return the non-finite inputs that led to the NaN, Inf or -Inf of a result, each with its kind.

    The second value tells whether finite numbers alone made some of these elements. Elementwise operations are compared
    element by element, others as a whole. Waits for the device.
    """
    read = [(t, mask) for t, mask in _read(call) if is_real(t) and nonfinite_kind(t)]
    if not read:
        return [], True
    if _is_elementwise(call, [output, *(tensor for tensor, _ in read)]):
        left = there = where_is(output, kind)
        found: list[tuple[Tensor, Kind]] = []
        # An infinity beside a NaN has not made the NaN.
        kinds: tuple[tuple[Kind, ...], ...] = (("NaN",), ("Inf", "-Inf"))
        for same in kinds:
            places = [
                (t, one, where_is(t, one) & _at(there, mask)) for one in same for t, mask in read
            ]
            if any(place.shape != there.shape for *_, place in places):
                break
            found += [(t, one) for t, one, place in places if bool((place & left).any())]
            for *_, place in places:
                left = left & ~place
        else:
            return found, bool(left.any())
    whole = [(tensor, one) for tensor, _ in read for one in kinds_in(tensor)]
    alike = [(tensor, one) for tensor, one in whole if (one == "NaN") == (kind == "NaN")]
    return alike or whole, False


def _at(there: Tensor, mask: Tensor | None) -> Tensor:
    return there if mask is None else there & mask


def _is_elementwise(call: Call, tensors: Iterable[Tensor]) -> bool:
    pointwise = torch.Tag.pointwise in getattr(call.func, "tags", ()) or call.stem == "copy"
    return pointwise and all(t.layout == torch.strided and not t.is_complex() for t in tensors)


def _read(call: Call) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tensors that an operation reads, each with a mask of the elements that it reads, ``None`` for all."""
    args = call.args
    if call.stem == "copy":
        yield args[1], None
    elif call.stem == "where" and len(args) == 3:  # noqa: PLR2004 # condition, one, other
        yield args[1], args[0]
        yield args[2], args[0].logical_not()
    elif call.stem == "masked_fill":
        yield args[0], args[1].logical_not()
        if isinstance(args[2], Tensor):
            yield args[2], args[1]
    else:
        kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
        yield from ((tensor, None) for tensor in replace(call, kwargs=kwargs).tensors)
