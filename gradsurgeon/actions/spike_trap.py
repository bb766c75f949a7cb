"""The action `spike-trap`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example, Point
from gradsurgeon.actions._effects import RunningBound, Spikes, SpikeThen
from gradsurgeon.actions._fields import Flaw, Limit
from gradsurgeon.actions._kinds import TrapRule
from gradsurgeon.actions._options import Options

if TYPE_CHECKING:
    from torch import Tensor

# ZClip adds this to a standard deviation, which may be 0.
_EPSILON = 1e-6
# A statistic of fewer updates does not know yet how far healthy norms scatter.
_YOUNG = 100
_PATIENCE = 10


class Above(Options):
    """The bound of a spike: standard deviations above the mean, or a multiple of it."""

    sigmas: Annotated[
        float | None,
        Field(gt=0, description="A spike is this many standard deviations above the running mean."),
    ] = None
    times: Annotated[
        float | None, Field(gt=1, description="A spike is this many times the running mean.")
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
            description="Updates that are only measured and are never spikes: 25 with `sigmas`, 100 with `times` if not given.",
        ),
    ] = None

    def flaws(self) -> Iterator[Flaw]:
        if (self.sigmas is None) == (self.times is None):
            message = "a spike needs a bound, either `sigmas` or `times`"
            hint = "such as `above: {sigmas: 2.5}` or `above: {times: 1.05}`"
            yield Flaw("", message, hint)

    def bound(self) -> RunningBound:
        beta = self.beta
        if self.sigmas is not None:
            if beta is None:
                beta = 0.97
            warmup = self.warmup or 25
            advance = partial(_zclip, self.sigmas, beta, warmup)
            bound = partial(_zclip_bound, self.sigmas, warmup)
            return RunningBound("sigmas", 3, advance, bound)
        assert self.times is not None  # noqa: S101 # one of the two is given
        if beta is None:
            beta = 0.98
        warmup = self.warmup or 100
        advance = partial(_adagc, self.times, beta, warmup)
        bound = partial(_adagc_bound, self.times, warmup)
        # It starts as the smallest norm and learns clipped norms, so it stays below the mean for long.
        return RunningBound("times", 2, advance, bound, keeps_mean=False)


class SpikeTrap(TrapRule):
    """Clip, skip or report an update whose gradient is far larger than the gradients before it.

    ## What it does
    Compares the norm of the final gradient with a running statistic of earlier norms. With
    `per: rule` one norm covers all gradients that the rule matches, per owning optimizer;
    with `per: parameter` each gradient is compared with its own past. Gradients that a `freeze` hides do not count.

    `above: {sigmas: 2.5, beta: 0.97, warmup: 25}` is ZClip (arXiv 2504.02507). A norm more than `sigmas` standard
    deviations above the running mean is a spike, and is clipped to `mean + sigmas**2 * std / z`, where
    `z = (norm - mean) / (std + 1e-6)`. The warm-up gives the first mean and variance.

    `above: {times: 1.05, beta: 0.98, warmup: 100}` is AdaGC (arXiv 2502.11034). A norm above `times` the
    running mean is a spike, and is clipped to that bound. The mean starts as the smallest norm of the warm-up. For the
    absolute bound that the paper has in its warm-up, write a `clip-norm` rule with `steps: {to: 100}` below this rule;
    here the smallest norm is the norm before such a clip.

    The report of a spike names the parameters that carry most of it, and the first of them in the order of backward
    whose gradient is larger than usual. If that is the first gradient of the whole pass, the spike came with the loss.
    The report names no origin if that cannot be known: another optimizer or model has the earlier gradients,
    the model is compiled as a whole, or the passes of the step reach different parameters.

    `then: clip` (default) shortens the gradient; `skip-step` lets the optimizer change nothing in this step,
    and raises after `give_up_after` spikes in a row; `warn` reports and continues; `raise` stops before any weight moves.

    ## What is learnt
    Each performed update enters the statistic once. Micro-batches, closure calls and steps that a trap or a scaler
    skipped do not enter. The norm that enters is the norm after `clip`; under `warn` and in observe mode it is the
    norm that `clip` would have left. A non-finite norm never enters: `then: clip` leaves such gradients as they are and
    reports them; for every other `then` they are spikes, also in the warm-up. A norm of 0 does not enter
    either, because it would hold a layer that starts without a gradient at 0 for ever. Steps outside `steps` teach
    nothing. On a CPU the norm of a finite gradient is finite up to 3.4e38, the largest float32; an accelerator sums
    squares in float32, so there the limit is 1.8e19.
    If an optimizer gets more parameters, the norm over all of them restarts, because it is another quantity.

    ## What a young statistic cannot know
    The warm-up of 25 updates is the paper's. While training begins, norms fall and scatter, and so few updates do not
    show how far. `sigmas: 2.5` bit before update 100 in 17 of 99 healthy trainings, in 1.3 % of the updates that it
    judged there; with `warmup: 100` in none. So an event says from how many updates the statistic is known, below 100.
    A clip does little harm then. Before `skip-step` or `raise`, write `above: {sigmas: 2.5, warmup: 100}`.

    ## Where it cannot follow
    The statistic learns only from clipped norms. After equal norms `sigmas` has a deviation of 0
    and clips every larger norm for ever. `times` grows by `(1 - beta) * (times - 1)` per update, a thousandth, and
    needs 20,000 updates to recover from one norm of 1e-9 in its warm-up. The papers have the same limits. The share
    of changed firings in `session.status()` shows a bound that clips every update: restart it in a new session, with
    larger `sigmas` or `times`. Usual norms far below the 1e-6 above hide every spike from `sigmas`: use `times`.

    ## Why use it
    Norms drift by a factor of ten over a run. A fixed `clip-norm` then acts in nearly every step at one end of the run
    and lets spikes through at the other, yet one bad batch must never ruin the weights.

    ## Points
    The trap judges the gradient from the script, before any rule at `step`, wherever the trap is in the
    file; `clip` multiplies at its place in the file.

    ## Cost
    The norms are shared with `nan-trap`. `clip` never waits for the device; the others share the one read of
    `nan-trap`.
    """

    targets: ClassVar = ("params",)
    points: ClassVar[tuple[Point, ...]] = ("step",)
    measures: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    judges_first: ClassVar[bool] = True
    EXAMPLES: ClassVar = (
        # A single gradient has no past to compare with.
        Example({"above": {"sigmas": 2.5}}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"above": {"times": 1.05}, "per": "parameter"}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"above": {"sigmas": 2.5}, "then": "skip-step"}, [3.0, 4.0], trips=False),
        Example({"above": {"sigmas": 2.5}, "then": "raise"}, [1.0, float("inf")], trips=True),
    )

    action: Literal["spike-trap"] = "spike-trap"
    above: Annotated[Above, Field(description="The bound above which a norm is a spike.")]
    per: Annotated[
        Literal["rule", "parameter"],
        Field(description="One norm over all matches of the rule, or each gradient by itself."),
    ] = "rule"
    then: Annotated[SpikeThen, Field(description="What happens to the step.")] = "clip"  # type: ignore[assignment] # other traps have no `clip`
    give_up_after: Annotated[
        Limit | None,
        Field(
            description="With `then: skip-step`: raise after this many spikes in a row, 10 if not given."
        ),
    ] = None  # type: ignore[assignment] # only for `skip-step`

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        if self.give_up_after is not None and self.then != "skip-step":
            message = "`give_up_after` counts skipped steps, and this rule skips none"
            yield Flaw("give_up_after", message, "remove it, or write `then: skip-step`")

    @property
    def joins_norms(self) -> bool:
        return self.per == "rule"

    @property
    def edits(self) -> bool:
        return self.then == "clip"

    def compile(self) -> Spikes:
        patience: Limit = "never"
        if self.then == "skip-step":
            patience = self.give_up_after or _PATIENCE
        return Spikes(self.above.bound(), self.per == "rule", self.then, patience)


def _zclip(
    sigmas: float, beta: float, warmup: int, kept: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance ZClip, which keeps the number of updates, the mean and the variance."""
    number, mean, variance = kept.unbind()
    is_warm = number >= warmup
    std = variance.clamp(min=0).sqrt()
    z = (norms - mean) / (std + _EPSILON)
    is_spike = is_warm & (z > sigmas) & norms.isfinite()
    clipped = mean + sigmas**2 * std / z
    passed = norms.where(~is_spike, clipped)
    # In the warm-up, Welford's algorithm for the mean and the variance so far.
    after = number + 1
    distance = passed - mean
    mean_so_far = mean + distance / after
    variance_so_far = variance + (distance * (passed - mean_so_far) - variance) / after
    share = 1 - beta
    running_mean = beta * mean + share * passed
    running_variance = beta * variance + share * (passed - running_mean) ** 2
    new_mean = running_mean.where(is_warm, mean_so_far)
    new_variance = running_variance.where(is_warm, variance_so_far)
    return passed, _advanced(kept, passed, after, new_mean, new_variance)


def _adagc(
    times: float, beta: float, warmup: int, kept: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance AdaGC, which keeps the number of updates and the mean, or in the warm-up the least norm."""
    number, mean = kept.unbind()
    is_warm = number >= warmup
    bound = times * mean
    is_spike = is_warm & (norms > bound) & norms.isfinite()
    passed = norms.where(~is_spike, bound)
    least = passed.where(number == 0, mean.minimum(passed))
    running_mean = beta * mean + (1 - beta) * passed
    new_mean = running_mean.where(is_warm, least)
    return passed, _advanced(kept, passed, number + 1, new_mean)


def _advanced(kept: Tensor, passed: Tensor, *rows: Tensor) -> Tensor:
    """Return new rows, and the kept ones if the norm is 0 or non-finite, which teaches nothing."""
    new = kept.new_empty(kept.shape)
    for place, row in enumerate(rows):
        new[place] = row
    return new.where(passed.isfinite() & (passed > 0), kept)


def _zclip_bound(sigmas: float, warmup: int, kept: Sequence[float]) -> tuple[float, str] | None:
    number, mean, variance = kept
    if number < warmup:
        return None
    std = max(variance, 0.0) ** 0.5
    bound = mean + sigmas * (std + _EPSILON)
    text = (
        f"running mean {mean:.3g}, standard deviation {std:.3g}{_age(number)}; "
        f"bound: {sigmas:g} standard deviations above the mean"
    )
    return bound, text


def _adagc_bound(times: float, warmup: int, kept: Sequence[float]) -> tuple[float, str] | None:
    number, mean = kept
    if number < warmup:
        return None
    return times * mean, f"{times:g} times the running mean {mean:.3g}{_age(number)}"


def _age(number: float) -> str:
    if number >= _YOUNG:
        return ""
    return f", known from {number:.0f} updates so far"
