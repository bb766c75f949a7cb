"""The running statistics of `spike-trap` rules, their saved form, and the norms of one update that they judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, InstanceOf, ValidationInfo
from pydantic_core import PydanticCustomError
from torch import Tensor

from gradsurgeon.actions import Spikes
from gradsurgeon.tensors import measure
from gradsurgeon.tensors.measure import Norms

# The decay of the running means of single gradients.
_BETA = 0.97


@dataclass(slots=True, eq=False)
class RunningStatistic:
    """The state that a rule has learnt from the tensors of one counter, float64.

    Attributes:
        kept: the state of the rule's bound, of shape ``[rows, 1]`` or ``[rows, len(indices)]``.
        usual: running means of the norms of the tensors, of shape ``[len(indices)]``, 0 for a tensor without a mean.
    """

    indices: tuple[int, ...]
    kept: Tensor
    usual: Tensor


@dataclass(frozen=True, slots=True)
class JudgedNorms:
    """The norms of one update under one rule, as its bound sees them.

    Attributes:
        indices: the parameters whose gradients the update is about to consume.
        columns: the places of the tensors in the statistic, ``None`` if the statistic has no other tensors.
        each: their norms, float64 of shape ``[len(indices)]``.
        norms: the norms to compare: one norm over all tensors, or the norm of each.
        before: the state that the bound kept so far, of shape ``[rows, len(norms)]``.
        passed: the norms as the bound lets them through.
        after: the state to keep if the update takes place.
    """

    spikes: Spikes
    statistic: RunningStatistic
    indices: tuple[int, ...]
    columns: Tensor | None
    each: Tensor
    norms: Tensor
    before: Tensor
    passed: Tensor
    after: Tensor

    @property
    def usual(self) -> Tensor:
        """The running means of the norms of the tensors, 0 for a tensor without a mean."""
        if not self.spikes.over_rule:
            return self.before[1]
        if self.columns is None:
            return self.statistic.usual
        return self.statistic.usual[self.columns]

    @property
    def flags(self) -> Norms:
        """One number per norm, non-finite for a spike, to be read together with other norms."""
        # A norm that is not finite makes the difference NaN.
        passes = (self.passed - self.norms).ge(0)
        return ((tuple(range(self.norms.numel())), passes.float().reciprocal()),)

    @property
    def reported(self) -> Tensor:
        """The rows of the state before that a description needs."""
        return self.before[: self.spikes.bound.reported]

    def to_be_read(self) -> Tensor:
        """Return the numbers that `read` needs, in one tensor."""
        return torch.cat([self.norms, self.passed, self.reported.flatten()])

    def read(self, numbers: Tensor) -> tuple[list[float], list[float], Tensor]:
        """Return norms, passed norms and rows of the state before, once the numbers of `to_be_read` are on the host."""
        table = numbers.reshape(-1, len(self.norms))
        norms, passed = table[:2].tolist()
        return norms, passed, table[2:]

    def factors(self, indices: Sequence[int]) -> Tensor:
        """Return the factors of gradients, float32: one for all, or one for each."""
        factors = (self.passed / self.norms).where(self.passed < self.norms, 1.0).float()
        if self.spikes.over_rule or len(indices) == len(self.indices):
            return factors
        return measure.picked(factors, self.indices, indices)

    def learn(self, left_out: Tensor | None = None) -> None:
        """Enter the norms into the statistic. A spike enters with the norm that `clip` would have let through.

        Nothing enters if the update is ``left_out``, a flag that only the device knows.
        """
        statistic = self.statistic
        kept = statistic.kept
        usual = statistic.usual
        self._enter(statistic)
        if left_out is not None:
            is_out = left_out.to(kept.device) > 0
            statistic.kept = torch.where(is_out, kept, statistic.kept)
            statistic.usual = torch.where(is_out, usual, statistic.usual)

    def _enter(self, statistic: RunningStatistic) -> None:
        columns = self.columns
        over_rule = self.spikes.over_rule
        if over_rule or columns is None:
            statistic.kept = self.after
        else:
            statistic.kept = statistic.kept.index_copy(1, columns, self.after)
        if not over_rule or self.spikes.then == "clip":
            return
        each = self.each * self.factors(self.indices)
        usual = self.usual
        new = (_BETA * usual + (1 - _BETA) * each).where(usual > 0, each)
        new = new.where(each.isfinite(), usual)
        if columns is None:
            statistic.usual = new
        else:
            statistic.usual = statistic.usual.index_copy(0, columns, new)


def regrouped(
    spikes: Spikes, indices: tuple[int, ...], earlier: Sequence[RunningStatistic | None]
) -> RunningStatistic:
    """Return the learnt state of tensors that several statistics had; a norm over other tensors has none."""
    device = torch.device("cpu")
    for statistic in earlier:
        if statistic is not None:
            device = statistic.kept.device
            break
    columns = 1 if spikes.over_rule else len(indices)
    kept = torch.zeros(spikes.bound.rows, columns, dtype=_wide_dtype(device), device=device)
    new = RunningStatistic(indices, kept, kept.new_zeros(len(indices)))
    for place, (index, old) in enumerate(zip(indices, earlier, strict=True)):
        if old is not None:
            column = old.indices.index(index)
            new.usual[place] = old.usual[column].to(device)
            if not spikes.over_rule:
                kept[:, place] = old.kept[:, column].to(device)
    whole = earlier[0]
    is_one = all(statistic is whole for statistic in earlier)
    if spikes.over_rule and whole is not None and is_one:
        new.kept = whole.kept.clone()
    return new


def wide(norms: Tensor) -> Tensor:
    return norms.to(_wide_dtype(norms.device))


def _wide_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


# Rows of the learnt state: a count and a mean. Rounding may put a variance, the third row, below 0.
_ABOVE_0 = {"rule": 2, "parameter": 2, "loss": 1}


def _sound(rule: LearntByRule, info: ValidationInfo) -> LearntByRule:
    for number, part in enumerate(rule.statistics):
        count = len(part.params)
        kept = part.kept
        usual = part.usual
        # The bound of a rule that is gone has an unknown number of rows.
        rows = len(kept) if kept.dim() else 0
        if info.context:
            rows = info.context.get(rule.bound, rows)
        columns = 1 if rule.per == "rule" else count
        have_sizes = kept.shape == (rows, columns) and usual.shape == (count,)
        if not have_sizes or len(set(part.params)) < count:
            sizes = f"{tuple(kept.shape)} and {tuple(usual.shape)}, should be {(rows, columns)} and {(count,)}"
            raise _flaw(f"statistic {number} of {count} parameters has numbers of sizes {sizes}")
        if not _is_learnable(kept, _ABOVE_0[rule.per]) or not _is_learnable(usual, count):
            raise _flaw(f"statistic {number} has numbers that a rule never learns")
    return rule


def _is_learnable(numbers: Tensor, above_0: int) -> bool:
    """Return whether all numbers are finite, and those of the first rows, ``above_0``, are not negative."""
    if numbers.layout != torch.strided or not numbers.is_floating_point():
        return False
    if not numbers.isfinite().all():
        return False
    return not numbers[:above_0].lt(0).any()


def _flaw(text: str) -> PydanticCustomError:
    return PydanticCustomError("state", "{text}", {"text": text})


@dataclass(frozen=True, slots=True)
class Learnt:
    """The learnt state of a rule for parameters with a common optimizer: see `RunningStatistic`."""

    params: list[str]
    kept: InstanceOf[Tensor]
    usual: InstanceOf[Tensor]


@dataclass(frozen=True, slots=True)
class LearntByRule:
    """The learnt state of a rule, for every optimizer; that of a loss has the names of losses."""

    bound: str
    per: Literal["rule", "parameter", "loss"]
    params: list[str]
    statistics: list[Learnt]


CheckedLearntByRule = Annotated[LearntByRule, AfterValidator(_sound)]
