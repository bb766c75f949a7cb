"""The source of a non-finite loss that was computed outside of the model, by what its graph has kept."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.common.diagnosis import OPERANDS
from gradsurgeon.forensics.cause import cause, cause_of_call
from gradsurgeon.forensics.kept_step import KeptLoss
from gradsurgeon.forensics.operations import Call, facts, nonfinite_kind
from gradsurgeon.forensics.sources import BLANK, NonfiniteSource, held
from gradsurgeon.tensors.backward_graph import NO_GRAPH, LossNode

# The operations of nodes that keep all of their arguments.
_AGAIN: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "DivBackward0": (torch.ops.aten.div.Tensor, ("self", "other")),
    "LogBackward0": (torch.ops.aten.log.default, ("self",)),
    "Log2Backward0": (torch.ops.aten.log2.default, ("self",)),
    "Log10Backward0": (torch.ops.aten.log10.default, ("self",)),
    "Log1PBackward0": (torch.ops.aten.log1p.default, ("self",)),
    "PowBackward0": (torch.ops.aten.pow.Tensor_Scalar, ("self", "exponent")),
    "PowBackward1": (torch.ops.aten.pow.Tensor_Tensor, ("self", "exponent")),
    "AcosBackward0": (torch.ops.aten.acos.default, ("self",)),
    "AsinBackward0": (torch.ops.aten.asin.default, ("self",)),
    "MulBackward0": (torch.ops.aten.mul.Tensor, ("self", "other")),
}
_NOT_KEPT = "the inputs of the operation were not kept, so it cannot be repeated"
# The edge of a node for a kept argument: edges have the order of the arguments.
_PLACES = {"self": 0, "other": 1, "target": 1, "exponent": 1}


def source_in(loss: KeptLoss) -> NonfiniteSource | None:
    """Return the operation or tensor that made a loss outside of the model non-finite, by what its graph keeps."""
    try:
        # The script may mean an infinity, but never NaN.
        is_nan = loss.value is not None and nonfinite_kind(loss.value) == "NaN"
        for node in loss.nodes:
            nonfinite = _nonfinite_in(node)
            if not nonfinite:
                repeated = _repeated(node, loss)
                if repeated is not None:
                    return repeated
            for name, tensor in nonfinite.items():
                if not is_nan or nonfinite_kind(tensor) == "NaN":
                    return _source_at(node, name, tensor, loss)
    except Exception:  # noqa: BLE001 # a bundle may hold anything
        return None
    return None


def _source_at(node: LossNode, name: str, tensor: Tensor, loss: KeptLoss) -> NonfiniteSource | None:
    """Return the source of a non-finite tensor that a node keeps by name."""
    result = _tensors_in(node).get("result")
    if result is not None and nonfinite_kind(result):
        return _made(node, loss, result)
    # Its input was non-finite: the node before it made that, unless that node had non-finite inputs, too.
    edge = _PLACES.get(name)
    if edge is None or edge >= len(node.made_of):
        return None
    maker = node.made_of[edge]
    if maker == NO_GRAPH:
        operand = f"the {OPERANDS.get(name, name)} of {_label(node, loss)}"
        return held(0, "loss input", operand, facts(tensor))
    if maker < 0 or _nonfinite_in(loss.nodes[maker]):
        return None
    return _made(loss.nodes[maker], loss, tensor)


def _tensors_in(node: LossNode) -> dict[str, Tensor]:
    values = node.readable_values()
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _nonfinite_in(node: LossNode) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tensors_in(node).items() if nonfinite_kind(tensor)}


def _repeated(node: LossNode, loss: KeptLoss) -> NonfiniteSource | None:
    """Return the operation of a node as the source, if it makes non-finite numbers of what the node kept."""
    if node.name not in _AGAIN:
        return None
    func, names = _AGAIN[node.name]
    kept = node.readable_values()
    args = tuple(kept.get(name) for name in names)
    # Nodes keep no numbers, and no tensors that need no gradient.
    if any(argument is None for argument in args):
        return None
    with torch.no_grad():
        result = func(*args)
    if not nonfinite_kind(result):
        return None
    return _made(node, loss, result, Call(func, args, {}))


def _label(node: LossNode, loss: KeptLoss) -> str:
    """Return the name of a node; of several alike, also which one it is."""
    alike = [other for other in loss.nodes if other.name == node.name]
    if len(alike) == 1:
        return node.name
    return f"{node.name}, number {alike.index(node) + 1} of {len(alike)}"


def _made(
    node: LossNode, loss: KeptLoss, result: Tensor, call: Call | None = None
) -> NonfiniteSource:
    measured = facts(result)
    kept = _tensors_in(node)
    kept.pop("result", None)
    operation = node.name
    why = cause("unknown", _NOT_KEPT)
    if call is not None:
        operation = call.name
        why = cause_of_call(call, 0)
    diagnosis = replace(
        BLANK,
        what=measured.kind,
        where="forward",
        operation=operation,
        node=_label(node, loss),
        inputs=tuple(facts(tensor, name) for name, tensor in kept.items()),
        output=measured,
        rows=measured.rows,
        cause=why,
    )
    return NonfiniteSource(0, diagnosis, repeated=call is not None)
