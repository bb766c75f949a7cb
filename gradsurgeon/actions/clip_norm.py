"""The action `clip-norm`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._base import Example, Rule
from gradsurgeon.actions._effects import At, ByNorm, Edit, refuse_divided
from gradsurgeon.actions._fields import Flaw
from gradsurgeon.actions._kinds import EditRule
from gradsurgeon.actions._ramps import NumberFrom0, fixed
from gradsurgeon.common._grouping import grouped
from gradsurgeon.common.match import compile_pattern

if TYPE_CHECKING:
    from torch import Tensor


_PER = ("parameter", "rule", "module", "unit")
_EUCLIDEAN = 2
# `timm.utils.adaptive_clip_grad` has this bound.
_LEAST_WEIGHT = 1e-3
# Lint, plan and session say the same.
BY_ITSELF = "clips each gradient by itself, where `clip_grad_norm_` clips all by their common norm"
BOTH_FORMS = "write `per: rule` for the common norm, or `per: parameter`"


class ClipNorm(EditRule):
    """Shorten a gradient that is longer than a bound, keeping its direction.

    ## What it does
    Multiplies by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does. With
    `per: parameter` each gradient has its own norm. With `per: rule` one norm covers all gradients that
    the rule matches, per owning optimizer, as far as this update uses them: gradients that a `freeze`
    hides in this step do not count. If the norm is non-finite, the gradients stay as they are and an event
    reports it, because scaling would spread a NaN over all of them. Half-precision gradients are measured in
    float32. On a CPU the norm of a finite gradient is finite up to 3.4e38, the largest float32; an accelerator
    sums squares in float32, so there the limit is 1.8e19.

    ## Why use it
    One bad batch must not ruin the weights. To bound single elements use `clamp`.

    ## Points
    `step` (default) bounds the final gradient. `backward` bounds the contribution of each pass, with
    `per: parameter` only, because the other gradients do not exist yet. On module tensors and tags each
    tensor is bounded by itself.

    ## Weights and updates
    `tensor: value` with `per: unit`, without `at`, bounds the norm of the weights of each unit after every update that took
    place: the max-norm constraint (Srivastava et al. 2014). `tensor: update` bounds what the update changed in each unit, and
    with `relative_to: weight` at `max_norm` times the norm of its new weights.

    ## Cost
    One reduction and one multiplication per tensor; never waits for the device. For sharded gradients the
    norm covers the whole gradient, which needs one small collective per rule and step.
    """

    points: ClassVar = ("step", "backward")
    measures: ClassVar[bool] = True
    of_weights: ClassVar = ("value", "update")
    EXAMPLES: ClassVar = (
        Example({"per": "parameter", "max_norm": 1.0}, [3.0, 4.0], expect=[0.6, 0.8]),
        Example({"max_norm": 9.0, "per": "rule", "at": "step"}, [3.0, 4.0], expect=[3.0, 4.0]),
        Example(
            {"per": "parameter", "max_norm": 2.0, "norm_type": "inf"},
            [3.0, -4.0],
            expect=[1.5, -2.0],
        ),
        Example(
            {"per": "parameter", "max_norm": 1.0},
            [float("nan"), 4.0, float("inf")],
            expect=[float("nan"), 4.0, float("inf")],
        ),
    )

    action: Literal["clip-norm"] = "clip-norm"
    max_norm: Annotated[
        NumberFrom0, Field(description="The largest norm that stays as it is, or a ramp.")
    ]
    norm_type: Annotated[
        Literal[2, "inf"],
        Field(description='Order of the norm: 2, or "inf" for the largest element.'),
    ] = 2
    per: Annotated[
        str,
        Field(
            description="What has one norm: each `parameter`, all matches of the `rule`, the matches of each `module`, those below "
            'each prefix such as "transformer.h.{n}", or each output `unit`, which is a row of the first dimension.'
        ),
    ] = "parameter"
    relative_to: Annotated[
        Literal["weight"] | None,
        Field(
            description="With `per: unit`: `max_norm` is a multiple of the norm of the weights of the unit."
        ),
    ] = None

    def flaws(self) -> Iterator[Flaw]:
        yield from super().flaws()
        if self.per not in _PER and "{n}" not in self.per:
            message = (
                f'`per` must be {", ".join(_PER)}, or a prefix with {{n}}, found "{self.per[:60]}"'
            )
            yield Flaw("per", message, 'such as `per: rule`, or `per: "transformer.h.{n}"`')
        elif self.params is not None and self.tensor in self.of_weights:
            if self.per != "unit":
                yield Flaw("per", f"`{self.tensor}` is clipped unit by unit", "write `per: unit`")
        elif self.joins_norms and (self.params is None or self.at == "backward"):
            message = "gradients exist one at a time here: there is no norm over several"
            hint = "use `per: parameter`, or `params` and `at: step`"
            yield Flaw("per", message, hint)
        if self.relative_to is not None and self.per != "unit":
            message = "`relative_to` compares each unit with its weights"
            yield Flaw("relative_to", message, "add `per: unit`, or remove it")
        if self.relative_to is not None and self.tensor == "value":
            message = "`value` is the weight itself"
            yield Flaw("relative_to", message, "remove it, or write `tensor: update`")
        if self.per == "unit" and (self.params is None or self.norm_type != _EUCLIDEAN):
            message = "`per: unit` takes the 2-norm of rows of parameters"
            yield Flaw("per", message, "name `params`, and leave `norm_type` out")

    def param_problem(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],  # noqa: ARG002 # of any shape
    ) -> str:
        if "{n}" in self.per and self.group_of(names[0]) == names[0]:
            return f"is below no module `{self.per}`"
        return ""

    def group_of(self, name: str) -> str:
        """Return the name of what a parameter shares its norm with."""
        if self.per == "module":
            return name.rpartition(".")[0]
        prefix = re.escape(self.per).replace(r"\{n\}", r"\d+")
        match = re.match(rf"{prefix}(?=\.)", name)
        return name if match is None else match[0]

    @property
    def joins_norms(self) -> bool:
        return self.per not in ("parameter", "unit")

    @property
    def may_overflow(self) -> bool:
        return False

    @property
    def clips_each(self) -> bool:
        """Whether it clips several gradients one by one, and does not say so."""
        if "per" in self.model_fields_set or self.params is None:
            return False
        return len(self.params) > 1 or not compile_pattern(self.params[0]).is_literal

    def compile(self) -> ByNorm | Edit:
        if self.per == "unit":
            # The weights of units are asked for one parameter at a time.
            together = None if self.relative_to else self._clip_units_
            return Edit(self._clip_units, together, refuse_divided)
        max_norm = fixed(self.max_norm)

        def factor(norm: Tensor) -> Tensor:
            # Multiplying by 1 costs less than asking the device whether to multiply.
            clipped = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            # A comparison is one launch on a device, `isfinite` is four.
            return clipped.masked_fill_((norm < math.inf).logical_not_(), 1.0)

        group = None
        if self.per not in ("parameter", "rule"):
            # Names are the same in each update.
            group = cache(self.group_of)
        return ByNorm(float(self.norm_type), factor, self.joins_norms, group)

    def _clip_units(self, grad: Tensor, at: At) -> Tensor:
        """Clip each unit; relative to its weights as `timm.utils.adaptive_clip_grad` does (Brock et al. 2021)."""
        refuse_divided(at)
        bound: Tensor | float = fixed(self.max_norm)
        if self.relative_to is not None:
            assert at.weight is not None  # noqa: S101 # rules on parameters only
            bound = bound * _norms_of_units(at.weight).clamp(min=_LEAST_WEIGHT)
        return (grad * _factors(_norms_of_units(grad), bound)).to(grad.dtype)

    def _clip_units_(self, grads: Sequence[Tensor], names: Sequence[str], step: int) -> None:  # noqa: ARG002 # alike for all
        import torch  # noqa: PLC0415 # reading rules must not need torch

        for group in grouped(grads, attrgetter("device", "dtype")).values():
            norms = [_norms_of_units(grad) for grad in group]
            whole = torch.cat([norm.flatten() for norm in norms])
            parts = _factors(whole, fixed(self.max_norm)).split_with_sizes(
                [norm.numel() for norm in norms]
            )
            factors = [part.view_as(norm) for part, norm in zip(parts, norms, strict=True)]
            torch._foreach_mul_(group, factors)  # torch has no public function


def _factors(norms: Tensor, bound: Tensor | float) -> Tensor:
    # In numbers of Python: a tensor from the host would be a copy to the device.
    factors = (bound / norms.clamp(min=1e-6)).clamp(max=1.0)
    # A NaN would spread over its unit.
    return factors.masked_fill_((norms < math.inf).logical_not_(), 1.0)


def clips_by_themselves(rules: Iterable[Rule]) -> list[Rule]:
    """Return the rules that clip each gradient by itself, where no rule says by `per` that its author knows."""
    clips: list[Rule] = []
    for rule in rules:
        if not isinstance(rule, ClipNorm):
            continue
        if "per" in rule.model_fields_set:
            return []
        if rule.clips_each and rule.point == "step":
            clips.append(rule)
    return clips


def _norms_of_units(tensor: Tensor) -> Tensor:
    """Return the norm of each row, of a vector as a whole; float32 at least."""
    import torch  # noqa: PLC0415 # reading rules must not need torch

    # An import from a package costs three calls each time.
    wide = torch.promote_types(tensor.dtype, torch.float32)
    dims = tuple(range(1, tensor.dim())) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True, dtype=wide)
    return norms
