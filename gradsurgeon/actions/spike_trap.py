"""The action `spike-trap`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example, Point
from gradsurgeon.actions._effects import RunningBound, Spikes, SpikeThen
from gradsurgeon.actions._fields import Flaw, Stricter
from gradsurgeon.actions._kinds import TrapRule
from gradsurgeon.actions._options import Options

if TYPE_CHECKING:
    from torch import Tensor

# What ZClip adds to a standard deviation that may be 0.
_EPSILON = 1e-6
_PATIENCE = 10

_Then = Annotated[
    SpikeThen,
    Field(description="What happens to the step."),
    Stricter(("warn", "clip", "skip-step", "raise").index),
]
_GiveUpAfter = Annotated[
    int | None,
    Field(
        ge=1,
        description="With `then: skip-step`: raise after this many spikes in a row, 10 if not given.",
    ),
    Stricter(operator.neg, "stops sooner", "stops later", default=_PATIENCE),
]


class Above(Options):
    """What a norm has to be above to be a spike: so many standard deviations, or so many times the usual."""

    sigmas: Annotated[
        float | None,
        Field(gt=0, description="A spike is this many standard deviations above the running mean."),
        Stricter(operator.neg, one_of_several=True),
    ] = None
    times: Annotated[
        float | None,
        Field(gt=1, description="A spike is this many times the running mean."),
        Stricter(operator.neg, one_of_several=True),
    ] = None
    beta: Annotated[
        float | None,
        Field(
            ge=0,
            lt=1,
            description="Share of the past in the running numbers: 0.97 with `sigmas`, 0.98 with `times` if not given.",
        ),
    ] = None
    warmup: Annotated[
        int | None,
        Field(
            ge=2,
            description="Updates that are only measured, and never spikes: 25 with `sigmas`, 100 with `times` if not given.",
        ),
    ] = None

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        named = [key for key in ("sigmas", "times") if given.get(key) is not None]
        if len(named) == 1:
            return
        message = "a spike is above so many `sigmas` or so many `times` the usual norm"
        if named:
            yield Flaw("times", f"{message}, not both", "remove one of them", key=True)
        else:
            hint = "such as `above: {sigmas: 2.5}` or `above: {times: 1.05}`"
            yield Flaw(
                "sigmas", f"{message}: neither is given", hint, missing=True, check="missing-key"
            )

    def bound(self) -> RunningBound:
        beta, warmup = self.beta, self.warmup
        if self.sigmas is not None:
            options = (self.sigmas, 0.97 if beta is None else beta, warmup or 25)
            advance, bounds = partial(_zclip, *options), partial(_zclip_bound, *options)
            return RunningBound("sigmas", 3, advance, bounds, slack=self.sigmas * _EPSILON)
        times = self.times
        assert times is not None  # noqa: S101 # one of the two is given
        options = (times, 0.98 if beta is None else beta, warmup or 100)
        # What begins as the smallest norm of the warm-up, and learns what is cut, is below what is usual for long.
        adagc = partial(_adagc, *options), partial(_adagc_bound, *options)
        return RunningBound("times", 2, *adagc, keeps_mean=False)


class SpikeTrap(TrapRule):
    """Cut, skip or report an update whose gradient is far larger than those before it.

    ## What it does
    Compares the norm of the final gradient with a running statistic of the norms before it. With
    `per: rule` there is one norm over all gradients that the rule matches, per optimizer that owns them;
    with `per: parameter` each gradient is compared with itself alone. What a `freeze` hides has no part in it.

    `above: {sigmas: 2.5, beta: 0.97, warmup: 25}` is ZClip (arXiv 2504.02507): a norm that lies more than so
    many standard deviations above the running mean is a spike, and is cut to `mean + sigmas**2 * std / z`, where
    `z = (norm - mean) / (std + 1e-6)`. Mean and variance start as those of the warm-up.

    `above: {times: 1.05, beta: 0.98, warmup: 100}` is AdaGC (arXiv 2502.11034): a norm above so many times the
    running mean is a spike, and is cut to that. The mean starts as the smallest norm of the warm-up. The
    absolute bound that the paper has in its warm-up is a `clip-norm` rule with `steps: {to: 100}` below this one; the
    smallest norm is here that before such a cut.

    The report of a spike names the parameters that carry it, and at which of them, in the order of backward,
    gradients begin to be larger than they usually are; where already the first ones of the whole pass are, it came
    with the loss. It names no origin where that cannot be known: another optimizer or model has the gradients that
    came before, the model is compiled as a whole, or the passes of the step reach different parameters.

    `then: clip` (default) shortens the gradient; `skip-step` lets the optimizer touch nothing in this step,
    and raises after `give_up_after` spikes in a row; `warn` reports and goes on; `raise` stops before any weight moves.

    ## What is learnt
    Only updates that took place enter the statistic, each once: no micro-batch, no call of a closure, no step
    that a trap or a scaler has skipped. What enters is what the rule let through; under `warn` and while
    observing, what `clip` would have let through. A norm that is not finite never enters: `then: clip` leaves such
    gradients alone and says so, for every other `then` it is a spike, in the warm-up too. A norm of 0 does not enter
    either, or a layer that begins without a gradient would be held at 0 for ever. In steps outside of `steps` nothing
    is learnt. A finite gradient has a finite norm up to 3.4e38, the largest float32, on a CPU; on an accelerator, where
    squares are summed in float32, up to 1.8e19.
    Where an optimizer gets further parameters, one norm over all of them is another quantity: it begins anew.

    ## Where it cannot follow
    What a bound lets through is all that it learns from. After norms that were all alike `sigmas` has a deviation of 0
    and cuts for ever whatever is above them; `times` grows by `(1 - beta) * (times - 1)` in an update, a thousandth, and
    takes 20,000 updates to come back from one norm of 1e-9 in its warm-up. So it is in the papers. A warning says so, once
    per statistic, where 100 updates in a row were above the bound and even the least of them is more than 1,000
    further updates away. Another one says where usual norms are so small that the 1e-6 above hides every spike.

    ## Why use it
    Norms drift by a factor of ten over a run. A fixed `clip-norm` then bites in nearly every step at one end of it
    and lets spikes through at the other, while one bad batch must never throw the weights away.

    ## Points
    It judges the gradient as the script hands it over, before any rule at `step`, wherever it stands in the
    file; `clip` multiplies at its place in the file.

    ## Cost
    The norms are shared with `nan-trap`. `clip` never waits for the device; the others share the one read of
    `nan-trap`.
    """

    targets: ClassVar = ("params",)
    points: ClassVar[tuple[Point, ...]] = ("step",)
    no_at_reason: ClassVar[str] = (
        "it judges the gradient that the script hands over, and acts right before the update"
    )
    measures: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    judges_first: ClassVar[bool] = True
    EXAMPLES: ClassVar = (
        # Of one gradient nothing can be said.
        Example({"above": {"sigmas": 2.5}}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"above": {"times": 1.05}, "per": "parameter"}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"above": {"sigmas": 2.5}, "then": "skip-step"}, [3.0, 4.0], trips=False),
        Example({"above": {"sigmas": 2.5}, "then": "raise"}, [1.0, float("inf")], trips=True),
    )

    action: Literal["spike-trap"] = "spike-trap"
    above: Annotated[Above, Field(description="What makes a norm a spike.")]
    per: Annotated[
        Literal["rule", "parameter"],
        Field(description="One norm over all that the rule matches, or each gradient by itself."),
    ] = "rule"
    then: _Then = "clip"  # type: ignore[assignment] # one more than other traps have
    give_up_after: _GiveUpAfter = None  # type: ignore[assignment] # means nothing where no step is skipped

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        yield from super().flaws(given)
        if given.get("give_up_after") is not None and given.get("then") != "skip-step":
            message = "`give_up_after` counts skipped steps, and this rule skips none"
            yield Flaw("give_up_after", message, "remove it, or write `then: skip-step`", key=True)

    @property
    def edits(self) -> bool:
        return self.then == "clip"

    @property
    def notes(self) -> tuple[str, ...]:
        judged = "it judges the gradient as the script hands it over, before every edit at `step`"
        if self.per != "rule":
            return (judged,)
        norm = "one norm per optimizer; what a `freeze` hides in this step has no part in it"
        return (judged, norm)

    def compile(self) -> Spikes:
        patience = (self.give_up_after or _PATIENCE) if self.then == "skip-step" else sys.maxsize
        return Spikes(self.above.bound(), self.per == "rule", self.then, patience)


def _zclip(
    sigmas: float, beta: float, warmup: int, kept: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance ZClip: kept are the number of updates, the mean and the variance."""
    number, mean, variance = kept.unbind()
    warm = number >= warmup
    std = variance.clamp(min=0).sqrt()
    z = (norms - mean) / (std + _EPSILON)
    spike = warm & (z > sigmas) & norms.isfinite()
    passed = norms.where(~spike, mean + sigmas**2 * std / z)
    # Welford's way to the mean and the variance of what has come so far.
    after = number + 1
    mean_then = mean + (passed - mean) / after
    variance_then = variance + ((passed - mean) * (passed - mean_then) - variance) / after
    mean_now = beta * mean + (1 - beta) * passed
    variance_now = beta * variance + (1 - beta) * (passed - mean_now) ** 2
    mean, variance = mean_now.where(warm, mean_then), variance_now.where(warm, variance_then)
    return passed, _entered(kept, passed, after, mean, variance)


def _adagc(
    times: float, beta: float, warmup: int, kept: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance AdaGC: kept are the number of updates and the mean or, in the warm-up, the least norm."""
    number, mean = kept.unbind()
    warm = number >= warmup
    spike = warm & (norms > times * mean) & norms.isfinite()
    passed = norms.where(~spike, times * mean)
    least = passed.where(number == 0, mean.minimum(passed))
    mean = (beta * mean + (1 - beta) * passed).where(warm, least)
    return passed, _entered(kept, passed, number + 1, mean)


def _entered(kept: Tensor, passed: Tensor, *rows: Tensor) -> Tensor:
    new = kept.new_empty(kept.shape)
    for place, row in enumerate(rows):
        new[place] = row
    return new.where(passed.isfinite() & (passed > 0), kept)


def _zclip_bound(
    sigmas: float, _beta: float, warmup: int, kept: Sequence[float]
) -> tuple[float, str] | None:
    number, mean, variance = kept
    if number < warmup:
        return None
    std = max(variance, 0.0) ** 0.5
    words = f"running mean {mean:.3g}, standard deviation {std:.3g}"
    return mean + sigmas * (std + _EPSILON), f"{words}; bound: {sigmas:g} of these above it"


def _adagc_bound(
    times: float, _beta: float, warmup: int, kept: Sequence[float]
) -> tuple[float, str] | None:
    number, mean = kept
    return (
        None if number < warmup else (times * mean, f"{times:g} times the running mean {mean:.3g}")
    )
