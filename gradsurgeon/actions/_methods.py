"""The methods that combine several gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradsurgeon.common._libraries import library

if TYPE_CHECKING:
    from torch import Tensor

EXTRA = "surgery"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to weigh the gradients of losses.

    Attributes:
        size: the result without conflict and without `preference`, as part of a sentence; a test checks each.
        options: its options, all of which must be given.
        follows_scale: whether the common scale of all gradients matters.
    """

    weighting: str
    paper: str
    size: str
    about: str
    options: tuple[str, ...] = ()
    solvers: tuple[str, ...] = ()
    takes_preference: bool = False
    follows_scale: bool = False

    @property
    def keys(self) -> set[str]:
        """The options of a rule that the method uses."""
        keys = set(self.options)
        if self.takes_preference:
            keys.add("preference")
            if self.solvers:
                keys.add("memory")
        return keys


# The options of single methods, each as a file may have it.
OPTIONS: Mapping[str, str] = {
    "c": "c: 0.4",
    "alpha": "alpha: 1",
}

_QUADRATIC = ("quadprog", "qpsolvers")
METHODS: Mapping[str, Method] = {
    "upgrad": Method(
        "UPGradWeighting",
        "arXiv 2406.16232",
        "the average",
        "projects each gradient so that it conflicts with no other, and averages the projections",
        solvers=_QUADRATIC,
        takes_preference=True,
    ),
    "dualproj": Method(
        "DualProjWeighting",
        "GEM, arXiv 1706.08840",
        "the average",
        "projects the average so that it conflicts with no gradient; with `memory`, A-GEM (arXiv 1812.00420)",
        solvers=_QUADRATIC,
        takes_preference=True,
    ),
    "pcgrad": Method(
        "PCGradWeighting",
        "arXiv 2001.06782",
        "the sum",
        "removes from each gradient its conflicts with each other gradient, in random order, and sums the results",
    ),
    "mgda": Method(
        "MGDAWeighting",
        "arXiv 1810.04650",
        "an average, with weights that add up to 1",
        "takes the shortest average of the gradients, so the smallest gradient counts most",
    ),
    "imtl-g": Method(
        "IMTLGWeighting",
        "openreview IMPnRXEWpvr",
        "an average, with weights that add up to 1",
        "chooses weights that give the result the same projection on the direction of each gradient",
    ),
    "aligned-mtl": Method(
        "AlignedMTLWeighting",
        "arXiv 2305.19000",
        "at most the length of the average",
        "turns and stretches the gradients until they are orthogonal and equally long, and averages them",
        takes_preference=True,
    ),
    "cagrad": Method(
        "CAGradWeighting",
        "arXiv 2110.14048",
        "at most 1 + `c` times the length of the average",
        "searches around the average, within `c` times its length, for the best result for the worst loss",
        options=("c",),
        solvers=("cvxpy", "clarabel"),
    ),
    "fairgrad": Method(
        "FairGradWeighting",
        "arXiv 2402.15638",
        "a length of its own",
        "shares the progress of the losses alpha-fairly; its length follows from `alpha` and the gradients, so no "
        "learning rate carries over",
        options=("alpha",),
        solvers=("scipy",),
        follows_scale=True,
    ),
}


# The methods that there are no longer, each with what to use instead.
GONE: Mapping[str, str] = {
    "krum": "use `torchjd.aggregation.Krum` in the script",
    "mean": "`method: fairgrad` with `alpha: 0` averages the gradients",
    "sum": "leave the rule out: without it the gradients are summed",
    "constant": "multiply each loss by its weight in the script, and leave the rule out",
    "random": "use `torchjd.aggregation.Random` in the script",
}


class Weigher:
    """Maps the inner products of gradients to a weight for each, by one method."""

    def __init__(
        self, name: str, options: Mapping[str, Any], preference: Sequence[float] | None
    ) -> None:
        self._method = METHODS[name]
        self._options = options
        self._preference = preference
        purpose = f"`method: {name}`"
        self._torchjd = library("torchjd.aggregation", EXTRA, purpose)
        for solver in self._method.solvers:
            library(solver, EXTRA, purpose)

    def __call__(self, products: Tensor) -> Tensor:
        """Return the weights of n gradients by their inner products, float64 ``[n, n]``, or raise ValueError."""
        weights = products.new_ones(len(products))
        rows = (products.diagonal() > 0).nonzero().flatten()
        # Some solvers do not return a single gradient unchanged.
        if not len(rows) or (len(rows) == 1 and self._preference is None):
            return weights
        nonzero = products[rows][:, rows]
        if not self._method.follows_scale:
            # Methods treat gradients below some absolute length as zeros, and real gradients are often shorter.
            nonzero = nonzero / nonzero.trace()
        weighting = self._weighting(rows, products)
        weights[rows] = weighting(nonzero)
        return weights

    def _weighting(self, rows: Tensor, products: Tensor) -> Any:
        # The tensor makes others like itself, because reading rules must not need torch.
        options = dict(self._options)
        if self._preference is not None:
            preference = products.new_tensor(self._preference)[rows]
            options["pref_vector"] = preference
            if not preference.all() and self._method.solvers:
                # The constraint of a loss under `memory` must be exact.
                linalg = library("torchjd.linalg", EXTRA, "`memory`")
                options["projector"] = linalg.QuadprogProjector(norm_eps=0.0, reg_eps=1e-12)
        return getattr(self._torchjd, self._method.weighting)(**options)
