"""What a replay can find to be the source of what is not finite."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from gradsurgeon.diagnosis import Line, TensorFacts

Kind = Literal["NaN", "Inf"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Call:
    """An operation and what it was given, to be repeated.

    Attributes:
        func: as the dispatcher has it.
        name: of the operation.
        args: as they were before it, where it has written over them.
        kwargs: the same.
        written: the tensors that it has written over.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """What was not finite before any operation: a weight, an input, a gradient from outside, a number.

    ``intended`` of infinities that the script wrote: nobody is to blame for them.
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
    """An operation that made what is not finite out of finite tensors."""

    when: int
    kind: Kind
    operation: str
    direction: Direction
    module: str
    module_type: str
    node: str
    lines: tuple[Line, ...]
    inputs: tuple[TensorFacts, ...]
    output: TensorFacts
    output_number: int
    history: tuple[tuple[str, float], ...]
    call: Call | None


Source = Origin | Birth


def is_intended(source: Source) -> bool:
    return isinstance(source, Origin) and source.intended


def first_to_blame(sources: Iterable[Source]) -> Source | None:
    """Return the earliest source; what the script meant to be infinite only if there is nothing else."""
    in_order = sorted(set(sources), key=lambda source: source.when)
    blamed = [s for s in in_order if not is_intended(s)]
    return next(iter(blamed or in_order), None)
