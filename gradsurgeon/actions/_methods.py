"""The methods that combine several gradients: a table, so that reading a rule needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gradsurgeon._libraries import library

if TYPE_CHECKING:
    from torch import Tensor

EXTRA = "surgery"


@dataclass(frozen=True, slots=True)
class Method:
    """One way to weigh the gradients of losses: a class of `torchjd.aggregation`, and what a rule may say of it.

    Attributes:
        size: the result without conflict and without `preference`, as part of a sentence; a test checks each.
        options: its options, and whether they must be given.
        keeps_zeros: whether a zero gradient counts; other methods leave it out.
        follows_scale: whether the common scale of all gradients matters.
    """

    weighting: str
    paper: str
    size: str
    about: str
    options: Mapping[str, bool] = field(default_factory=dict)
    solvers: tuple[str, ...] = ()
    takes_preference: bool = False
    keeps_zeros: bool = False
    follows_scale: bool = False

    @property
    def keys(self) -> set[str]:
        """The options of a rule that the method uses."""
        preferring = ("preference", "memory") if self.solvers else ("preference",)
        return {*self.options, *(preferring if self.takes_preference else ())}


# The options of single methods, each as a file may have it.
OPTIONS: Mapping[str, str] = {
    "c": "c: 0.4",
    "alpha": "alpha: 1",
    "n_byzantine": "n_byzantine: 1",
    "n_selected": "n_selected: 2",
    "weights": "weights: {seg: 1, depth: 0.5}",
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
        options={"c": True},
        solvers=("cvxpy", "clarabel"),
    ),
    "fairgrad": Method(
        "FairGradWeighting",
        "arXiv 2402.15638",
        "a length of its own",
        "shares the progress of the losses alpha-fairly; its length follows from `alpha` and the gradients, so no "
        "learning rate carries over",
        options={"alpha": True},
        solvers=("scipy",),
        follows_scale=True,
    ),
    "krum": Method(
        "KrumWeighting",
        "NeurIPS 2017, Blanchard et al.",
        "an average, with weights that add up to 1",
        "takes the average of the `n_selected` gradients that are closest to the others",
        options={"n_byzantine": True, "n_selected": False},
        keeps_zeros=True,
    ),
    "mean": Method("MeanWeighting", "-", "the average", "averages the gradients"),
    "sum": Method("SumWeighting", "-", "the sum", "sums the gradients, as without a rule"),
    "constant": Method(
        "ConstantWeighting",
        "-",
        "the sum by its `weights`",
        "sums the gradients with the `weights` of the rule",
        options={"weights": True},
    ),
    "random": Method(
        "RandomWeighting",
        "arXiv 2111.10603",
        "an average, with weights that add up to 1",
        "averages the gradients with random weights, new ones in each call",
    ),
}


class Weigher:
    """Maps the inner products of gradients to a weight for each, by one method."""

    def __init__(
        self, name: str, options: Mapping[str, Any], preference: Sequence[float] | None
    ) -> None:
        self._method = METHODS[name]
        self._options = options
        self._preference = preference
        what = f"`method: {name}`"
        self._jd = library("torchjd.aggregation", EXTRA, what)
        for solver in self._method.solvers:
            library(solver, EXTRA, what)

    def __call__(self, products: Tensor) -> Tensor:
        """Return the weights of n gradients by their inner products, float64 ``[n, n]``, or raise ValueError."""
        weights = products.new_ones(len(products))
        counts = weights if self._method.keeps_zeros else products.diagonal()
        rows = (counts > 0).nonzero().flatten()
        if not len(rows):
            return weights
        some = products[rows][:, rows]
        if not self._method.follows_scale:
            # Methods treat gradients below some absolute length as zeros, and real gradients are often shorter.
            some = some / some.trace()
        # Some solvers do not return a single gradient unchanged.
        has_choice = len(rows) > 1 or self._preference is not None or "weights" in self._options
        weights[rows] = self._weighting(rows, products)(some) if has_choice else 1.0
        return weights

    def _weighting(self, rows: Tensor, products: Tensor) -> Any:
        # The tensor makes others like itself, because reading rules must not need torch.
        options = dict(self._options)
        if "weights" in options:
            options["weights"] = products.new_tensor(options["weights"])[rows]
        if self._preference is not None:
            options["pref_vector"] = preference = products.new_tensor(self._preference)[rows]
            if not preference.all() and self._method.solvers:
                # The constraint of a loss under `memory` must be exact.
                linalg = library("torchjd.linalg", EXTRA, "`memory`")
                options["projector"] = linalg.QuadprogProjector(norm_eps=0.0, reg_eps=1e-12)
        return getattr(self._jd, self._method.weighting)(**options)
