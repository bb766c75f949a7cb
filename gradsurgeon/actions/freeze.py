"""The action `freeze`."""

from typing import Literal

from gradsurgeon.actions._kinds import FreezeRule


class Freeze(FreezeRule):
    """Keep the optimizer off a parameter.

    ## What it does
    In the steps of its schedule the optimizer finds no gradient: it does not decay the weight, does
    not use or feed its momentum, and keeps no state for it. The gradient itself is still computed,
    recorded and trapped. It is back after the step, also if the step raises, unless the step or the script has cleared it.

    ## Why use it
    To train a new head first and unfreeze the rest later, by a schedule in a file. To also save
    the work of the backward pass, set `requires_grad` to false in the script.

    ## Points
    `step` only. Not with LBFGS, whose update is one vector over all parameters, and not with weights that
    the script updates by hand, because there is no optimizer to hide a gradient from.

    ## Cost
    None per element; never waits for the device.
    """

    action: Literal["freeze"] = "freeze"
