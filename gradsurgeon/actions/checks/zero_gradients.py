"""Finds gradients that are exactly 0 in the first updates, and follows them once to the operation that made them 0."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradsurgeon.actions.checks.base import Finding, Findings, LossSource, Pass, Update
from gradsurgeon.actions.checks.loss_graph import OF_SIZE_1
from gradsurgeon.actions.checks.models_of_passes import has_told
from gradsurgeon.actions.checks.optimizer_checks import OptimizerCheck
from gradsurgeon.tensors import _dist, _numbers, _torch
from gradsurgeon.tensors.sampling import sample

# A gradient that is 0 in so many updates is followed in the next pass that reaches it, within some updates.
FOLLOWED = 10
_GIVEN_UP = 18
_MOST_VALUES = 2
# The line of an operation is looked for among so many nodes of the graph.
_MOST_NODES = 10_000

# Why an operation makes a gradient 0. Of several reasons the first is told; those before the faults are facts.
# The gradient came this far, and a hook, a rule or a sum made it 0.
_CAME = ""
_FACTOR = "by a factor of 0, a mask, an empty batch or a term at its minimum"
_CHOICE = "by a softmax over one element, or one that is certain"
_BOUNDS = (
    "because every element is out of its bounds. Bring the values within the bounds, or widen them"
)
_OFF = (
    "because every unit is off. Look at the initial weights and biases, or at what comes before it"
)
_PAIR = "because both factors are 0. Initialise one of each pair with random numbers"
_REASONS = {
    _CAME: "",
    _FACTOR: "Where MaskedFill NativeDropout Pow Abs LinalgVectorNorm MseLoss SmoothL1Loss",
    # `check-structure` knows which softmax is a fault. Attention to one token is none.
    _CHOICE: "Softmax LogSoftmax",
    _BOUNDS: "Clamp ClampMin ClampMax Hardtanh",
    _OFF: "Relu Threshold",
    "because its derivative is 0 everywhere. Pass the gradient around it, as `x + (x.round() - x).detach()` does": (
        "Round Floor Ceil Trunc Sign"
    ),
    "because its argument is infinite, or so large that the derivative is 0. Compute it in float32, or scale its argument down": (
        "Rsqrt Sqrt Reciprocal"
    ),
    "because every element is saturated. Scale its argument down, or initialise smaller weights": (
        "Sigmoid Tanh"
    ),
    "because they are too small for the dtype. Use a `GradScaler`, or bfloat16": "ToCopy",
    _PAIR: "Mul Mm Bmm Mv Dot Addmm Baddbmm",
}
_FACTS = (_FACTOR, _CHOICE)
_LOWER = ("ClampMin", "Relu", "Threshold")


class ZeroGradients(OptimizerCheck):
    """Follows the gradients of one optimizer that were exactly 0 in each of the first updates."""

    def __init__(self) -> None:
        self._zero: list[int] = []
        # Maps each node of the pass that is followed to the reasons why what it gets is 0, with the nodes that made it 0.
        self._origins: dict[Any, dict[str, Any]] = defaultdict(dict)
        self._handles: list[RemovableHandle] = []

    @property
    def waits_for(self) -> str:
        # After a pass that raised it still has its hooks.
        return "before_pass" if self._zero or self._handles else ""

    def close(self) -> None:
        """Take the hooks off the graph, and forget it."""
        while self._handles:
            self._handles.pop().remove()
        self._origins.clear()

    def after_update(self, update: Update) -> Findings:
        if self.owner.updates == 0:
            self._zero = [*update.groups]
        if self.owner.updates < FOLLOWED:
            self._zero = [index for index in self._zero if _is_zero(update, index)]
        return ()

    def before_pass(self, starting: Pass) -> Findings:
        """Put hooks on the graph of a pass if it is the one that is followed. They only read, and wait for the device."""
        self.close()
        graph = starting.graph
        is_due = FOLLOWED <= self.owner.updates < _GIVEN_UP
        if not self._zero or not is_due or graph is None:
            return ()
        if graph.reaches(set(map(id, starting.find(self._zero)))):
            self._handles = [node.register_hook(partial(self._see, node)) for node in graph.nodes()]
        return ()

    def after_pass(self, done: Pass) -> Findings:
        if not self._handles or done.graph is None:
            return
        # Maps an operation and a reason to the first node and the parameters.
        by_origin: dict[tuple[str, str], tuple[Any, list[int]]] = {}
        for index in self._zero:
            origins = self._origins[_torch.node_of(done.params[index])]
            reason = next((reason for reason in _REASONS if reason in origins), None)
            if reason is None:
                continue
            self.owner.explained.add(index)
            node = origins[reason]
            by_origin.setdefault((node.name(), reason), (node, []))[1].append(index)
        self._zero = []
        self.close()
        for (name, reason), (node, indices) in by_origin.items():
            # Unless both factors are parameters of 0, data or an earlier operation made one factor 0.
            zeros = [index for index in indices if not _is_any(done.params[index])]
            if reason == _CAME or (reason == _PAIR and not zeros[1:]):
                continue
            if reason == _CHOICE and has_told(OF_SIZE_1, done.model.root()):
                continue
            text = f"{{names}} get gradients of exactly 0: they become 0 in {name}, {reason}"
            before = node._sequence_nr() - 1  # noqa: SLF001 # no public name
            nodes = done.graph.last_nodes(_MOST_NODES, [(0, before)])
            source = LossSource(nodes, 0)
            yield Finding("zero", text, tuple(indices), source=source, is_fact=reason in _FACTS)

    def _see(self, node: Any, sent: Sequence[Any], got: Sequence[Any]) -> None:
        """Note whether a node made 0 of what it got."""
        try:
            is_zero = not any(map(_is_any, got))
            for (source, _), grad in zip(node.next_functions, sent, strict=True):
                if is_zero:
                    self._origins[source].update(self._origins[node])
                elif grad is not None:
                    self._origins[source][_reason(node, grad, got)] = node
        except Exception:  # noqa: BLE001 # tensors of any kind may raise anything, and the pass is the script's
            self._zero = []


def _is_zero(update: Update, index: int) -> bool:
    is_plain = type(update.params.get(index)) in _dist.PLAIN
    return is_plain and index in update.grads and not _is_any(update.grads[index])


def _is_any(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(_numbers.values(_dist.local(tensor)).any())


def _reason(node: Any, grad: Tensor, got: Sequence[Tensor]) -> str:
    if _is_any(grad):
        return _CAME
    operation = node.name().partition("Backward")[0]
    reason = "unknown"
    for possible_reason, operations in _REASONS.items():
        if operation in operations.split():
            reason = possible_reason
    is_constant = reason == _PAIR and None in dict(node.next_functions)
    if getattr(node, "_saved_max", 0) is None:
        operation = "ClampMin"
    is_hinge = reason in (_BOUNDS, _OFF) and _may_be_hinge(got[0], operation)
    if is_constant or is_hinge or not grad.numel():
        return _FACTOR
    return reason


def _may_be_hinge(grad: Tensor, operation: str) -> bool:
    """Tell whether a gradient is as at a hinge, or at a bound on a part of the loss: of a mean, or at a minimum."""
    values = {*sample(grad).tolist()}
    # A mean pulls in one direction.
    is_of_mean = len(values) <= _MOST_VALUES and min(values) * max(values) >= 0
    return is_of_mean or (operation in _LOWER and bool((grad >= 0).all()))
