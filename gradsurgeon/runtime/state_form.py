"""The form of a session state, and the check that reports all problems before anything changes."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, Field, InstanceOf, TypeAdapter, ValidationError, ValidationInfo
from pydantic_core import PydanticCustomError
from torch import Tensor

from gradsurgeon.errors import GradSurgeonError, printable

_Value = TypeVar("_Value")
# A damaged state of a large model has as many flaws as the model has parameters.
_MOST_SHOWN = 20
# Rows of the learnt state: a count and a mean. Rounding may put a variance, the third row, below 0.
_ABOVE_0 = 2
_REMEDY = "the state is damaged: resume from another one, or from none, and the rules restart what they learn"


def _numbers(tensor: Tensor) -> Tensor:
    flaws = []
    # The checks below need plain memory.
    is_plain = tensor.layout == torch.strided and tensor.device.type != "meta"
    if not (is_plain and tensor.is_floating_point()):
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        flaws.append(f"is of {kind}, and should hold floating point numbers")
    elif bad := int((~tensor.isfinite()).sum()):
        flaws.append(
            f"{bad} of {tensor.numel()} numbers are NaN or infinite, which a rule never learns"
        )
    elif bool((tensor[:_ABOVE_0] if tensor.dim() > 1 else tensor).lt(0).any()):
        flaws.append("has numbers below 0, but no count or norm is negative")
    return _sound(tensor.detach(), flaws)


def _sizes(rule: LearntByRule, info: ValidationInfo) -> LearntByRule:
    rows: Mapping[str, int] = info.context or {}
    flaws = []
    for number, part in enumerate(rule.statistics):
        if len(set(part.params)) < len(part.params):
            flaws.append(f"statistic {number} names a parameter twice")
        count, kept, usual = len(part.params), tuple(part.kept.shape), tuple(part.usual.shape)
        height = rows.get(rule.bound, kept[0] if kept else 0)
        wanted = {"kept": (height, 1 if rule.per == "rule" else count), "usual": (count,)}
        for what, size in {"kept": kept, "usual": usual}.items():
            if size != wanted[what]:
                told = f"{what!r} is of size {size} and, for {count} parameters, should be of {wanted[what]}"
                flaws.append(f"in statistic {number} {told}")
    return _sound(rule, flaws)


def _sound(value: _Value, flaws: list[str]) -> _Value:
    if flaws:
        raise PydanticCustomError("state", "{flaws}", {"flaws": "; ".join(flaws)})
    return value


_Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
_Numbers = Annotated[InstanceOf[Tensor], AfterValidator(_numbers)]


@dataclass(frozen=True, slots=True)
class Learnt:
    """The learnt state of a rule for parameters with a common optimizer: see `RunningStatistic`."""

    params: list[str]
    kept: _Numbers
    usual: _Numbers


@dataclass(frozen=True, slots=True)
class LearntByRule:
    bound: str
    per: Literal["rule", "parameter"]
    params: list[str]
    statistics: list[Learnt]


@dataclass(frozen=True, slots=True)
class SessionState:
    """The checked result of `session.state_dict()`."""

    step: _Count
    common_step: _Count
    steps: dict[str, _Count]
    in_a_row: dict[str, dict[str, _Count]]
    rules: dict[str, Annotated[LearntByRule, AfterValidator(_sizes)]]
    # The shapes of parameters, by name; states of earlier versions have none.
    shapes: dict[str, list[_Count]] = field(default_factory=dict)


_FORM = TypeAdapter(SessionState)


def checked(state: Mapping[str, Any], rows: Mapping[str, int]) -> SessionState:
    """Return a checked state, from which a session can resume.

    Args:
        state: the result of `session.state_dict()`.
        rows: the number of rows that each bound keeps, by the names of the bounds.

    Raises:
        GradSurgeonError: the state is not valid; the text lists every problem.
    """
    try:
        return _FORM.validate_python(dict(state), context=rows)
    except ValidationError as found:
        errors = found.errors(include_url=False)
    lines = [_told(error) for error in errors[:_MOST_SHOWN]]
    if more := len(errors) - len(lines):
        lines.append(f"... and {more:,} more")
    head = f"{len(errors):,} problem{'s' * (len(errors) > 1)} in the state of a session; nothing was changed"
    raise GradSurgeonError("\n".join([head, *lines, _REMEDY]))


def _told(error: Any) -> str:
    place = "".join(f"[{part!r}]" for part in error["loc"])
    if error["type"] == "state":
        return f"state{printable(place)}: {printable(error['msg'])}"
    if error["type"] == "missing":
        return f"state{printable(place)}: is missing"
    given = reprlib.repr(error["input"])
    wanted = error["msg"].removeprefix("Input ")
    return f"state{printable(place)}: {printable(given)} {printable(wanted)}"
