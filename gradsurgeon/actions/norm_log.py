"""The action `norm-log`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from gradsurgeon.actions._base import Example
from gradsurgeon.actions._effects import Observer
from gradsurgeon.actions._fields import FROM_LIST, Flaw, described, each_once, flawed
from gradsurgeon.actions._kinds import ObserverRule
from gradsurgeon.errors import did_you_mean
from gradsurgeon.tensors.statistics import STATISTICS


def _stat(name: str) -> str:
    if name in STATISTICS:
        return name
    hint = did_you_mean(name[:60], STATISTICS) or f"known: {', '.join(STATISTICS)}"
    raise flawed(Flaw("", f"expected the name of a statistic, found {described(name)}", hint))


class NormLog(ObserverRule):
    """Record how large a gradient, a weight or an update is, per parameter and step.

    ## What it does
    Records `stats` of every matched gradient: the norms `l1`, `l2`, `linf`; `mean`, `std`
    (population), `min`, `max`; `zeros` and `nonfinite`, the number of such elements. It changes
    nothing: training with it is bit-identical to training without.

    Beside norms of parameters it records the loss of each update and the learning rates of its optimizer.

    ## Why use it
    To see which layer explodes, vanishes or stagnates, and when that began.

    ## Weights and updates
    `tensor: value` records the weight once the update is over, `tensor: update` the weight after the update minus
    the weight before. An update has two more `stats`: `ratio`, its 2-norm over that of the weight after it, and
    `moved`, the share of elements that it changed. A skipped update has no record. A frozen weight, or one without
    a gradient, has an update of 0.
    A weight in half precision rounds: at a learning rate of 1e-5 most elements of a bfloat16 weight do not move, and
    `moved` says so. What is recorded is the change of the weight itself, not of a float32 master copy.
    `value` is exact. `update` is exact up to 16,384 elements. Of a larger parameter it is measured on 16,384
    elements at fixed random places: `l1`, `l2`, `zeros` and `nonfinite` are scaled to the whole, `linf`, `min` and
    `max` are those of the sample. Give it `steps: {every: 10}` or the like.

    ## What the optimizer keeps
    `tensor: state.NAME` records what the optimizer keeps for each parameter after an update, such as `state.exp_avg_sq` of Adam or
    `state.momentum_buffer` of SGD; also single numbers, such as `state.step`. It is measured in the steps of the rule alone.
    If an optimizer keeps no such state of any matched parameter, a warning at its first update lists what it does keep.

    ## Histograms
    `histogram` counts the elements by sign and magnitude: 32 bins for each sign, each over two powers of 2, from 2^-48 to 2^16.
    The first also counts what is smaller, the last what is larger; zeros and non-finite elements have counts of their
    own. The 66 counts are the columns `histogram_00` (largest negative elements) to `histogram_63` (largest positive ones),
    `histogram_zeros` and `histogram_nonfinite`; `Run.histograms(NAME)` has them together. It is for weights and gradients,
    not for updates. A record takes 66 rows: give it `steps: {every: 10}` or the like.

    ## One number over all
    `per: rule` records one number over all gradients that the rule matches, under the id of the rule:
    `session.history(RULE_ID)`. Its `l2` is what `torch.nn.utils.clip_grad_norm_` returns. With several optimizers each has its own,
    with the module in front. It is for `l1`, `l2`, `linf`, `min`, `max` and counts, at `accumulated` and `step`.

    ## Points
    `accumulated` (default): the gradient after the last backward pass of a step, before the script
    clips it. `backward`: the contribution of each pass, one record per pass. `step`: the gradient that the
    optimizer gets, after clipping and after the rules above this rule in the file.

    ## Cost
    `l2` is one batched reduction per backward pass, shared with `nan-trap`; each other statistic is one pass over
    the tensor, `histogram` a dozen. On a device `nonfinite` copies fewer than 2^24 elements at a time. Never waits for
    the device.

    ## Range
    `l2` is computed in float32, as in PyTorch. On an accelerator squares of elements beyond about 1e19
    overflow, so the recorded norm is infinite, and elements below about 1e-23 vanish from it. A CPU computes such norms again in
    float64. `std` has these limits everywhere, `l1` and `linf` have none. Records are float32.
    """

    EXAMPLES: ClassVar = (
        Example({}, [3.0, 4.0], record={"l2": 5.0}),
        Example(
            {"stats": ["l1", "linf", "mean", "std", "min", "max", "zeros", "nonfinite"]},
            [3.0, -4.0, 0.0, 1.0],
            record={
                "l1": 8.0,
                "linf": 4.0,
                "mean": 0.0,
                "std": 6.5**0.5,
                "min": -4.0,
                "max": 3.0,
                "zeros": 1.0,
                "nonfinite": 0.0,
            },
        ),
    )

    measures: ClassVar[bool] = True

    action: Literal["norm-log"] = "norm-log"
    stats: Annotated[
        tuple[Annotated[str, AfterValidator(_stat)], ...],
        FROM_LIST,
        AfterValidator(each_once),
        WithJsonSchema({"type": "array", "items": {"enum": list(STATISTICS)}, "minItems": 1}),
        Field(min_length=1, description="The statistics to record.", examples=[["l2"]]),
    ] = ("l2",)

    per: Annotated[
        Literal["parameter", "rule"],
        Field(description="One number for each gradient, or one for all matches of the rule."),
    ] = "parameter"

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        yield from self._flaws_of_per()
        is_update = self.tensor == "update"
        for stat in self.stats:
            statistic = STATISTICS[stat]
            if statistic.of_update and not is_update:
                message = f"`{stat}` says what an update changes in a weight"
                yield Flaw("stats", message, "write `params` and `tensor: update`, or remove it")
            elif statistic.whole is not None and is_update:
                message = f"`{stat}` needs all elements, and an update is measured on a sample"
                yield Flaw("stats", message, "record it of `tensor: value`, or remove it")

    def _flaws_of_per(self) -> Iterator[Flaw]:
        if self.per == "parameter":
            return
        is_gradient = self.params is not None and self.tensor in (None, "grad")
        if not is_gradient or self.at == "backward":
            message = "`per: rule` needs all gradients of an update at once"
            hint = "write `params` with `at: accumulated` or `at: step`, and leave `tensor` out"
            yield Flaw("per", message, f"{hint}, or remove it")
        for stat in self.stats:
            if not STATISTICS[stat].joins:
                message = f"`{stat}` of all gradients does not follow from the `{stat}` of each"
                known = [name for name, how in STATISTICS.items() if how.joins]
                yield Flaw("stats", message, f"with `per: rule` use {', '.join(known)}")

    def compile(self) -> Observer:
        """Return the statistics to record."""
        return Observer(self.stats, joins=self.per == "rule")

    def complex_problem(self) -> str:
        real = [stat for stat in self.stats if STATISTICS[stat].real]
        if not real:
            return ""
        return f"complex numbers have no real {' or '.join(real)}"
