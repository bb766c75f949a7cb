"""From the kept calls of a step to a diagnosis: all calls are replayed, and the earliest source is judged."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.common.diagnosis import Certainty, Diagnosis
from gradsurgeon.common.operands import operand_of
from gradsurgeon.forensics.cause import cause, cause_of_call
from gradsurgeon.forensics.kept_step import MAX_BYTES, FailedStep, KeptCall, KeptLoss, KeptStep
from gradsurgeon.forensics.operations import Call, facts, nonfinite_kind
from gradsurgeon.forensics.replay import INPUT, Replayed, WatchTags, input_name, replay
from gradsurgeon.forensics.rows import with_rows
from gradsurgeon.forensics.sources import BLANK, NonfiniteSource, held
from gradsurgeon.tensors.backward_graph import NO_GRAPH, LossNode
from gradsurgeon.tensors.structure import tensors_in

_LONGEST = 300
_NO_CALL = (
    "no call of the model was kept: the script calls its parts, or torch.jit.script runs it, or it is compiled: then "
    "apply the rules to the module that torch.compile returned"
)
_TOO_LARGE = f"{{}} of the calls of this step were not kept: they exceed {MAX_BYTES // 2**20} MiB"
_DIFFERENT = (
    "the replay returned other outputs than the call: state, an input, a buffer of more than 65,536 elements or random "
    "numbers changed"
)
_CLOSE = "the replay differs in the last digits"
_UPDATED = (
    "another optimizer has updated weights since the call, and the replay used the new weights"
)
_NOTHING_FINITE = "the call returned no finite number to compare the replay with"
_FINITE = (
    "these gradients are finite in the replay: the script changed them after backward, made them without the forward pass "
    "or by `torch.autograd.grad` (a gradient penalty), or random numbers differ, or the machine made an error"
)
_ITERATOR = "the model was given an iterator ({}), which a replay would use up: give it the items"
_DIVIDED = (
    "the parameters are divided over ranks, and a rank cannot run its part again alone: train on one device, or under "
    "DistributedDataParallel, to find the operation"
)
_OUTSIDE = "the loss is computed outside of the model and cannot be run again: compute it in the forward of the model to get its line"
_UNSEEN = "no operation that PyTorch shows has made it"
_INFINITE = "the output of the model is infinite there, not NaN, and the loss outside may mean that"
_NOT_RUN = "the step was not run again: with several ranks that is done only for a trap"
_COMPILED = "the model was compiled, and the replay ran it without the compiler"
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


def diagnose(
    failed: FailedStep,
    doubts: Sequence[str] = (),
    *,
    watch_tags: WatchTags = nullcontext,
    debugger: bool = False,
) -> Diagnosis:
    """Replay the calls of a step, and return where and why a number became non-finite. Waits for the device.

    ``doubts`` are reasons that make any result less certain. ``watch_tags`` shows the tags of the script to the replay.
    """
    blank = Diagnosis("not reproduced", (), failed.step, failed.rank)
    reasons = _missing_calls(failed.kept)
    if not failed.kept.calls:
        if not reasons:
            reasons = [_NO_CALL]
        return replace(blank, reasons=tuple(reasons))
    if failed.divided:
        of_input = diagnose_inputs(failed)
        if of_input is not None:
            return of_input
        return replace(blank, reasons=(_DIVIDED,))
    reasons += doubts
    blamed = _search(failed, reasons, watch_tags)
    if blamed is None:
        if not reasons:
            reasons = [_FINITE]
        return replace(blank, reasons=tuple(dict.fromkeys(reasons)))
    replayed, source = blamed
    if debugger and source.is_operation:
        replay(replayed.call, watch_tags, stop_at=source.when)
    reasons += _doubts(replayed, source, failed)
    diagnosis = _diagnosis_of(replayed, source, failed, tuple(reasons))
    if source.is_outside:
        return with_rows(diagnosis, replayed.call, None)
    blame = partial(_blamed_again, failed, watch_tags, source)
    return with_rows(diagnosis, replayed.call, blame)


def _blamed_again(
    failed: FailedStep, watch_tags: WatchTags, source: NonfiniteSource, call: KeptCall
) -> NonfiniteSource | None:
    """Run a changed call; return the source to blame in it, and ``source`` if the script refuses the change."""
    replayed = replay(call, watch_tags)
    if replayed.error is not None:
        return source
    return _to_blame(replayed, failed)


def _missing_calls(kept: KeptStep) -> list[str]:
    """Return why a call of the step was not kept, as one reason or none."""
    if kept.problem:
        return [f"a call of the model could not be kept: {kept.problem}"]
    if kept.dropped:
        return [_TOO_LARGE.format(kept.dropped)]
    return []


def diagnose_inputs(failed: FailedStep) -> Diagnosis | None:
    """Return the diagnosis of a step whose model was given NaN, without a replay. Waits for the device."""
    for call in failed.kept.calls:
        module = call.module()
        if module is None:
            continue
        for path, tensor in tensors_in([call.args, call.kwargs]):
            if nonfinite_kind(tensor) == "NaN":
                name = input_name(module, path)
                source = held(0, "input", name, facts(tensor, name))
                diagnosis = _diagnosis_of(Replayed(call), source, failed, (_NOT_RUN,))
                return with_rows(diagnosis, call, None)
    return None


def _search(
    failed: FailedStep, reasons: list[str], watch_tags: WatchTags
) -> tuple[Replayed, NonfiniteSource] | None:
    outside: tuple[Replayed, NonfiniteSource] | None = None
    for call in failed.kept.calls:
        replayed = replay(call, watch_tags)
        error = replayed.error
        if call.iterators:
            reasons.append(_ITERATOR.format(", ".join(call.iterators)))
            continue
        if error is not None:
            why = str(error).partition("\n")[0][:_LONGEST]
            reasons.append(f"the replay raised {type(error).__name__}: {why}")
            continue
        if "other" in replayed.compared and not failed.kept.updated:
            reasons.append(_DIFFERENT)
            continue
        source = _to_blame(replayed, failed)
        if source is None:
            continue
        if not source.is_outside:
            return replayed, source
        # Another call may have sent the gradient back.
        if outside is None:
            outside = (replayed, source)
    return outside


def _to_blame(replayed: Replayed, failed: FailedStep) -> NonfiniteSource | None:
    blamed = []
    for name, source in replayed.gradients.items():
        # The gradient of an input goes back to another call.
        if not failed.bad or name in failed.bad or name.startswith(INPUT):
            blamed.append(source)
    if any(source.is_outside for source in blamed):
        # A non-finite output may have made the loss non-finite, and so the gradient that came back.
        made_by_loss = _is_made_by_loss(failed.kept.losses.get(replayed.call.number))
        for path, (kind, source) in replayed.outputs.items():
            # The script may have meant an infinity of which the loss made NaN.
            if path in replayed.returned and (kind == "NaN" or not made_by_loss):
                blamed.append(source)
    blamed = [source for source in blamed if not source.intended]
    if not blamed:
        # A trap on modules can trip without a non-finite gradient.
        blamed = [s for name, s in replayed.modules.items() if name in failed.modules]
    return min(blamed, key=lambda source: source.when, default=None)


def _is_made_by_loss(loss: KeptLoss | None) -> bool:
    """Tell whether an operation of the loss, when repeated, made it non-finite."""
    if loss is None:
        return False
    source = _source_in(loss)
    return source is not None and source.is_operation and source.repeated


def _doubts(replayed: Replayed, source: NonfiniteSource, failed: FailedStep) -> Iterator[str]:
    call = replayed.call
    diagnosis = source.diagnosis
    if replayed.compared & {"near", "other"}:
        if failed.kept.updated:
            yield _UPDATED
        else:
            yield _CLOSE
    elif "equal" not in replayed.compared and not _has_moved_alike(replayed, failed):
        yield _NOTHING_FINITE
    if source.is_outside:
        yield _OUTSIDE
    if diagnosis.where == "unknown":
        yield _UNSEEN
    if source.rival:
        yield f"{source.rival} made an infinity at the same elements, and may be the cause instead"
    if replayed.returned and _may_be_meant(replayed, source):
        yield _INFINITE
    if call.compiled:
        yield _COMPILED
    if failed.rested:
        yield f"rules that edit tensors of modules did not act in the replay: {', '.join(failed.rested)}"


def _may_be_meant(replayed: Replayed, source: NonfiniteSource) -> bool:
    """Tell whether a source made an infinite output. Nobody means a number that is too large for its format."""
    why = source.diagnosis.cause
    if why is not None and why.fault == "overflow":
        return False
    return any(kind != "NaN" and made is source for kind, made in replayed.outputs.values())


def _has_moved_alike(replayed: Replayed, failed: FailedStep) -> bool:
    """Tell whether the replay changed a buffer as the call did."""
    call = replayed.call
    kept_after = _buffers_after(call, failed)
    for name, before in call.buffers.items():
        after = replayed.buffers.get(name, before)
        # A counter of calls would be equal after any call.
        if not after.is_floating_point() or after.shape != before.shape:
            continue
        kept = kept_after[name]
        if kept.shape == after.shape:
            changed = (after != before) & after.isfinite()
            if bool(changed.any()) and torch.equal(after[changed], kept[changed]):
                return True
    return False


def _buffers_after(call: KeptCall, failed: FailedStep) -> dict[str, Tensor]:
    """Return the buffers after a call: those before the next call of the module, else those of the module now."""
    buffers = dict(failed.called[call.name].named_buffers())
    buffers.update(call.weights)
    calls = failed.kept.calls
    for later in calls[calls.index(call) + 1 :]:
        if later.name == call.name:
            buffers.update(later.buffers)
            break
    return buffers


def _diagnosis_of(
    replayed: Replayed, source: NonfiniteSource, failed: FailedStep, reasons: tuple[str, ...]
) -> Diagnosis:
    call = replayed.call
    diagnosis = source.diagnosis
    loss_value = None
    loss_nodes: tuple[str, ...] = ()
    loss = failed.kept.losses.get(call.number)
    if source.is_outside and loss is not None:
        inside_loss = _source_in(loss)
        if inside_loss is not None:
            diagnosis = inside_loss.diagnosis
        if loss.value is not None:
            loss_value = float(loss.value)
        loss_nodes = tuple(node.name for node in loss.nodes)
    module = diagnosis.module
    module_type = diagnosis.module_type
    name = diagnosis.name
    if module == "." and call.prefix:
        module = call.name
    elif module:
        module = call.prefix + module
    if diagnosis.where == "input":
        module = call.name
        module_type = type(call.module()).__name__
    if diagnosis.where in ("weight", "buffer"):
        name = call.prefix + name
    certainty: Certainty = "reproduced"
    if reasons:
        certainty = "partial"
    return replace(
        diagnosis,
        certainty=certainty,
        reasons=reasons,
        step=failed.step,
        rank=failed.rank,
        micro_batch=call.number,
        micro_batches=failed.kept.passes,
        module=module,
        module_type=module_type,
        name=name,
        scale=failed.scale_number,
        loss=loss_value,
        loss_nodes=loss_nodes,
    )


def _source_in(loss: KeptLoss) -> NonfiniteSource | None:
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
        return held(0, "loss input", operand_of(_label(node, loss), name), facts(tensor, name))
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
        cause=why,
    )
    return NonfiniteSource(0, diagnosis, repeated=call is not None)
