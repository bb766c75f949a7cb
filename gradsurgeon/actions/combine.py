"""The action `combine`."""

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from gradsurgeon.actions._base import Example, Role
from gradsurgeon.actions._effects import Combination
from gradsurgeon.actions._fields import Flaw, flawed
from gradsurgeon.actions._kinds import LossNames, LossRule
from gradsurgeon.actions._methods import GONE, METHODS, OPTIONS, Weigher
from gradsurgeon.errors import did_you_mean

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]

# The options that name losses, which rules on modules cannot do.
_NAMING = ("preference", "memory")


def _refuse_gone(method: object) -> object:
    if isinstance(method, str) and method in GONE:
        raise flawed(Flaw("", f"`method: {method}` is gone", GONE[method]))
    return method


class Combine(LossRule):
    """Make one gradient out of the gradients of several losses, with less conflict than in their sum.

    ## What it does
    The matched parameters get a weighted sum of the gradients of the losses. `method` chooses how the weights follow
    from the inner products of these gradients over all matches of the rule. Parameters that no `combine` matches, such as
    heads, get the plain sum.

    On parameters, `losses` names losses that the script passes to `gradsurgeon.backward({"seg": ..., "depth": ...})`
    instead of calling `(seg + depth).backward()`. A loss that is passed there and not named here is added unchanged.
    On modules with the same input tensor (`tensor: input.grad`), such as the heads of a network, it combines the
    gradients that they send back to that tensor, in an ordinary `loss.backward()`.

    A zero gradient, as from a loss that does not reach the parameters, is left out, also of an average.
    If a gradient is non-finite, or the solver of a method fails, the parameters get the plain sum, and an event gives the
    reason. Each call records the `weight` of each loss, and `distance`, the norm of the difference from the plain
    sum over the norm of that sum; under `mode="observe"` both describe the combination that was not applied.

    ## Methods
    {METHODS}

    `preference` makes losses count more than others, if the method supports it: without conflict the result is the sum
    of the gradients times the preferences. Losses under `memory` only
    constrain: the result must not conflict with them (A-GEM, arXiv 1812.00420).

    ## Why use it
    Losses that share a trunk compete for it: their gradients point in opposite directions, and the larger one wins. Use
    `conflict` first to see whether they do.

    ## Points
    None: it acts while `gradsurgeon.backward` runs, before any rule at `backward`. Each call combines by itself: with
    several calls per update (accumulation) their sum can conflict again. Mind the scale: if a method gives an average,
    heads still get sums, and a learning rate that was tuned for a sum of n losses must be n times as
    large on the matched parameters. If ranks average gradients (DDP), the weights follow from the averages and are the
    same on all ranks. In a pass that DDP does not average (`no_sync`) and on modules each rank decides by itself. Edits
    of a module's `input.grad` act on its own share before it is combined. Hooks of the script on activations run in each
    of the passes, hooks on parameters once. Sharded parameters (FSDP) are refused: use the form on modules.

    ## Cost
    One more backward pass per loss, and memory for one gradient of the matched parameters per loss; on modules neither.
    Waits for the device once per call. Needs the extra `surgery`. Random draws of a method follow from
    `torch.initial_seed()`, the rule, the step and the call; the generator of the script is untouched.
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
        BeforeValidator(_refuse_gone),
        Field(
            description="How the gradients become one.",
            json_schema_extra={"enumDescriptions": [known.about for known in METHODS.values()]},
        ),
    ]
    preference: Annotated[
        Annotated[dict[str, Annotated[float, Field(ge=0)]], Field(min_length=1)] | None,
        Field(
            description="How much losses count, by name; a loss without a number has 1.",
            examples=[{"seg": 1, "depth": 0.5}],
        ),
    ] = None
    memory: Annotated[
        LossNames | None,
        Field(description="The losses that only constrain the others.", examples=[["seg"]]),
    ] = None
    c: Annotated[
        float | None,
        Field(ge=0, description="Of `cagrad`: how far from the average the result may be."),
    ] = None
    alpha: Annotated[
        float | None,
        Field(
            ge=0, description="Of `fairgrad`: 0 the average, 1 proportional, large: the worst loss."
        ),
    ] = None

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        yield from self._flaws_of_options()
        if self.losses is None:
            for option in _NAMING:
                if getattr(self, option) is not None:
                    message = f"`{option}` names losses, and this rule has none"
                    yield Flaw(option, message, "remove it, or name `params` and `losses`")
        else:
            yield from self._flaws_of_naming(self.losses)

    def _flaws_of_options(self) -> Iterator[Flaw]:
        """Yield the options that the method needs and lacks, and those that it does not have."""
        method = METHODS[self.method]
        for option in (*OPTIONS, "preference", "memory"):
            is_given = getattr(self, option) is not None
            if is_given and option not in method.keys:
                message = f"`method: {self.method}` has no option `{option}`"
                owners = [name for name, other in METHODS.items() if option in other.keys]
                yield Flaw(option, message, f"remove it; it belongs to {', '.join(owners)}")
            elif not is_given and option in method.options:
                message = f"missing key `{option}`: `method: {self.method}` needs it"
                yield Flaw(option, message, f"such as `{OPTIONS[option]}`", "missing-key")

    def _flaws_of_naming(self, losses: Sequence[str]) -> Iterator[Flaw]:
        preference = self.preference or {}
        memory = self.memory or ()
        for option, names in (("preference", preference), ("memory", memory)):
            for name in names:
                if name not in losses:
                    message = f"`{name[:60]}` under `{option}` is none of the `losses`"
                    yield Flaw(option, message, did_you_mean(name[:60], losses) or "add it there")
        for name in memory:
            if name in preference:
                message = (
                    f"`{name[:60]}` has a preference, but losses under `memory` only constrain"
                )
                yield Flaw("memory", message, "remove it from one of the two")
        trained = [name for name in losses if name not in memory and preference.get(name) != 0]
        if not trained:
            option = "preference"
            if memory:
                option = "memory"
            message = "no loss is trained: each has the preference 0 or is under `memory`"
            yield Flaw(option, message, "leave one loss or more to train")

    @property
    def notes(self) -> tuple[str, ...]:
        method = METHODS[self.method]
        size = method.size
        if self.preference is not None:
            size = "the sum by its `preference`"
        note = f"without conflict {self.method} ({method.paper}) gives {size}"
        if size != "the sum":
            note += ", but parameters that no `combine` matches get the sum: mind the learning rate"
        return (note, *super().notes)

    def compile(self) -> Combination:
        """Return how the gradients are weighed."""
        options = {option: getattr(self, option) for option in METHODS[self.method].options}
        return Combination(Weigher(self.method, options, self._preferences()))

    def _preferences(self) -> list[float] | None:
        """Return the preference of each loss, 0 under `memory`; ``None`` if the rule prefers no loss."""
        losses = self.losses or ()
        memory = self.memory or ()
        if self.preference is None and not memory:
            return None
        number_trained = max(1, len(losses) - len(memory))
        preference = self.preference or dict.fromkeys(losses, 1.0 / number_trained)
        preferences = []
        for name in losses:
            is_remembered = name in memory
            preferences.append(0.0 if is_remembered else preference.get(name, 1.0))
        return preferences


def _page_of_methods() -> str:
    paragraphs = []
    for name, method in METHODS.items():
        text = f"`{name}` ({method.paper}): {method.about}; without conflict {method.size}"
        for option in method.options:
            text += f"; takes `{option}`"
        if method.takes_preference:
            text += "; knows `preference`"
        paragraphs.append(f"{text}.")
    return "\n\n".join(paragraphs)


# The table writes this section, so it has every method.
Combine.__doc__ = inspect.cleandoc(Combine.__doc__ or "").replace("{METHODS}", _page_of_methods())
