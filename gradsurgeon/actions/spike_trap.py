"""The action `spike-trap`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example, Moment, Point
from gradsurgeon.actions._bounds import adagc, autoclip, fixed, zclip
from gradsurgeon.actions._effects import RunningBound, Spikes, SpikeThen
from gradsurgeon.actions._fields import Flaw, Limit, TargetKind
from gradsurgeon.actions._kinds import TrapRule
from gradsurgeon.actions._options import Options

_PATIENCE = 10
# The options that belong to each bound.
_BELONG = {
    "sigmas": ("beta", "warmup"),
    "times": ("beta", "warmup"),
    "percentile": ("window",),
    "norm": (),
}


class Above(Options):
    """The bound of a spike: learnt from earlier norms, or fixed."""

    sigmas: Annotated[
        float | None,
        Field(gt=0, description="A spike is this many standard deviations above the running mean."),
    ] = None
    times: Annotated[
        float | None, Field(gt=1, description="A spike is this many times the running mean.")
    ] = None
    percentile: Annotated[
        float | None,
        Field(
            ge=1,
            lt=100,
            description="A spike is above this percentile of the last norms.",
            examples=[99],
        ),
    ] = None
    norm: Annotated[float | None, Field(gt=0, description="A spike is above this norm.")] = None
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
    window: Annotated[
        int | None,
        Field(
            ge=2,
            le=100_000,
            description="With `percentile`: how many norms count, 1000 if not given.",
        ),
    ] = None

    def flaws(self) -> Iterator[Flaw]:
        given = [form for form in _BELONG if getattr(self, form) is not None]
        if len(given) != 1:
            message = "a spike needs one bound: `sigmas`, `times`, `percentile` or `norm`"
            hint = (
                "such as `above: {sigmas: 2.5}`, `above: {percentile: 99}` or `above: {norm: 10}`"
            )
            yield Flaw("", message, hint)
            return
        for key in ("beta", "warmup", "window"):
            if getattr(self, key) is not None and key not in _BELONG[given[0]]:
                message = f"a bound by `{given[0]}` has no `{key}`"
                yield Flaw(key, message, "remove it")

    def bound(self) -> RunningBound:
        if self.norm is not None:
            return fixed(self.norm)
        if self.percentile is not None:
            return autoclip(self.percentile, self.window or 1000)
        if self.sigmas is not None:
            return zclip(self.sigmas, self._share_of_past(0.97), self.warmup or 25)
        assert self.times is not None  # noqa: S101 # one of the four is given
        return adagc(self.times, self._share_of_past(0.98), self.warmup or 100)

    def _share_of_past(self, default: float) -> float:
        return default if self.beta is None else self.beta


class SpikeTrap(TrapRule):
    """Clip, skip or report an update whose gradient or loss is far larger than those before it.

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

    `above: {percentile: 99, window: 1000}` is AutoClip (arXiv 2007.14469). A norm above this percentile of the last
    `window` norms is a spike, and is clipped to the percentile (linear interpolation, as `torch.quantile`). The norm itself is
    one of them, as in the paper. The first 99 norms are only measured, or all until a smaller window is full. Memory: `window` numbers,
    with `per: parameter` for each parameter.

    `above: {norm: 10}` is a fixed bound from the first update on. A larger norm is a spike, and is clipped to it.

    The report of a spike names the parameters that carry most of it, and the first of them in the order of backward
    whose gradient is larger than usual. If that is the first gradient of the whole pass, the spike came with the loss.
    The report names no origin if that cannot be known: another optimizer or model has the earlier gradients,
    the model is compiled as a whole, or the passes of the step reach different parameters.

    `then: clip` (default) shortens the gradient; `skip-step` lets the optimizer change nothing in this step,
    and raises after `give_up_after` spikes in a row; `warn` reports and continues; `raise` stops before any weight moves.

    ## Losses
    `tensors: loss` with `tensor: value` judges the loss of each update: the sum of its micro-batches, without the scale of a
    `GradScaler`. `loss` is the value on which the script calls `backward()`, whatever a tag is called. A second loss of one
    forward pass is `loss[1]`. With several optimizers the loss of a pass that reaches one module only has its name in front, as
    `critic.loss`. `"*loss*"` means all of them. Each has a bound of its own. The loss cannot be clipped: `then` is `warn`, `skip-step` or `raise`. Losses may be negative, so there is no `times`.
    Each rank judges its own loss, and the ranks vote: all skip or stop if one does. If an optimizer evaluates its closure several times, the
    first loss counts. A loss of several numbers is not judged.

    ## Updates
    `tensor: update` judges what the update changed in the weights, once it is over. `then: clip` (default) scales the change back
    to the bound, `warn` only reports it. `skip-step` and `raise` are refused, because the weights have moved. The rule keeps a copy
    of the matched weights during each update; the plan says how large. Under Adam the gradient does not show how far the weights move.

    ## What is learnt
    Each performed update enters the statistic once. Micro-batches, closure calls and steps that a trap or a scaler
    skipped do not enter. The norm that enters is the norm after `clip`; under `warn` and in observe mode it is the
    norm that `clip` would have left. A non-finite norm never enters: `then: clip` leaves such gradients as they are and
    reports them; for every other `then` they are spikes, also in the warm-up. A norm of 0 does not enter
    either, because it would hold a layer that starts without a gradient at 0 for ever. Steps outside `steps` teach
    nothing. On a CPU the norm of a finite gradient is finite up to 3.4e38, the largest float32; an accelerator sums
    squares in float32, so there the limit is 1.8e19.
    With `percentile` each finite norm enters, as the script hands it over, whether it is clipped, skipped or neither: otherwise the
    bound could never rise. `norm` learns nothing; its mean is for reports.
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
    file; `clip` multiplies at its place in the file. On updates it acts in the order of the file.

    ## Cost
    The norms are shared with `nan-trap`. `clip` never waits for the device; the others share the one read of
    `nan-trap`.
    """

    targets: ClassVar[tuple[TargetKind, ...]] = ("params", "tensors")
    points: ClassVar[tuple[Point, ...]] = ("step",)
    of_weights: ClassVar = ("update",)
    measures: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    judges_first: ClassVar[bool] = True
    EXAMPLES: ClassVar = (
        # A single gradient has no past to compare with.
        Example({"above": {"sigmas": 2.5}}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"above": {"times": 1.05}, "per": "parameter"}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"above": {"sigmas": 2.5}, "then": "skip-step"}, [3.0, 4.0], trips=False),
        Example({"above": {"percentile": 99}}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example({"above": {"norm": 2.5}}, [3.0, 4.0], expect=[1.5, 2.0]),
        Example({"above": {"norm": 2.5}, "then": "raise"}, [3.0, 4.0], trips=True),
        Example({"above": {"sigmas": 2.5}, "then": "raise"}, [1.0, float("inf")], trips=True),
    )

    action: Literal["spike-trap"] = "spike-trap"
    above: Annotated[
        Above,
        Field(
            description="The bound above which a norm is a spike, such as `{sigmas: 2.5}` or `{norm: 10}`."
        ),
    ]
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
        if self.judges_losses:
            yield from self._flaws_of_losses()
        elif self.tensor == "update" and self.then not in ("clip", "warn"):
            message = f"`then: {self.then}` comes too late: the update has moved the weights"
            hint = "write `then: clip` or `then: warn`, or judge gradients: leave `tensor` out"
            yield Flaw("then", message, hint)

    def _flaws_of_losses(self) -> Iterator[Flaw]:
        if not any("loss" in pattern or "*" in pattern for pattern in self.patterns):
            message = (
                "a spike-trap on `tensors` judges the losses of updates, and none has this name"
            )
            yield Flaw("tensors", message, 'write `tensors: loss`, or `"*loss*"` for all losses')
        if self.tensor != "value":
            yield Flaw("tensor", "of a loss the value is judged", "write `tensor: value`")
        if self.then == "clip":
            hint = "write `then: warn`, `then: skip-step` or `then: raise`"
            yield Flaw("then", "a loss cannot be clipped once its gradients are there", hint)
        if self.above.times is not None:
            message = "a loss may be negative, and then no multiple of it is a bound"
            yield Flaw(("above", "times"), message, "use `sigmas`, `percentile` or `norm`")
        if "per" in self.model_fields_set:
            yield Flaw("per", "each loss has a bound of its own", "remove it")

    @property
    def judges_losses(self) -> bool:
        return self.target == "tensors" and self.tensors is not None

    @property
    def point(self) -> Moment:
        if self.judges_losses:
            return "step"
        return super().point

    @property
    def joins_norms(self) -> bool:
        return self.per == "rule" and not self.judges_losses

    @property
    def edits(self) -> bool:
        return self.then == "clip"

    def compile(self) -> Spikes:
        patience: Limit = "never"
        if self.then == "skip-step":
            patience = self.give_up_after or _PATIENCE
        return Spikes(self.above.bound(), self.joins_norms, self.then, patience)
