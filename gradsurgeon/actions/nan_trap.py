"""The action `nan-trap`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Decision
from gradsurgeon.actions._kinds import TrapRule


class NanTrap(TrapRule):
    """Stop a NaN or an infinity before it reaches a weight.

    ## What it does
    Looks at the gradients after each backward pass, before the script can clip them, and decides
    right before the update: `then: raise` stops the run, `then: skip-step` hides every gradient of this step
    from the optimizer (no decay, no momentum), `then: warn` only reports. The report
    separates non-finite from finite parameters, in the order in which backward produced
    their gradients. After `give_up_after` trips in a row the trap raises whatever `then` says.

    After a skipped step, what the optimizer counts is as before: numbers in its groups, on itself and in its state. The
    gradients are there again, unless the step or the script has cleared them. LBFGS takes no rule that skips. If another
    optimizer evaluates its closure after it has moved weights, the trap raises, and says that weights may have moved.

    ## Where it was born
    At its first trip the trap runs the step again (`forensics: true`) under probes on every operation: forward from
    the kept inputs, backward from the kept gradients of the outputs. It names the module, the direction, the
    operation and the line of the script that made the first NaN or Inf, with the inputs, the output and the
    magnitudes before it. It repeats that operation alone to find the cause: `overflow`, `mathematics`, `bad input`
    (a weight or a batch that was non-finite before), `kernel` (another implementation gives finite numbers),
    `transient` (it does not happen again) or `unknown`. An infinity that the script wrote, as in a mask, is not
    blamed. If the replay shows less, the diagnosis is `partial`, or `not reproduced` without blame, with the reason.
    A loss outside of the model cannot be run again, and neither can a model whose parameters are divided over ranks:
    there the trap names the gradients alone. Training continues as it would have without the replay.

    With a run directory, or with `bundle: true`, it writes the step as a directory `trap-step812-rank0` for
    `gradsurgeon replay` elsewhere. The directory holds weights, inputs and output gradients: about the size of a
    checkpoint without the state of the optimizer.

    ## Why use it
    One non-finite gradient makes every weight NaN at the next update, and `clip_grad_norm_` spreads
    it over all gradients before that.

    ## Cost
    One batched reduction per backward pass, shared with `norm-log`, and one device-to-host read per
    step. With `skip-step` or `raise` and a fused optimizer of torch on CUDA, the device decides, and the host
    reads the answer before the next update without a wait (set-ups). For each call of the model the trap keeps the inputs and the gradients of the
    outputs until the step ends, by reference and up to 256 MiB. It copies the random
    state, a sample of the outputs, and the buffers that the call changes. On a device a tensor of a module or
    a tag takes one reduction without a copy, which tells whether all elements are finite, and not how many are not.
    """

    EXAMPLES: ClassVar = (
        Example({}, [1.0, -2.0], trips=False),
        Example({}, [1.0, float("nan")], trips=True),
        Example({"then": "skip-step"}, [float("inf"), 0.0], trips=True),
        # The square of this gradient overflows float32, the gradient does not.
        Example({"then": "warn"}, [3e38, 1e38], trips=False),
    )

    action: Literal["nan-trap"] = "nan-trap"
    forensics: Annotated[
        bool,
        Field(description="Run the step again at the first trip, to find the faulty operation."),
    ] = True
    bundle: Annotated[
        bool,
        Field(
            description="Without a run directory write the data to run the step again under "
            "gradsurgeon-traps/."
        ),
    ] = False

    def compile(self) -> Decision:
        return Decision(
            "nonfinite",
            lambda counts: counts > 0,
            self.then,
            self.give_up_after,
            forensics=self.forensics,
            bundle=self.bundle,
        )
