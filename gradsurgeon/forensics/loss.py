"""Finds non-finite numbers in a loss outside of the model, which cannot be run again.

The nodes of its graph keep the tensors that the backward pass needs. They show the first non-finite number and
the operation that made it, but not the line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.forensics.cause import cause, cause_of_call
from gradsurgeon.forensics.kept_step import KeptLoss
from gradsurgeon.forensics.operations import facts, nonfinite_kind
from gradsurgeon.forensics.provenance import name_of
from gradsurgeon.forensics.sources import Birth, Call, Origin
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


def birth_in(loss: KeptLoss) -> Birth | Origin | None:
    """Return the operation that made a loss non-finite, or a target or weight that was so; ``None`` if unknown."""
    try:
        return _birth_in(loss)
    except Exception:  # noqa: BLE001 # a bundle may hold anything
        return None


def _birth_in(loss: KeptLoss) -> Birth | Origin | None:
    # The script may mean an infinity, but never NaN.
    is_nan = loss.value is not None and nonfinite_kind(loss.value) == "NaN"
    for node in loss.nodes:
        bad = _spoilt(node, nan=is_nan)
        if not _spoilt(node, nan=False) and (birth := _again(node)) is not None:
            return birth
        if not bad:
            continue
        return _source_of(node, bad, loss.nodes)
    return None


def _source_of(
    node: LossNode, bad: Mapping[str, Tensor], nodes: Sequence[LossNode]
) -> Birth | Origin | None:
    """Return the source of the non-finite tensors of the first node that has some."""
    result = node.saved.get("result")
    if isinstance(result, Tensor) and nonfinite_kind(result):
        return _birth(node, result, None)
    # Its input was non-finite: the node before it made that, unless that node had non-finite inputs, too.
    name, tensor = next(iter(bad.items()))
    maker = dict(enumerate(node.made_of)).get(_PLACES.get(name, -1))
    if maker == NO_GRAPH:
        return Origin(0, "loss input", f"{name} of {node.name}", facts(tensor, name))
    if maker is None or maker < 0 or _spoilt(nodes[maker], nan=False):
        return None
    return _birth(nodes[maker], tensor, None)


def _tensors(node: LossNode) -> dict[str, Tensor]:
    return {name: value for name, value in node.saved.items() if isinstance(value, Tensor)}


def _spoilt(node: LossNode, *, nan: bool) -> dict[str, Tensor]:
    """Return the non-finite tensors that a node keeps by name, or those that are NaN."""
    kinds = {name: nonfinite_kind(tensor) for name, tensor in _tensors(node).items()}
    return {
        name: tensor
        for name, tensor in _tensors(node).items()
        if kinds[name] == "NaN" or (kinds[name] and not nan)
    }


def _again(node: LossNode) -> Birth | None:
    func, names = _AGAIN.get(node.name, (None, ()))
    if func is None or not all(name in node.saved for name in names):
        return None
    args = tuple(node.saved[name] for name in names)
    if any(argument is None for argument in args):
        return None  # Nodes keep no numbers, and no tensors that need no gradient.
    with torch.no_grad():
        result = func(*args)
    if not nonfinite_kind(result):
        return None
    return _birth(node, result, Call(func, name_of(func), args, {}))


def _birth(node: LossNode, result: Tensor, call: Call | None) -> Birth:
    measured = facts(result)
    return Birth(
        when=0,
        kind=measured.kind or "NaN",
        operation=node.name if call is None else call.name,
        direction="forward",
        module="",
        module_type="",
        node=node.name,
        lines=(),
        inputs=tuple(
            facts(tensor, name) for name, tensor in _tensors(node).items() if name != "result"
        ),
        output=measured,
        history=(),
        cause=cause("unknown", _NOT_KEPT) if call is None else cause_of_call(call, 0),
        repeated=call is not None,
    )
