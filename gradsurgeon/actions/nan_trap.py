"""The action `nan-trap`."""

from __future__ import annotations

from typing import ClassVar, Literal

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Decision
from gradsurgeon.actions._kinds import TrapRule


class NanTrap(TrapRule):
    """Stop a NaN or an infinity before it reaches a weight.

    ## What it does
    Looks at the gradients after each backward pass, before the script can clip them, and decides
    right before the update: `then: raise` stops the run, `then: skip-step` lets the optimizer touch
    nothing in this step (no decay, no momentum, no state), `then: warn` only reports. The report
    names the border: which parameters are non-finite and which are not, in the order in which
    backward produced them. After `give_up_after` trips in a row it raises whatever `then` says.

    ## Why use it
    One non-finite gradient makes every weight NaN at the next update, and `clip_grad_norm_` spreads
    it over all gradients before that.

    ## Cost
    One batched reduction per backward pass, shared with `norm-log`, and one device-to-host read per
    step, whatever `then` says.
    """

    EXAMPLES: ClassVar = (
        Example({}, [1.0, -2.0], trips=False),
        Example({}, [1.0, float("nan")], trips=True),
        Example({"then": "skip-step"}, [float("inf"), 0.0], trips=True),
        # Its square overflows float32, it does not.
        Example({"then": "warn"}, [3e38, 1e38], trips=False),
    )

    action: Literal["nan-trap"] = "nan-trap"

    def compile(self) -> Decision:
        return Decision("nonfinite", lambda counts: counts > 0, self.then, self.give_up_after)
