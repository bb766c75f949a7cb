"""The action `norm-log`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._fields import Flaw, described, items_of
from gradsurgeon.actions._kinds import ObserverRule
from gradsurgeon.errors import did_you_mean
from gradsurgeon.statistics import STATISTICS


def _stat_flaw(stat: object) -> Flaw | None:
    if isinstance(stat, str) and stat in STATISTICS:
        return None
    hint = did_you_mean(stat[:60], STATISTICS) if isinstance(stat, str) else ""
    message = f"expected the name of a statistic, found {described(stat)}"
    return Flaw("", message, hint or f"known: {', '.join(STATISTICS)}")


def _stats(value: object) -> tuple[str, ...]:
    hint = f"such as [l2]; known: {', '.join(STATISTICS)}"
    return items_of(value, "a list of statistics", hint, _stat_flaw, "statistic")


class NormLog(ObserverRule):
    """Record how large a gradient is, per parameter and step.

    ## What it does
    Records `stats` of every matched gradient: the norms `l1`, `l2`, `linf`; `mean`, `std`
    (population), `min`, `max`; `zeros` and `nonfinite`, the number of such elements. It changes
    nothing: training with it is bit-identical to training without.

    ## Why use it
    To see which layer explodes, vanishes or stagnates, and when that began.

    ## Points
    `accumulated` (default): the gradient after the last backward pass of a step, before the script
    clips it. `backward`: the contribution of each pass, one record per pass. `step`: the gradient that the
    optimizer gets, after clipping and after the rules above this rule in the file.

    ## Cost
    `l2` is one batched reduction per backward pass, shared with `nan-trap`; each other statistic is one pass over
    the tensor. Never waits for the device.

    ## Range
    `l2` is computed in float32, as in PyTorch. On an accelerator squares of elements beyond about 1e19
    overflow, so the recorded norm is infinite, and elements below about 1e-23 vanish from it. A
    CPU computes such norms again in float64. `l1`, `linf` and `nonfinite` have no such limits.
    """

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

    measures: ClassVar[bool] = True

    action: Literal["norm-log"] = "norm-log"
    stats: Annotated[
        tuple[str, ...],
        BeforeValidator(_stats),
        WithJsonSchema(
            {
                "type": "array",
                "items": {"enum": list(STATISTICS)},
                "minItems": 1,
                "uniqueItems": True,
            }
        ),
        Field(description="The statistics to record."),
    ] = ("l2",)

    def complex_problem(self) -> str:
        real = [stat for stat in self.stats if STATISTICS[stat].real]
        return f"complex numbers have no real {' or '.join(real)}" if real else ""
