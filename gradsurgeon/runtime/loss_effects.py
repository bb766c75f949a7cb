"""The engine of rules on several gradients: from the contributions of losses or modules to weights and records."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradsurgeon.actions import Combination, LossComparison, LossRule
from gradsurgeon.errors import printable
from gradsurgeon.records.store import Key
from gradsurgeon.runtime.effect import Effect
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.inner_products import Contributions, pairs

_PLAIN = "the parameters get the plain sum, as without the rule"
_NONFINITE = f"the gradient of {{losses}} is non-finite: {_PLAIN}, so a trap or a scaler can see it"
# These functions draw from the generator of the script, unless they are given another.
_DRAWS = frozenset(
    {
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
    }
)
_UNSOLVED = f"the solver found no weights for {{names}}: {{problem}}; {_PLAIN}"


@dataclass(frozen=True, slots=True, eq=False)
class DueLossRule:
    """A rule on several gradients that acts now.

    Attributes:
        senders: the losses or modules whose gradients the rule uses.
        params: the tensors that get these gradients, parameters by their numbers.
        groups: the ranks that average the pass; empty if this rank acts alone.
        averaged: the ids of the parameters that these ranks average.
    """

    effect: LossEffect
    step: int
    senders: Sequence[str]
    params: Mapping[int, Tensor]
    groups: _dist.Groups = ()
    averaged: frozenset[int] = frozenset()

    def name(self, index: int) -> str:
        return printable(self.effect.context.names[index])

    def params_by_id(self) -> dict[int, Tensor]:
        return {id(param): param for param in self.params.values()}

    def products(self, given: Contributions, params: Iterable[Tensor]) -> Tensor:
        """Return the inner products of gradients, or of averaged gradients if ranks average some of them."""
        params = list(params)
        # If ranks average some parameters, the others are left out: their gradients differ between ranks.
        averaged = [param for param in params if id(param) in self.averaged]
        if not averaged:
            return given.products(self.senders, params)
        groups = self.groups[:1]
        number = len(_dist.members(groups[0]))

        def average(block: Tensor) -> Tensor:
            return _dist.reduce(block, groups) / number

        return given.products(self.senders, averaged, average)


class LossEffect(Effect):
    """Compares or weighs the gradients of losses, or those that modules send to a tensor that they share."""

    rule: LossRule
    compiled: Combination | LossComparison

    def prepare(self) -> None:
        self.moment = "losses"
        # Whether it replaces gradients by others.
        self.combines = self.context.acts and isinstance(self.compiled, Combination)
        # Whether the gradients of single losses were verified to add up to the gradient of their sum.
        self.needs_no_check = False
        # The step of the last call that combined, and the number of the call within this step.
        self._last_call = (-1, 0)
        # Sinks distinguish rows by the identity of their keys.
        self._series: dict[Key, Key] = {}

    def run(self, due: DueLossRule, given: Contributions) -> dict[str, float]:
        """Compare or combine; return the weight of each sender, empty if the tensors get the plain sum."""
        if isinstance(self.compiled, LossComparison):
            self._compare(due, self.compiled.per, given)
            return {}
        weights = self._weigh(due, self.compiled, given)
        return weights if self.combines else {}

    def _compare(self, due: DueLossRule, per: str, given: Contributions) -> None:
        parts = defaultdict(list)
        for index, param in due.params.items():
            part = ""
            if per != "rule":
                part = self.context.names[index]
            if per == "module":
                part = part.rpartition(".")[0]
            parts[part].append(param)
        compared: dict[str, tuple[float, float]] = {}
        for part, params in parts.items():
            prefix = f"{part}:" if part else ""
            for pair, numbers in pairs(due.senders, due.products(given, params)):
                compared[prefix + pair] = numbers
        for stat, values in zip(self.rule.stats, zip(*compared.values(), strict=True), strict=True):
            self._record(due, stat, tuple(compared), torch.tensor(values, device="cpu"))
        self.count_fired(due.step)

    def _weigh(
        self, due: DueLossRule, combination: Combination, given: Contributions
    ) -> dict[str, float]:
        """Return the weight of each sender and record it; empty if there are no weights."""
        step = due.step
        # Other rules may have compared the same gradients.
        products = due.products(given, due.params.values())
        self.count_fired(step)
        are_finite = products.diagonal().isfinite().tolist()
        nonfinite = []
        for sender, is_finite in zip(due.senders, are_finite, strict=True):
            if not is_finite:
                nonfinite.append(printable(sender))
        if nonfinite:
            # Under `SyncBatchNorm`, one non-finite loss makes the gradients of all losses non-finite.
            losses = " or ".join(nonfinite)
            text = _NONFINITE.format(losses=losses)
            self.notice_once(f"loss {losses}", text, step=step)
            return {}
        weights, problem = self._solved(due, combination, products)
        if not weights.isfinite().all():
            names = ", ".join(map(printable, due.senders))
            text = _UNSOLVED.format(names=names, problem=problem)
            self.notice_once("weights", text, step=step, warn=True)
            return {}
        self._record(due, "weight", due.senders, weights)
        change = weights - 1.0
        total = _norm_of_sum(torch.ones_like(change), products)
        moved = _norm_of_sum(change, products)
        distance = math.inf if moved else 0.0
        if total:
            distance = moved / total
        self._record(due, "distance", ("combined",), torch.tensor([distance], device="cpu"))
        self.count_changed(int(moved > 0.0))
        return dict(zip(due.senders, map(float, weights), strict=True))

    def _solved(
        self, due: DueLossRule, combination: Combination, products: Tensor
    ) -> tuple[Tensor, str]:
        """Return the weights, NaN if the solver found none, and the problem in this case."""
        problem = "the weights are non-finite"
        last_step, last_call = self._last_call
        call = 0
        if last_step == due.step:
            call = last_call + 1
        self._last_call = (due.step, call)
        try:
            with _drawing(f"{self.rule.id}/{due.step}/{call}"):
                weights = combination.weigh(products)
        except (ValueError, ArithmeticError, RuntimeError) as error:
            weights = torch.full_like(products[0], math.nan)
            problem = printable(str(error))
        if due.groups:
            # All ranks have equal products, but on another processor a solver may find other weights, or none.
            first_rank = min(_dist.members(due.groups[0]))
            if _dist.rank() != first_rank:
                weights = torch.zeros_like(weights)
            weights = _dist.reduce(weights, due.groups[:1])
        return weights, problem

    def _record(self, due: DueLossRule, stat: str, columns: Iterable[str], values: Tensor) -> None:
        key = Key(self.rule.id, stat, self.rule.point, tuple(columns))
        key = self._series.setdefault(key, key)
        self.context.recorder.add(key, due.step, range(len(values)), values.float(), replace=False)


def _norm_of_sum(factors: Tensor, products: Tensor) -> float:
    """Return the norm of the sum of gradients times factors, from their inner products."""
    # Rounding can make a square negative.
    return math.sqrt(max(0.0, float(factors @ products @ factors)))


class _OwnDraws(TorchFunctionMode):
    """Gives what draws in this thread a generator of its own: the one of the script serves other threads meanwhile."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        options = dict(kwargs or {})
        if func in _DRAWS:
            options.setdefault("generator", self._generator)
        return func(*args, **options)


@contextmanager
def _drawing(call: str) -> Iterator[None]:
    """Give drawing on the host a state of its own; the script draws as if nothing had happened.

    A resumed run draws the numbers of an uninterrupted run: the seed derives from the script's seed and the call.
    """
    digest = hashlib.sha256(f"{torch.initial_seed()}/{call}".encode()).digest()
    # 63 bits, because no release of torch reads such a seed as a negative number.
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    # The script may have set another default device.
    with torch.device("cpu"), _OwnDraws(generator):
        yield
