"""From the kept calls of a step to a diagnosis: all calls are replayed, and the earliest source is judged."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradsurgeon.common.diagnosis import Certainty, Diagnosis
from gradsurgeon.common.rows import Rows
from gradsurgeon.errors import reason_of
from gradsurgeon.forensics.kept_step import MAX_BYTES, FailedStep, KeptCall, KeptLoss
from gradsurgeon.forensics.operations import facts, nonfinite_kind
from gradsurgeon.forensics.outside_loss import source_in
from gradsurgeon.forensics.replay import INPUT, Replayed, WatchTags, input_name, replay
from gradsurgeon.forensics.sources import NonfiniteSource, held
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.structure import Copied, tensors_in

_LONGEST = 300
# Other ranks wait for a diagnosis for 10 s: after a longer search no samples are tried out.
_MOST_SECONDS = 2.0
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
    if failed.divided:
        of_input = diagnose_inputs(failed)
        if of_input is not None:
            return of_input
        return replace(blank, reasons=(_DIVIDED,))
    reasons = list(doubts)
    if failed.kept.problem:
        reasons.append(f"a call of the model could not be kept: {failed.kept.problem}")
    elif failed.kept.dropped:
        reasons.append(_TOO_LARGE.format(failed.kept.dropped))
    elif not failed.kept.calls:
        reasons.append(_NO_CALL)
    began = time.monotonic()
    blamed = _search(failed, reasons, watch_tags)
    is_slow = time.monotonic() - began > _MOST_SECONDS and _dist.world() > 1
    if blamed is None:
        if not reasons:
            reasons.append(_FINITE)
        return replace(blank, reasons=tuple(dict.fromkeys(reasons)))
    replayed, source = blamed
    if debugger and source.is_operation:
        replay(replayed.call, watch_tags, stop_at=source.when)
    reasons += _doubts(replayed, source, failed)
    diagnosis = _diagnosis_of(replayed, source, failed, tuple(reasons))
    if source.is_operation and not is_slow:
        # Tensors of any kind may raise anything, and there may be no other row. The rest of the diagnosis stays.
        with suppress(Exception):
            return _with_samples(diagnosis, replayed.call, failed, watch_tags)
    return diagnosis


def _with_samples(
    diagnosis: Diagnosis, call: KeptCall, failed: FailedStep, watch_tags: WatchTags
) -> Diagnosis:
    """Name the rows of the input that a result comes from, if the result is finite with another row in their place."""
    rows = diagnosis.rows
    if rows is None:
        return diagnosis
    _, first = next(tensors_in([call.args, call.kwargs]))
    size = len(first)
    # The dimension may be made of samples and heads.
    samples = sorted({row * size // rows.size for row in rows.rows})
    if len(samples) == size:
        return diagnosis
    replayed = replay(_without(samples, size, call), watch_tags)
    source = _to_blame(replayed, failed)
    is_other = source is None or source.diagnosis.lines != diagnosis.lines
    if replayed.error is None and is_other:
        return replace(diagnosis, rows=_from_samples(rows, samples, size, call))
    return diagnosis


def _without(samples: Sequence[int], size: int, call: KeptCall) -> KeptCall:
    """Return a call with another row in the place of some, in each input of that size."""
    other = min(set(range(size)).difference(samples))
    order = list(range(size))
    for sample in samples:
        order[sample] = other

    def exchanged(tensor: Tensor) -> Tensor:
        if tensor.dim() and len(tensor) == size:
            return tensor[order]
        return tensor

    args, kwargs = Copied((call.args, call.kwargs), exchanged).value
    return replace(call, args=args, kwargs=kwargs)


def _from_samples(rows: Rows, samples: list[int], size: int, call: KeptCall) -> Rows:
    """Return rows that come from some rows of the input, with the ids of these samples."""
    ids: list[int] = []
    _, first = next(tensors_in([call.args, call.kwargs]))
    dims = list(first.shape)
    if first.is_floating_point():
        # The last dimension holds features.
        dims.pop()
    # Rows may be steps of time if another dimension has as many places.
    is_batch = dims.count(size) <= 1
    if is_batch and call.sample_ids is not None and len(call.sample_ids) == size:
        ids = call.sample_ids[samples].tolist()
    return replace(rows, input_rows=tuple(samples), ids=tuple(ids))


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
                return _diagnosis_of(Replayed(call), source, failed, (_NOT_RUN,))
    return None


def _search(
    failed: FailedStep, reasons: list[str], watch_tags: WatchTags
) -> tuple[Replayed, NonfiniteSource] | None:
    outside: tuple[Replayed, NonfiniteSource] | None = None
    for call in failed.kept.calls:
        replayed = replay(call, watch_tags)
        error = replayed.error
        source = _to_blame(replayed, failed)
        if call.iterators:
            reasons.append(_ITERATOR.format(", ".join(call.iterators)))
        elif error is not None:
            why = reason_of(error)[:_LONGEST]
            reasons.append(f"the replay raised {type(error).__name__}: {why}")
        elif "other" in replayed.compared and not failed.kept.updated:
            reasons.append(_DIFFERENT)
        elif source is not None and not source.is_outside:
            return replayed, source
        elif source is not None and outside is None:
            # Another call may have sent the gradient back.
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
    source = source_in(loss)
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
    # Those before the next call of the module, else those of the module now, or of the bundle.
    last = {**dict(failed.called[call.name].named_buffers()), **call.weights}
    calls = failed.kept.calls
    for later in reversed(calls[calls.index(call) + 1 :]):
        if later.name == call.name:
            last.update(later.buffers)
    for name, before in call.buffers.items():
        after = replayed.buffers.get(name, before)
        kept = last[name]
        # A counter of calls would be equal after any call.
        if after.is_floating_point() and before.shape == after.shape == kept.shape:
            changed = (after != before) & after.isfinite()
            if bool(changed.any()) and torch.equal(after[changed], kept[changed]):
                return True
    return False


def _diagnosis_of(
    replayed: Replayed, source: NonfiniteSource, failed: FailedStep, reasons: tuple[str, ...]
) -> Diagnosis:
    call = replayed.call
    diagnosis = source.diagnosis
    more: dict[str, Any] = {}
    loss = failed.kept.losses.get(call.number)
    if source.is_outside and loss is not None:
        inside_loss = source_in(loss)
        if inside_loss is not None:
            diagnosis = inside_loss.diagnosis
        if loss.value is not None:
            more["loss"] = float(loss.value)
        more["loss_nodes"] = tuple(node.name for node in loss.nodes)
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
        rows = diagnosis.rows
        if rows is not None:
            more["rows"] = _from_samples(rows, list(rows.rows), rows.size, call)
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
        scale=failed.scale,
        **more,
    )
