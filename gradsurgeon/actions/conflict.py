"""The action `conflict`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example, Role
from gradsurgeon.actions._effects import LossComparison
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import LossRule


class Conflict(LossRule):
    """Record how strongly the gradients of several losses conflict.

    ## What it does
    Compares the gradients of each pair of losses and changes nothing. For a pair `seg/depth` it records `cosine`, the
    cosine of the angle between the two (below 0 they conflict: a small step down one loss is a step up the other), and
    `ratio`, the norm of the first over the norm of the second.

    On parameters, `losses` names losses that the script passes to `gradsurgeon.backward({"seg": ..., "depth": ...})`.
    On modules with the same input tensor (`tensor: input.grad`), such as the heads of a network, it compares the
    gradients that they send back to that tensor, in an ordinary `loss.backward()`.

    ## Why use it
    Before trying `combine`: to see whether losses conflict at all, where in the network, and from when on. A ratio of
    1000 is no conflict but a loss that needs a weight.

    ## Points
    None: it acts while `gradsurgeon.backward` runs. Each call has its own record, with `per: parameter` one for each
    parameter. Gradients that several ranks average (DDP) are compared after the average; in a pass that DDP does not
    average (`no_sync`) and on modules each rank compares its own.

    ## Cost
    One more backward pass per loss, and memory for one gradient of the matched parameters per loss; on modules neither.
    Waits for the device once per call.
    """

    EXAMPLES: ClassVar = (
        Example(
            {"losses": ["seg", "depth"]},
            losses={"seg": [3.0, 4.0], "depth": [-4.0, 3.0]},
            record={"cosine": 0.0, "ratio": 1.0},
        ),
    )

    role: ClassVar[Role] = "observe"
    stats: ClassVar = ("cosine", "ratio")

    action: Literal["conflict"] = "conflict"
    per: Annotated[
        Literal["rule", "parameter", "module"],
        Field(description="Compare all matches of the rule at once, or each by itself."),
    ] = "rule"

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        if self.modules is not None and self.per != "rule":
            message = "`per` is for `params`: on modules the gradients of one tensor are compared"
            yield Flaw("per", message, "remove it")

    def compile(self) -> LossComparison:
        """Return the comparison of pairs."""
        return LossComparison(self.per)
