"""The source of a non-finite loss or gradient outside of the model, by what the graph of the loss has kept."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from gradsurgeon.common.diagnosis import OPERANDS, Cause, Fault, TensorFacts
from gradsurgeon.common.rows import Rows
from gradsurgeon.forensics.cause import cause, cause_of_call, remedy_for
from gradsurgeon.forensics.kept_step import KeptLoss
from gradsurgeon.forensics.operations import Call, facts, nonfinite_kind
from gradsurgeon.forensics.sources import BLANK, NonfiniteSource, held
from gradsurgeon.tensors.backward_graph import NO_GRAPH, OLDER, LossNode, label_of, operation_of

# Elementwise operations are repeated, and these, with the overloads that their nodes stand for.
_OVERLOADS = {
    "BmmBackward0": "default",
    "DivBackward0": "Tensor",
    "LogsumexpBackward0": "default",
    "MmBackward0": "default",
    "MseLossBackward0": "default",
    "MulBackward0": "Tensor",
    "PowBackward0": "Tensor_Scalar",
    "PowBackward1": "Tensor_Tensor",
    "XlogyBackward0": "Tensor",
}
# The name of a derivative among the tensors of a diagnosis.
DERIVATIVE = "derivative"
_DIVISIONS = ("Div", "Reciprocal", "Rsqrt")
_INFINITE = "its derivative is not finite there"
_NO_DIVISOR = "its divisor is 0"
_EMPTY = "it is a mean over nothing: no {} counts"
_TOO_LARGE = "the outputs of the model are finite, and their sum is too large for the format"
_NOT_KEPT = "the inputs of the operation were not kept, so it cannot be repeated"
_PERHAPS_BEFORE = f"{_NOT_KEPT}; it is far from the end of the loss, and what was before it is not known: that may be to blame instead"
_OUTPUT = -1
_UNKNOWN = -3
# Operations with which scripts write infinities that they mean.
_MASKS = ("MaskedFillBackward0", "MaskedFillBackward1", "WhereBackward0")
# Operations that make finite numbers of finite ones.
_HARMLESS = (
    "Abs Add Alias AsStrided BinaryCrossEntropyWithLogits Cat Clamp ClampMin ClampMax Clone Cos "
    "Diagonal Elu Erf Expand Gather Gelu HuberLoss Hypot Index IndexSelect LeakyRelu "
    "LinalgVectorNorm LogSigmoid LogSoftmax Logaddexp Logsumexp Max Maximum Mean Min Minimum "
    "MseLoss Mul NanToNum Neg Norm Permute Relu Repeat ReshapeAlias Rsub Select Sigmoid Silu Sin "
    "Slice SmoothL1Loss Softmax Softplus Split Squeeze Stack Sub Sum T Tanh Transpose Tril Triu "
    "Unbind UnsafeView Unsqueeze View"
)
# The beginnings of nodes of operations that make NaN only of NaN.
_PASS_NAN = ("Exp", "Relu", "Sigmoid", "Tanh")
# The beginnings of nodes with several results.
_SEVERAL = (OLDER, "Split", "Unbind", "UnsafeSplit", "Linalg", "Compiled", "VarMean", "StdMean")
# The edge of a node for a kept argument: edges have the order of the arguments, and a bias comes before its matrices.
_EDGES = {"self": 0, "target": 1, "mat1": -2, "exponent": -1, "other": -1, "mat2": -1}


def source_in(loss: KeptLoss, rows: Rows | None = None) -> NonfiniteSource | None:
    """Return the operation or tensor that made a loss or its gradient non-finite, by what the graph of the loss keeps.

    ``rows`` are those of the gradient that came back to the model.
    """
    try:
        with torch.no_grad():
            if loss.value is not None and nonfinite_kind(loss.value):
                return _source_of_value(loss)
            return _source_of_gradient(loss, rows) or _source_of_value(loss)
    except Exception:  # noqa: BLE001 # a bundle may hold anything
        return None


def _source_of_value(loss: KeptLoss) -> NonfiniteSource | None:
    """Return the oldest operation that made what reached the loss, of inputs that are known to be free of it."""
    nodes = loss.nodes
    results = _known_results(loss)
    kinds = {place: nonfinite_kind(result) for place, result in results.items()}
    makers = _makers(nodes, kinds)
    # The script may mean an infinity, but never NaN.
    is_nan = kinds.get(len(nodes) - 1) == "NaN"
    # The first infinity, by whether the script may mean it.
    infinite: dict[bool, int] = {}
    infinite_input = None
    for place in _reaching(nodes, kinds):
        node = nodes[place]
        kind = kinds.get(place, "")
        empty = _mean_of_nothing(node)
        if empty and loss.value is not None:
            why = cause("mathematics", empty, advice=remedy_for("mathematics", node.name))
            return _blamed(loss, place, facts(loss.value), why)
        name, source = _nonfinite_argument(node)
        if source == NO_GRAPH:
            tensor = _tensors_in(node)[name]
            infinite_input = _given(loss, place, name, tensor)
            if not is_nan or nonfinite_kind(tensor) == "NaN":
                return infinite_input
        if place not in makers:
            continue
        if kind == "NaN" and _is_harmless(node) and _OUTPUT in node.made_of:
            # Outputs of the model are finite here, so this is a leaf.
            return _given(loss, place, "self", results[place])
        is_mask = _is_mask(node, kind)
        if kind == "NaN" or not (is_nan or is_mask):
            return _maker(loss, place, results[place])
        infinite.setdefault(is_mask, place)
    for is_mask, place in sorted(infinite.items()):
        if not (is_nan and is_mask):
            return _maker(loss, place, results[place])
    return infinite_input or _division_by_zero(loss)


def _division_by_zero(loss: KeptLoss) -> NonfiniteSource | None:
    """Return the oldest division of unknown numbers by 0 that no choice follows."""
    for place, node in enumerate(loss.nodes):
        if node.name != "DivBackward0":
            continue
        divisor = _tensors_in(node).get("other")
        if divisor is None or any(after.name in _MASKS for after in loss.nodes[place:]):
            continue
        if loss.value is not None and bool((divisor == 0).any()):
            advice = remedy_for("mathematics", node.name)
            why = cause("mathematics", _NO_DIVISOR, advice=advice)
            source = _blamed(loss, place, facts(loss.value), why)
            # The dividend was not kept.
            return replace(source, diagnosis=replace(source.diagnosis, output=None))
    return None


def _known_results(loss: KeptLoss) -> dict[int, Tensor]:
    """Return results by place: a node keeps its own or those of nodes before it, or its operation can be repeated."""
    results: dict[int, Tensor] = {}
    for place, node in enumerate(loss.nodes):
        kept = _tensors_in(node)
        call = _call_of(node)
        result = kept.get("result", kept.get("result0"))
        if result is not None:
            results[place] = result
        elif call is not None:
            with suppress(RuntimeError):
                results.setdefault(place, call.func(**call.kwargs))
        for name, tensor in kept.items():
            source = _source_of(node, name)
            if source >= 0 and not loss.nodes[source].name.startswith(_SEVERAL):
                results.setdefault(source, tensor)
    if loss.value is not None:
        results[len(loss.nodes) - 1] = loss.value
    return results


def _makers(nodes: Sequence[LossNode], kinds: Mapping[int, str]) -> set[int]:
    """Return the places of results with non-finite numbers that none of their inputs can have had."""
    makers = set()
    # The kinds that each result may have.
    possible: list[set[str]] = []
    for place, node in enumerate(nodes):
        _, bad_source = _nonfinite_argument(node)
        inherited = set().union(*[possible[source] for source in node.made_of if source >= 0])
        if bad_source == _OUTPUT:
            inherited = {"NaN", "Inf"}
        kind = kinds.get(place)
        # Minus infinity comes out of it only if all that goes in is masked.
        is_all_masked = bool(kind) and node.name == "LogsumexpBackward0"
        # A constant that was not kept, or infinities that met, made its NaN.
        is_passed_on = kind == "NaN" and node.name.startswith(_PASS_NAN)
        if is_passed_on and _OUTPUT not in node.made_of:
            inherited = {"NaN", "Inf"}
        if kind and (is_all_masked or kind not in inherited):
            makers.add(place)
        if kind == "":
            inherited = set()
        elif _is_mask(node, kind) and kind != "NaN":
            inherited = inherited | {"Inf"}
        elif kind == "NaN" or place in makers or bad_source or _may_make_nonfinite(node):
            inherited = {"NaN", "Inf"}
        possible.append(inherited)
    return makers


def _reaching(nodes: Sequence[LossNode], kinds: Mapping[int, str]) -> list[int]:
    """Return the places of results that may have come to the loss, oldest first; all places if the loss is finite."""
    last = len(nodes) - 1
    if kinds.get(last) == "":
        return list(range(len(nodes)))
    reaching = {last}
    for place in range(last, -1, -1):
        if place in reaching and kinds.get(place) != "":
            reaching.update(nodes[place].made_of)
    return sorted(place for place in reaching if place >= 0 and kinds.get(place) != "")


def _mean_of_nothing(node: LossNode) -> str:
    """Return why a mean has nothing to count, by the count that its node keeps; empty if it counts something."""
    if node.saved.get("self_sym_numel") == 0:
        return _EMPTY.format("element")
    total = node.readable_values().get("total_weight")
    if isinstance(total, Tensor) and float(total) == 0:
        return _EMPTY.format("target")
    return ""


def _source_of_gradient(loss: KeptLoss, rows: Rows | None) -> NonfiniteSource | None:
    """Return the last operation whose derivative is not finite: a backward pass comes to it first.

    A clamp or a choice before it may keep its gradient away. So one that fits the rows exactly goes before others.
    """
    likely = None
    for place in range(len(loss.nodes) - 1, -1, -1):
        node = loss.nodes[place]
        derivative = _infinite_derivative(node)
        if derivative is None:
            continue
        measured = facts(derivative, DERIVATIVE)
        advice = remedy_for("mathematics", node.name, node.name)
        why = cause("mathematics", _INFINITE, advice=advice)
        source = _blamed(loss, place, measured, why, "backward")
        own = measured.rows
        if rows is None or (own is not None and own.rows == rows.rows):
            return source
        may_fit = own is None or own.size != rows.size or not set(own.rows).isdisjoint(rows.rows)
        if likely is None and may_fit:
            likely = source
    return likely


def _infinite_derivative(node: LossNode) -> Tensor | None:
    """Return the derivative of an elementwise operation at finite numbers if it is not finite. Waits for the device."""
    kept = _tensors_in(node)
    if not kept or any(map(nonfinite_kind, kept.values())):
        return None
    derivatives: Sequence[Tensor] = ()
    if node.name == "SqrtBackward0":
        derivatives = [kept["result"].reciprocal() / 2]
    else:
        # A node keeps no operand that the gradients do not need.
        call = _call_of(node, like=next(iter(kept.values())))
        if call is None or call.stem in ("mm", "bmm"):
            return None
        leaves = {}
        for name, tensor in call.named():
            if _source_of(node, name) != NO_GRAPH and tensor.is_floating_point():
                leaves[name] = tensor.detach().requires_grad_()
        # A number has no derivative, and a bundle may hold anything.
        with suppress(RuntimeError), torch.enable_grad():
            result = call.func(**{**call.kwargs, **leaves})
            derivatives = torch.autograd.grad(result.sum(), list(leaves.values()))
    return next(filter(nonfinite_kind, derivatives), None)


def _source_of(node: LossNode, name: str) -> int:
    """Return the place of the node that made a kept argument."""
    edge = _EDGES.get(name)
    if edge is None or not -len(node.made_of) <= edge < len(node.made_of):
        return _UNKNOWN
    return node.made_of[edge]


def _nonfinite_argument(node: LossNode) -> tuple[str, int]:
    """Return the name of a kept argument without a node that is not finite, and the sign of its source; else 0."""
    for name, tensor in _tensors_in(node).items():
        source = _source_of(node, name)
        if source in (NO_GRAPH, _OUTPUT) and nonfinite_kind(tensor):
            return name, source
    return "", 0


def _is_harmless(node: LossNode) -> bool:
    return node.name.partition("Backward")[0] in _HARMLESS.split()


def _may_make_nonfinite(node: LossNode) -> bool:
    # A constant that was not read may hold anything.
    return node.is_unread or not _is_harmless(node)


def _is_mask(node: LossNode, kind: str | None) -> bool:
    """Tell whether the script may mean infinities in a result: a choice, or a sum with a constant that has made some."""
    return node.name in _MASKS or (
        node.name == "AddBackward0" and bool(kind) and NO_GRAPH in node.made_of
    )


def _tensors_in(node: LossNode) -> dict[str, Tensor]:
    values = node.readable_values()
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _call_of(node: LossNode, like: Tensor | None = None) -> Call | None:
    """Return the operation of a node with its arguments, if it keeps all of them, or with ones for those that it lacks."""
    packet = getattr(torch.ops.aten, operation_of(node.name), None)
    # The derivative of a derivative is another operation.
    if node.name.count("Backward") != 1:
        return None
    func = getattr(packet, _OVERLOADS.get(node.name, "default"), None)
    if func is None or not (node.name in _OVERLOADS or torch.Tag.pointwise in func.tags):
        return None
    kept = node.readable_values()
    for name in node.saved:
        # The layouts of matrices are kept beside them.
        if name == "result" or "_sym_" in name:
            kept.pop(name, None)
    names = {argument.name for argument in func._schema.arguments}  # noqa: SLF001 # no public name
    for argument in func._schema.arguments:  # noqa: SLF001 # as above
        if kept.get(argument.name) is None and not argument.has_default_value():
            if like is None:
                return None
            kept[argument.name] = torch.ones_like(like)
    if not kept.keys() <= names:
        return None
    return Call(func, (), kept)


def _given(loss: KeptLoss, place: int, argument: str, tensor: Tensor) -> NonfiniteSource:
    label = label_of(loss.nodes[place], loss.nodes)
    operand = OPERANDS.get(argument, argument)
    given = held(0, "loss input", f"the {operand} of {label}", facts(tensor))
    diagnosis = replace(given.diagnosis, node=label, loss_place=place)
    return replace(given, diagnosis=diagnosis)


def _maker(loss: KeptLoss, place: int, result: Tensor) -> NonfiniteSource:
    """Return the operation that made a result, with its cause if it can be repeated."""
    node = loss.nodes[place]
    call = _call_of(node)
    measured = facts(result)
    fault: Fault = "overflow"
    # A product or a sum of finite numbers is infinite only if it is too large.
    if measured.kind == "NaN" or node.name.startswith(_DIVISIONS):
        fault = "mathematics"
    advice = remedy_for(fault, node.name)
    if call is not None:
        why = cause_of_call(call, 0)
    elif (
        fault == "overflow" and node.name.startswith(("Mean", "Sum")) and node.made_of == [_OUTPUT]
    ):
        why = cause(fault, _TOO_LARGE, advice=advice)
    else:
        # An argument without a graph may be to blame if the operation keeps nothing, as a sum does.
        if not _tensors_in(node):
            advice = ""
        text = _NOT_KEPT
        if any(after.name == OLDER for after in loss.nodes[place:]):
            text = _PERHAPS_BEFORE
        why = cause("unknown", text, advice=advice)
    return _blamed(loss, place, measured, why)


def _blamed(
    loss: KeptLoss, place: int, measured: TensorFacts, why: Cause, where: str = "forward"
) -> NonfiniteSource:
    """Return an operation of the loss as the source."""
    node = loss.nodes[place]
    kept = _tensors_in(node)
    kept.pop("result", None)
    diagnosis = replace(
        BLANK,
        what=measured.kind,
        where=where,
        operation=f"aten.{operation_of(node.name)}",
        node=label_of(node, loss.nodes),
        inputs=tuple(facts(tensor, name) for name, tensor in kept.items()),
        output=measured,
        rows=measured.rows,
        loss_place=place,
        cause=why,
    )
    return NonfiniteSource(0, diagnosis)
