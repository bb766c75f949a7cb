"""The action `combine`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example, Role
from gradsurgeon.actions._effects import Combination
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import LossNames, LossNumbers, LossRule
from gradsurgeon.actions._method_flaws import OPTIONS, method_flaws
from gradsurgeon.actions._methods import METHODS, Method, Weigher
from gradsurgeon.actions._strictness import Stricter

MethodName = Literal[
    "upgrad",
    "dualproj",
    "pcgrad",
    "mgda",
    "imtl-g",
    "aligned-mtl",
    "cagrad",
    "fairgrad",
    "krum",
    "mean",
    "sum",
    "constant",
    "random",
]


def _other_size(before: str, after: str) -> str:
    """Return what another method means for the length of what comes out, for a review."""
    was, now = METHODS[before].size, METHODS[after].size
    return "" if was == now else f"without conflict it gives {now}, no longer {was}"


class Combine(LossRule):
    """Make one gradient of those of several losses, so that they conflict less than in their sum.

    ## What it does
    The matched parameters get a weighted sum of the gradients of the single losses; `method` says how the weights follow
    from their inner products, taken over all that the rule matches. Parameters that no `combine` matches, such as
    heads, get the plain sum.

    On parameters, `losses` names losses that the script hands to
    `gradsurgeon.backward({"seg": ..., "depth": ...})`, which stands in the place of `(seg + depth).backward()`. A loss that
    is given there and not named here is added as it is. On modules that take one tensor
    (`tensor: input.grad`), as the heads of a network do, it combines what each of them sends back to that tensor, in an ordinary
    `loss.backward()`.

    A gradient of zeros, as of a loss that does not reach the parameters, is left out, also of an average (not by `krum`).
    Where a gradient is not finite, or the solver of a method fails, the plain sum is what arrives, and an event says why.
    Recorded in each call: `weight` of each loss, and `distance`, the norm of the difference from the plain
    sum over the norm of that sum; under `mode="observe"` it would have been that.

    ## Methods
    {METHODS}

    `preference` makes losses count more than others where the method knows that: without conflict the sum of
    the gradients times the preferences comes out. Losses under `memory` only
    constrain: what comes out must not conflict with them (A-GEM, arXiv 1812.00420).

    ## Why use it
    Losses that share a trunk fight over it: their gradients point in opposite directions, and the larger one wins. Look with
    `conflict` first whether they do.

    ## Points
    None: it acts while `gradsurgeon.backward` runs, before any rule at `backward`. Each call combines by itself: with
    several per update (accumulation) their sum can conflict again. Mind the scale: where a method gives an average,
    heads still get sums, and what was tuned for a sum of n losses wants a learning rate n times as
    large on the matched parameters. Where ranks average gradients (DDP), the weights follow from the averages and are the same on all ranks; in a pass that DDP does not
    average (`no_sync`) and on modules each rank decides by itself, and edits of a module's `input.grad` act on its own share before it is combined. Hooks that
    the script has put on activations run in each of the passes, those on parameters once. Sharded parameters (FSDP) are refused: use the form on modules.

    ## Cost
    One more backward pass per loss, and memory for one gradient of the matched parameters per loss; on modules neither.
    Waits for the device once per call. Needs the extra `surgery`. What a method draws follows from `torch.initial_seed()`, the rule,
    the step and the call; the generator of the script is left alone.
    """

    EXAMPLES: ClassVar = (
        Example(
            {"losses": ["seg", "depth"], "method": "pcgrad"},
            losses={"seg": [1.0, 0.0], "depth": [-1.0, 1.0]},
            expect=[0.5, 1.5],
        ),
    )

    role: ClassVar[Role] = "edit"
    stats: ClassVar = ("weight", "distance")

    action: Literal["combine"] = "combine"
    method: Annotated[
        MethodName,
        Field(
            description="How the gradients become one.",
            json_schema_extra={"enumDescriptions": [known.about for known in METHODS.values()]},
        ),
        Stricter(incomparable=_other_size),
    ]
    preference: Annotated[
        LossNumbers | None,
        Field(description="How much losses count, by name; 1 if not given, where any is."),
    ] = None
    memory: Annotated[
        LossNames | None,
        Field(description="Those of the losses that only constrain the others."),
    ] = None
    c: Annotated[
        float | None, Field(ge=0, description="Of `cagrad`: how far from the average to look.")
    ] = None
    alpha: Annotated[
        float | None,
        Field(
            ge=0, description="Of `fairgrad`: 0 the average, 1 proportional, large: the worst loss."
        ),
    ] = None
    n_byzantine: Annotated[
        int | None, Field(ge=0, description="Of `krum`: how many gradients may be anything.")
    ] = None
    n_selected: Annotated[
        int | None,
        Field(ge=1, description="Of `krum`: how many gradients are averaged, 1 if not given."),
    ] = None
    weights: Annotated[
        LossNumbers | None,
        Field(description="Of `constant`: the weight of each loss, by name."),
    ] = None

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        yield from super().flaws(given)
        yield from method_flaws(given)

    @property
    def outcome(self) -> str:
        options = [f"{key}: {getattr(self, key)}" for key in OPTIONS if key != "weights"]
        given = [one for one in options if not one.endswith(": None")]
        more = [f"{key}" for key in ("weights", "preference", "memory") if getattr(self, key)]
        return f"{self.method}{f' ({chr(44).join(given + more)})' if given + more else ''}"

    @property
    def notes(self) -> tuple[str, ...]:
        method = METHODS[self.method]
        size = "the sum by its `preference`" if self.preference is not None else method.size
        scale = f"where no two gradients conflict {self.method}{_cited(method)} gives {size}"
        if size != "the sum":
            scale += ", while what no `combine` matches gets the sum: mind the learning rate"
        return (scale, *super().notes)

    def compile(self) -> Combination:
        """Return how the gradients are weighed."""
        losses = self.losses or ()
        options = {
            option: getattr(self, option) for option in OPTIONS if getattr(self, option) is not None
        }
        if "weights" in options:
            options["weights"] = [options["weights"][name] for name in losses]
        return Combination(Weigher(self.method, options, self._preferences()))

    def _preferences(self) -> list[float] | None:
        losses, memory = self.losses or (), self.memory or ()
        if self.preference is None and not memory:
            return None
        given = self.preference or dict.fromkeys(losses, 1.0 / max(1, len(losses) - len(memory)))
        return [0.0 if name in memory else given.get(name, 1.0) for name in losses]


def _cited(method: Method) -> str:
    return "" if method.paper == "-" else f" ({method.paper})"


def _page_of_methods() -> str:
    lines = []
    for name, method in METHODS.items():
        asks = ", ".join(
            f"`{one}`" if must else f"`{one}` if given" for one, must in method.options.items()
        )
        more = [f"takes {asks}"] if asks else []
        more += ["knows `preference`"] if method.takes_preference else []
        rest = "".join(f"; {one}" for one in more)
        lines.append(
            f"`{name}`{_cited(method)}: {method.about}; without conflict {method.size}{rest}."
        )
    return "\n\n".join(lines)


# From the table, so that none is forgotten.
Combine.__doc__ = inspect.cleandoc(Combine.__doc__ or "").replace("{METHODS}", _page_of_methods())
