"""The action `combine`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example, Role
from gradsurgeon.actions._effects import Combination
from gradsurgeon.actions._fields import Flaw, is_number, is_whole
from gradsurgeon.actions._kinds import LossNames, LossRule
from gradsurgeon.actions._methods import METHODS, Weigher
from gradsurgeon.errors import did_you_mean

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
_OPTIONS = ("c", "alpha", "n_byzantine", "n_selected", "weights")


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

    Where a gradient is not finite, or the solver of a method fails, the plain sum is what arrives, and an event says why.
    Recorded in each call: `weight` of each loss, and `distance`, the norm of the difference from the plain
    sum over the norm of that sum; under `mode="observe"` it would have been that.

    ## Methods
    {METHODS}

    `preference` makes losses count more than others where the method knows that. Losses under `memory` only
    constrain: what comes out must not conflict with them (A-GEM, arXiv 1812.00420).

    ## Why use it
    Losses that share a trunk fight over it: their gradients point in opposite directions, and the larger one wins. Look with
    `conflict` first whether they do.

    ## Points
    None: it acts while `gradsurgeon.backward` runs, before any rule at `backward`. Each call combines by itself: with
    several per update (accumulation) their sum can conflict again. Mind the scale: most methods
    average, while heads get sums; what was tuned for a sum of n losses wants a learning rate n times as
    large on the matched parameters. Where ranks average gradients (DDP), the weights follow from the averages and are the same on all ranks; on
    modules each rank decides by itself. Sharded parameters (FSDP) are refused: use the form on modules.

    ## Cost
    One more backward pass per loss, and memory for one gradient of the matched parameters per loss; on modules neither.
    Waits for the device once per call. Needs the extra `surgery`.
    """

    EXAMPLES: ClassVar = (
        Example(
            {"losses": ["seg", "depth"], "method": "pcgrad"},
            losses={"seg": [1.0, 0.0], "depth": [-1.0, 1.0]},
            expect=[0.5, 1.5],
        ),
        Example(
            {"losses": ["seg", "depth"], "method": "mean"},
            losses={"seg": [3.0, 4.0], "depth": [1.0, 0.0]},
            expect=[2.0, 2.0],
        ),
    )

    role: ClassVar[Role] = "edit"
    stats: ClassVar = ("weight", "distance")

    action: Literal["combine"] = "combine"
    method: Annotated[MethodName, Field(description="How the gradients become one.")]
    preference: Annotated[
        dict[str, float] | None,
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
        dict[str, float] | None,
        Field(description="Of `constant`: the weight of each loss, by name."),
    ] = None

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        yield from super().flaws(given)
        method = METHODS.get(str(given.get("method")))
        if method is None:
            return
        name = given["method"]
        for option in _OPTIONS:
            value = given.get(option)
            if value is None and method.options.get(option):
                message = f"missing key `{option}`: `method: {name}` needs it"
                yield Flaw(
                    option,
                    message,
                    "see `gradsurgeon explain combine`",
                    missing=True,
                    check="missing-key",
                )
            elif value is not None and option not in method.options:
                of = next(one for one, known in METHODS.items() if option in known.options)
                message = f"`{option}` belongs to `method: {of}`, not to `{name}`"
                yield Flaw(option, message, "remove it", key=True, check="unknown-key")
        yield from _flaws_of_names(given)
        for option in ("preference", "memory"):
            knowing = [
                one
                for one, known in METHODS.items()
                if known.takes_preference and (option == "preference" or known.solvers)
            ]
            if given.get(option) is not None and name not in knowing:
                message = f"`method: {name}` knows no `{option}`"
                yield Flaw(option, message, f"use {' or '.join(knowing)}", key=True)
        yield from _flaws_of_krum(given)

    @property
    def notes(self) -> tuple[str, ...]:
        method = METHODS[self.method]
        size = {
            "the average": "gives the average where nothing conflicts, while parameters without a `combine` get the sum: "
            "mind the learning rate",
            "the sum": "gives the sum where nothing conflicts, as parameters without a `combine` get it",
        }.get(method.size, "gives neither the sum nor the average: mind the learning rate")
        notes = [f"{self.method} ({method.paper}) {size}"]
        if self.target == "modules":
            notes.append("each rank decides by itself")
        else:
            notes.append(
                "takes one backward pass per loss, and keeps one gradient of these parameters per loss meanwhile"
            )
        return tuple(notes)

    def compile(self) -> Combination:
        """Return how the gradients are weighed."""
        losses = self.losses or ()
        options = {
            option: getattr(self, option)
            for option in _OPTIONS
            if getattr(self, option) is not None
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
            f"`{name}` ({method.paper}): {method.about}; without conflict {method.size}{rest}."
        )
    return "\n\n".join(lines).replace("(-)", "")


# From the table, so that none is forgotten.
Combine.__doc__ = (Combine.__doc__ or "").replace("{METHODS}", _page_of_methods())


def _flaws_of_names(given: Mapping[str, Any]) -> Iterator[Flaw]:
    """Yield what is wrong with names of losses that are not among `losses`, or lack a weight."""
    losses = given.get("losses")
    for option in ("preference", "memory", "weights"):
        names = given.get(option)
        if names is None:
            continue
        if given.get("modules") is not None:
            message = f"`{option}` names losses, and a rule on modules has none"
            yield Flaw(option, message, "remove it, or name `params` and `losses`", key=True)
            continue
        if not isinstance(names, Mapping | list | tuple) or not isinstance(losses, list | tuple):
            continue
        for index, name in enumerate(names):
            if name not in losses:
                at = (option, index if isinstance(names, list | tuple) else str(name))
                hint = did_you_mean(str(name)[:60], [one for one in losses if isinstance(one, str)])
                yield Flaw(
                    at, f"`{str(name)[:60]}` is none of the `losses`", hint or "add it there"
                )
        if option == "weights" and (lacking := [one for one in losses if one not in names]):
            message = f"the loss `{str(lacking[0])[:60]}` has no weight"
            yield Flaw(option, message, "give each of the `losses` one")
        if option == "memory" and not set(map(str, losses)) - set(map(str, names)):
            message = "every loss is under `memory`: nothing is left to be constrained"
            yield Flaw(option, message, "leave out the losses that are trained")
        if option != "memory" and isinstance(names, Mapping):
            for name, value in names.items():
                if is_number(value) and value < 0 and option == "preference":
                    yield Flaw((option, str(name)), f"a preference cannot be {value}", "0 or more")


def _flaws_of_krum(given: Mapping[str, Any]) -> Iterator[Flaw]:
    losses, byzantine = given.get("losses"), given.get("n_byzantine")
    if given.get("method") != "krum" or not isinstance(losses, list | tuple):
        return
    if is_whole(byzantine) and len(losses) < byzantine + 3:
        message = f"`n_byzantine: {byzantine}` needs at least {byzantine + 3} losses, there are {len(losses)}"
        yield Flaw("n_byzantine", message, "name more losses, or lower it")
    if is_whole(selected := given.get("n_selected")) and selected > len(losses):
        message = f"`n_selected: {selected}` is more than there are losses"
        yield Flaw("n_selected", message, "lower it")
