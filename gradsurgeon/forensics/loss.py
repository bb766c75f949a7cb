"""Finds non-finite numbers in a loss outside of the model, which cannot be run again.

The nodes of its graph keep the tensors that the backward pass needs. They show the first non-finite number and
the operation that made it, but not the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.forensics.cause import cause, cause_of_call
from gradsurgeon.forensics.kept_step import KeptLoss
from gradsurgeon.forensics.operations import Call, facts, nonfinite_kind
from gradsurgeon.forensics.sources import BLANK, Source, held
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


def source_in(loss: KeptLoss) -> Source | None:
    """Return the operation or tensor that made a loss non-finite; ``None`` if unknown."""
    try:
        # The script may mean an infinity, but never NaN.
        is_nan = loss.value is not None and nonfinite_kind(loss.value) == "NaN"
        for node in loss.nodes:
            bad = _nonfinite(node)
            if not bad and (made := _repeated(node, loss)) is not None:
                return made
            if bad := {n: t for n, t in bad.items() if not is_nan or nonfinite_kind(t) == "NaN"}:
                return _of_first(node, bad, loss)
    except Exception:  # noqa: BLE001 # a bundle may hold anything
        return None
    return None


def _of_first(node: LossNode, bad: Mapping[str, Tensor], loss: KeptLoss) -> Source | None:
    """Return the source of the non-finite tensors of the first node that has some."""
    result = node.saved.get("result")
    if isinstance(result, Tensor) and nonfinite_kind(result):
        return _made(node, loss, result)
    # Its input was non-finite: the node before it made that, unless that node had non-finite inputs, too.
    name, tensor = next(iter(bad.items()))
    maker = dict(enumerate(node.made_of)).get(_PLACES.get(name, -1), -1)
    if maker == NO_GRAPH:
        return held(0, "loss input", f"{name} of {node.name}", facts(tensor, name))
    if maker < 0 or _nonfinite(loss.nodes[maker]):
        return None
    return _made(loss.nodes[maker], loss, tensor)


def _tensors(node: LossNode) -> dict[str, Tensor]:
    return {name: value for name, value in node.saved.items() if isinstance(value, Tensor)}


def _nonfinite(node: LossNode) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in _tensors(node).items() if nonfinite_kind(tensor)}


def _repeated(node: LossNode, loss: KeptLoss) -> Source | None:
    """Return the operation of a node as the source, if it makes non-finite numbers of what the node kept."""
    func, names = _AGAIN.get(node.name, (None, ()))
    args = tuple(node.saved.get(name) for name in names)
    # Nodes keep no numbers, and no tensors that need no gradient.
    if func is None or any(argument is None for argument in args):
        return None
    with torch.no_grad():
        result = func(*args)
    return _made(node, loss, result, Call(func, args, {})) if nonfinite_kind(result) else None


def _made(node: LossNode, loss: KeptLoss, result: Tensor, call: Call | None = None) -> Source:
    """Return a source: the operation of a node, and ``call`` if its arguments are known."""
    measured = facts(result)
    told = replace(
        BLANK,
        what=measured.kind,
        where="forward",
        operation=node.name if call is None else call.name,
        node=_which(node, loss),
        inputs=tuple(facts(t, name) for name, t in _tensors(node).items() if name != "result"),
        output=measured,
        cause=cause("unknown", _NOT_KEPT) if call is None else cause_of_call(call, 0),
    )
    return Source(0, told, repeated=call is not None)


def _which(node: LossNode, loss: KeptLoss) -> str:
    """Return the name of a node, and which one it is if the loss has several of that name."""
    alike = [one for one in loss.nodes if one.name == node.name]
    if len(alike) == 1:
        return node.name
    return f"{node.name}, number {alike.index(node) + 1} of {len(alike)}"
