"""The action `check-update`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from gradsurgeon.actions._effects import Examination
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import CheckRule
from gradsurgeon.actions._options import Options


class Moved(Options):
    """How many elements of a weight have to move, or that none may."""

    min: Annotated[
        float | None,
        Field(gt=0, le=1, description="The share of elements of each weight that has to move."),
    ] = None
    within: Annotated[
        int | None,
        Field(ge=1, description="With `min`: in so many performed updates, 10 if not given."),
    ] = None
    max: Annotated[Literal[0] | None, Field(description="0: every element stays, bit by bit.")] = (
        None
    )

    def flaws(self) -> Iterator[Flaw]:
        if self.min is None and self.max is None:
            message = "`moved` asserts nothing: neither `min` nor `max` is given"
            hint = "such as `moved: {min: 0.05, within: 20}` or `moved: {max: 0}`"
            yield Flaw("min", message, hint, "missing-key")
        elif self.max is not None and (self.min, self.within) != (None, None):
            message = "a weight cannot move and stay: `max: 0` holds at each update"
            yield Flaw("max", message, "write two rules, one with `min`")


class CheckUpdate(CheckRule):
    """Find weights that get gradients and do not move, and updates that make a weight non-finite.

    ## What it finds
    A parameter that gets gradients in ten updates and stays as it is. The finding names the cause: no optimizer owns
    it, its learning rate is 0, its dtype rounds each update away, a rule freezes it, all updates were skipped, or the
    step of the optimizer does not write it. Trained tensors that belong to no module count too, and modules beside the
    model that no optimizer owns. An update that makes a weight non-finite from finite gradients is found at once.

    A parameter of the optimizer that never gets a gradient: after 20 updates if a reentrant checkpoint is the cause,
    else after 200, if its module runs. Gradients that are exactly 0 in ten updates are followed once, by hooks on the
    nodes of one backward pass, to the operation that makes them 0, and the next pass shows its line: a clamp, units that
    are off, `round`, an overflow before `rsqrt`, a saturated sigmoid, two factors of 0 such as a LoRA pair. A factor of
    0, a mask, an empty batch, a hinge and a softmax over one element are notices, and no findings. Weights that never
    move because their gradients are exactly 0 for another reason, after 200.

    `moved: {min: 0.05, within: 20}` asserts that 5 % of the elements of each weight differ from their first values
    within 20 updates, and passes as soon as they once did. `moved: {max: 0}` asserts that no bit changes.

    ## What stays quiet
    A gradient that is 0 by mathematics, as of a bias before a batch norm. A part without an optimizer that is in
    evaluation mode while the model trains, such as a network inside the loss. A learning rate of 0 under a schedule, and
    a half-precision weight with a float32 copy in its optimizer, are given 100 updates. Rows of a
    table that no batch meets: before it reports, the check looks at the elements with the largest gradients. Tables,
    modules that have not run, and experts and heads beside others that learn: another batch may reach them.

    ## How it looks
    At a fixed sample of 1,024 elements per tensor, smaller tensors whole, every ten updates, after fifty updates every
    hundred. `max: 0` reads all elements at each due update.

    ## Cost
    A hundredth of a read of all gradients per step on average. Nothing waits for the device until a weight has not
    moved.
    """

    action: Literal["check-update"] = "check-update"
    moved: Annotated[
        Moved | None, Field(description="An assertion in the place of the search for faults.")
    ] = None

    @property
    def tells_owners(self) -> bool:
        return self.moved is None

    def compile(self) -> Examination:
        from gradsurgeon.actions.checks.moved_check import MovedCheck  # noqa: PLC0415 # it needs torch
        from gradsurgeon.actions.checks.update_check import UpdateCheck  # noqa: PLC0415 # likewise

        moved = self.moved
        if moved is None:
            return Examination(UpdateCheck(), self.then)
        if moved.min is None:
            return Examination(MovedCheck(), self.then)
        within = moved.within or 10
        return Examination(MovedCheck(least=moved.min, within=within), self.then)
