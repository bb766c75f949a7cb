"""The action `norm-log`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from gradsurgeon.actions._base import Example, Role, Rule
from gradsurgeon.errors import did_you_mean

STATS = ("l1", "l2", "linf", "mean", "std", "min", "max", "zeros", "nonfinite")


def _stats(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise PydanticCustomError("stats_type", "expected a list of statistics", {"at": []})
    for index, stat in enumerate(value):
        if stat not in STATS:
            hint = did_you_mean(str(stat), STATS) or f"known: {', '.join(STATS)}"
            context: dict[str, Any] = {"text": f"unknown statistic `{stat}`", "hint": hint}
            raise PydanticCustomError("unknown_stat", "{text}", {**context, "at": [index]})
    if len(set(value)) != len(value):
        raise PydanticCustomError("stats_twice", "a statistic is listed twice", {"at": []})
    return tuple(value)


Stats = Annotated[
    tuple[str, ...],
    BeforeValidator(_stats),
    WithJsonSchema(
        {
            "type": "array",
            "items": {"enum": list(STATS)},
            "minItems": 1,
            "uniqueItems": True,
        }
    ),
]


class NormLog(Rule):
    """Record how large a gradient is, per parameter and step.

    ## What it does
    Records `stats` of every matched gradient: the norms `l1`, `l2`, `linf`; `mean`, `std`
    (population), `min`, `max`; `zeros` and `nonfinite`, the number of such elements. It changes
    nothing: training with it is bit-identical to training without.

    ## Why use it
    To see which layer explodes, vanishes or stands still, and when that began.

    ## Points
    `accumulated` (default): the gradient after the last backward pass of a step, before the script
    clips it. `backward`: the contribution of each pass, one record per pass. `step`: what the
    optimizer gets, after clipping and after the rules before this one in the file.

    ## Cost
    `l2` is one batched reduction per backward pass, shared with `nan-trap`; the others one pass over
    the tensor each. Never waits for the device.
    """

    role: ClassVar[Role] = "observe"
    points: ClassVar = ("accumulated", "backward", "step")
    EXAMPLES: ClassVar = (
        Example({}, [3.0, 4.0], record={"l2": 5.0}),
        Example(
            {"stats": ["l1", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"]},
            [3.0, -4.0, 0.0, 1.0],
            record={
                "l1": 8.0,
                "linf": 4.0,
                "mean": 0.0,
                "std": 6.5**0.5,
                "min": -4.0,
                "max": 3.0,
                "zeros": 1.0,
                "nonfinite": 0.0,
            },
        ),
    )

    action: Literal["norm-log"] = "norm-log"
    stats: Annotated[Stats, Field(description="What to record.")] = ("l2",)

    def complex_problem(self) -> str:
        """Return which of the statistics complex numbers do not have."""
        ordered = [stat for stat in self.stats if stat in ("mean", "min", "max")]
        return f"complex numbers have no real {' or '.join(ordered)}" if ordered else ""
