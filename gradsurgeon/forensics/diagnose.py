"""From the kept calls of a step to a diagnosis: all calls are replayed, and the earliest source is judged."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch

from gradsurgeon.common.diagnosis import Diagnosis
from gradsurgeon.common.rows import Rows
from gradsurgeon.common.tried import Tried
from gradsurgeon.errors import reason_of, shorten_names
from gradsurgeon.forensics.kept_step import (
    INPUT,
    MAX_BYTES,
    FailedStep,
    KeptCall,
    KeptLoss,
)
from gradsurgeon.forensics.operations import facts, nonfinite_kind
from gradsurgeon.forensics.outside_loss import source_in
from gradsurgeon.forensics.remedies import try_remedies
from gradsurgeon.forensics.replay import Replayed, WatchTags, replay, with_samples
from gradsurgeon.forensics.sources import NonfiniteSource, held
from gradsurgeon.language.planning.manifest import ROOT
from gradsurgeon.tensors import _dist

_LONGEST = 300
# Other ranks wait for a diagnosis for 10 s: after a longer search no samples and no remedies are tried.
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
_WRITTEN = "written since step {step}: {names}"
_NOTHING_FINITE = "the call returned no finite number to compare the replay with"
_FINITE = (
    "these gradients are finite in the replay: the script changed them after backward, made them without the forward pass "
    "or by `torch.autograd.grad` (a gradient penalty), or random numbers differ"
)
_OF_OTHERS = "the gradients of this rank are finite in the replay, so NaN or Inf came from another rank, or the average overflowed"
_ITERATOR = "the model was given an iterator ({}), which a replay would use up: give it the items"
_DIVIDED = (
    "the parameters are divided over ranks, and a rank cannot run its part again alone: train on one device, or under "
    "DistributedDataParallel, to find the operation"
)
_OUTSIDE = "the loss is computed outside of the model and cannot be run again: "
# The first says how to get the line of an operation of the loss. A training that goes on says the second.
LINE_HINT = (
    f"{_OUTSIDE}compute it in the forward of the model, or train with `then: warn`, to get its line"
)
LINE_FOLLOWS = f"{_OUTSIDE}the next backward pass with the same operations shows its line"
_UNREAD = (
    "what operations of the loss have saved was not read, because reading it may run code: a checkpoint or a hook of the "
    "script keeps it, or torch is older than 2.10"
)
_SEVERAL = "several backward passes went through this output, and the loss of each may be to blame"
_HAS_MODEL = "the model returned no tensor, so the operation may be one of its own"
_UNSEEN = "no operation that PyTorch shows has made it"
_INFINITE = "the output of the model is infinite there, not NaN, and the loss outside may mean that"
_REENTRANT = (
    "the backward pass of a reentrant checkpoint cannot be run again: pass `use_reentrant=False`"
)
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
        return replace(diagnose_inputs(failed) or blank, reasons=(_DIVIDED,))
    reasons = [*doubts, *_doubts_of_step(failed)]
    began = time.monotonic()
    tried: list[Tried] = []
    blamed = _search(failed, reasons, tried, watch_tags)
    of_loss = None
    if blamed is None or blamed[1].diagnosis.where == "backward":
        of_loss = _in_losses(failed)
    if blamed is None:
        if not reasons:
            reasons.append(_OF_OTHERS if failed.averaged else _FINITE)
        reasons = list(dict.fromkeys(reasons))
        return of_loss or replace(blank, reasons=tuple(reasons), tried=tuple(tried))
    if of_loss is not None and of_loss.where == "forward" and not math.isfinite(of_loss.loss or 0):
        # The loss was not finite before its backward pass began.
        return of_loss
    replayed, source = blamed
    if debugger and source.is_operation:
        replay(replayed.call, watch_tags, stop_at=source.when)
    reasons += _doubts(replayed, source, failed)
    diagnosis = _diagnosis_of(replayed.call, source, failed, reasons)
    for look_further in (_with_samples, _with_remedies):
        if replayed.error is not None:
            break  # each further replay would end in the same error
        # Tensors of any kind may raise anything, and there may be no other row. The rest of the diagnosis stays.
        if _dist.world() == 1 or time.monotonic() - began <= _MOST_SECONDS:
            with suppress(Exception):
                diagnosis = look_further(diagnosis, replayed.call, failed, watch_tags)
    return diagnosis


def _search(
    failed: FailedStep, reasons: list[str], tried: list[Tried], watch_tags: WatchTags
) -> tuple[Replayed, NonfiniteSource] | None:
    """Replay calls up to the first that shows a source in the model; note why others show nothing."""
    outside = None
    for call in failed.kept.calls:
        replayed = replay(call, watch_tags)
        source = _to_blame(replayed, failed)
        problem = _problem_of(replayed, failed)
        if problem:
            reasons.append(problem)
            tried += _without_rules(replayed, failed)
            if source is not None and "other" not in replayed.compared and replayed.error:
                return replayed, source  # the forward pass ended before the error
        elif source is not None and not source.is_outside:
            return replayed, source
        elif source is not None and outside is None:
            # Another call may have sent the gradient back.
            outside = (replayed, source)
    return outside


def _doubts_of_step(failed: FailedStep) -> Iterator[str]:
    kept = failed.kept
    if kept.problem:
        yield f"a call of the model could not be kept: {kept.problem}"
    elif kept.dropped:
        yield _TOO_LARGE.format(kept.dropped)
    elif not kept.calls:
        yield _NO_CALL
    if failed.written:
        yield _WRITTEN.format(step=failed.step, names=shorten_names(failed.written))


def _problem_of(replayed: Replayed, failed: FailedStep) -> str:
    """Return why the replay of a call shows nothing; empty if it does."""
    if replayed.call.iterators:
        return _ITERATOR.format(", ".join(replayed.call.iterators))
    error = replayed.error
    if error is not None:
        if "use_reentrant" in str(error):
            return _REENTRANT
        return f"the replay raised {type(error).__name__}: {reason_of(error)[:_LONGEST]}"
    if "other" in replayed.compared and not failed.has_moved:
        return _DIFFERENT
    return ""


def _without_rules(replayed: Replayed, failed: FailedStep) -> Iterator[Tried]:
    """Tell that a call was finite without the rules that rest in each replay."""
    was_bad = any(nonfinite_kind(kept) for _, kept in replayed.call.outputs.values())
    if failed.rested and was_bad and "other" in replayed.compared and not replayed.outputs:
        yield Tried(f"without the rules {', '.join(failed.rested)}", True)


def _with_samples(
    diagnosis: Diagnosis, call: KeptCall, failed: FailedStep, watch_tags: WatchTags
) -> Diagnosis:
    """Name the rows of the input that a result comes from, if the result is finite with another row in their place."""
    rows = diagnosis.rows
    if rows is None or not diagnosis.operation or diagnosis.loss_nodes:
        return diagnosis
    size = len(call.first_input)
    # The dimension may be made of samples and heads.
    samples = sorted({row * size // rows.size for row in rows.rows})
    other = min(set(range(size)).difference(samples))
    order = list(range(size))
    for row in samples:
        order[row] = other
    replayed = replay(with_samples(call, order), watch_tags)
    source = _to_blame(replayed, failed)
    is_other = source is None or source.diagnosis.lines != diagnosis.lines
    if replayed.error is None and is_other:
        return replace(diagnosis, rows=_from_samples(rows, samples, call))
    return diagnosis


def _from_samples(rows: Rows, samples: Sequence[int], call: KeptCall) -> Rows:
    """Return rows that come from some rows of the input, with the ids of these samples."""
    ids: list[int] = []
    first = call.first_input
    dims = list(first.shape)
    if first.is_floating_point():
        # The last dimension holds features.
        dims.pop()
    # Rows may be steps of time if another dimension has as many places.
    is_batch = dims.count(len(first)) <= 1
    if is_batch and call.sample_ids is not None and len(call.sample_ids) == len(first):
        ids = call.sample_ids[list(samples)].tolist()
    return replace(rows, input_rows=tuple(samples), ids=tuple(ids))


def _with_remedies(
    diagnosis: Diagnosis, call: KeptCall, failed: FailedStep, watch_tags: WatchTags
) -> Diagnosis:
    return replace(diagnosis, tried=tuple(try_remedies(diagnosis, call, failed, watch_tags)))


def diagnose_inputs(failed: FailedStep) -> Diagnosis | None:
    """Return the diagnosis of a step whose model was given NaN, without a replay. Waits for the device."""
    for call in failed.kept.calls:
        for name, tensor in call.inputs.items():
            if nonfinite_kind(tensor) == "NaN":
                source = held(0, "input", name, facts(tensor, name))
                return _diagnosis_of(call, source, failed, [_NOT_RUN])
    return None


def _in_losses(failed: FailedStep) -> Diagnosis | None:
    """Return the diagnosis of a loss of which no call showed the source, as of a gradient penalty."""
    for call in failed.kept.calls:
        if any(nonfinite_kind(sampled) == "NaN" for _, sampled in call.outputs.values()):
            return None
    for number, loss in failed.kept.losses.items():
        diagnosis = diagnose_loss(loss, failed.step)
        if diagnosis is not None:
            return replace(
                diagnosis,
                micro_batch=number,
                micro_batches=failed.kept.passes,
                scale=failed.scale,
            )
    return None


def diagnose_loss(loss: KeptLoss, step: int) -> Diagnosis | None:
    """Return the operation that made a loss, or its gradient, non-finite, as far as the graph of the loss shows it."""
    source = source_in(loss)
    if source is None:
        return None
    reasons = [LINE_HINT]
    if loss.has_model:
        reasons.append(_HAS_MODEL)
    return replace(
        _with_loss(source.diagnosis, loss),
        certainty="partial",
        reasons=tuple(reasons),
        step=step,
        rank=_dist.rank(),
    )


def _with_loss(diagnosis: Diagnosis, loss: KeptLoss) -> Diagnosis:
    names = tuple(node.name for node in loss.nodes)
    value = None
    if loss.value is not None:
        value = float(loss.value)
    return replace(diagnosis, loss=value, loss_nodes=names)


def _to_blame(replayed: Replayed, failed: FailedStep) -> NonfiniteSource | None:
    blamed = []
    if replayed.error is not None:
        blamed = [source for kind, source in replayed.outputs.values() if kind == "NaN"]
    for name, source in replayed.gradients.items():
        # The gradient of an input goes back to another call.
        if not failed.bad or name in failed.bad or name.startswith(INPUT):
            blamed.append(source)
    if any(source.is_outside for source in blamed):
        # A non-finite output may have made the loss non-finite, and so the gradient that came back.
        is_by_loss = _loss_of(replayed.call, failed)[2] is not None
        for path, (kind, source) in replayed.outputs.items():
            # The script may have meant an infinity of which the loss made NaN.
            if path in replayed.returned and (kind == "NaN" or not is_by_loss):
                blamed.append(source)
    blamed = [source for source in blamed if not source.intended]
    if not blamed:
        # A trap on modules can trip without a non-finite gradient.
        blamed = [replayed.modules[name] for name in replayed.modules if name in failed.modules]
    return min(blamed, key=lambda source: source.when, default=None)


def _doubts_of_outputs(replayed: Replayed, failed: FailedStep) -> Iterator[str]:
    if replayed.compared & {"near", "other"}:
        if failed.kept.updated:
            yield _UPDATED
        elif not failed.written:
            yield _CLOSE
    elif "equal" not in replayed.compared and not _has_moved_alike(replayed, failed):
        yield _NOTHING_FINITE


def _doubts(replayed: Replayed, source: NonfiniteSource, failed: FailedStep) -> Iterator[str]:
    why = source.diagnosis.cause
    yield from _doubts_of_outputs(replayed, failed)
    if source.is_outside:
        number, loss, _ = _loss_of(replayed.call, failed, source.diagnosis.rows)
        yield LINE_HINT if number else _SEVERAL
        if loss is not None and any(node.is_unread for node in loss.nodes):
            yield _UNREAD
    if source.diagnosis.where == "unknown":
        yield _UNSEEN
    for rival in source.rivals[:1]:
        places = [rival.diagnosis.operation, *map(str, rival.diagnosis.lines[-1:])]
        yield f"{' at '.join(places)} made an infinity at the same elements, and may be the cause instead"
    infinite = [made for kind, made in replayed.outputs.values() if kind != "NaN"]
    # Nobody means a number that is too large for its format.
    is_overflow = why is not None and why.fault == "overflow"
    if replayed.returned and source in infinite and not is_overflow:
        yield _INFINITE
    if replayed.call.compiled:
        yield _COMPILED
    if failed.rested:
        yield f"rules that edit tensors of modules did not act in the replay: {', '.join(failed.rested)}"


def _has_moved_alike(replayed: Replayed, failed: FailedStep) -> bool:
    """Tell whether the replay changed a buffer as the call did."""
    call = replayed.call
    if replayed.error is not None:
        return False
    # The next call of the module kept its buffers; without a next call, the module or the bundle has them.
    last = {**dict(failed.called[call.name].named_buffers()), **call.weights}
    calls = [*failed.kept.calls, *failed.kept.later]
    for later in reversed(calls[calls.index(call) + 1 :]):
        if later.name == call.name:
            last.update(later.buffers)
    for name, before in call.buffers.items():
        after = replayed.buffers[name]
        # A counter of calls would be equal after any call.
        if after.is_floating_point() and before.shape == after.shape == last[name].shape:
            changed = (after != before) & after.isfinite()
            if bool(changed.any()) and torch.equal(after[changed], last[name][changed]):
                return True
    return False


def _loss_of(
    call: KeptCall, failed: FailedStep, rows: Rows | None = None
) -> tuple[int, KeptLoss | None, NonfiniteSource | None]:
    """Return the pass whose loss shows a source, with both; of several passes without one nothing, as each may be to blame."""
    for number in call.numbers:
        loss = failed.kept.losses.get(number)
        source = None
        if loss is not None:
            source = source_in(loss, rows)
        if source is not None or len(call.numbers) == 1:
            return number, loss, source
    return 0, None, None


def _diagnosis_of(
    call: KeptCall, source: NonfiniteSource, failed: FailedStep, reasons: Sequence[str]
) -> Diagnosis:
    diagnosis = source.diagnosis
    number = call.number
    if source.is_outside:
        number, loss, of_loss = _loss_of(call, failed, diagnosis.rows)
        if of_loss is not None:
            diagnosis = of_loss.diagnosis
        if loss is not None:
            diagnosis = _with_loss(diagnosis, loss)
    if diagnosis.where == "input":
        diagnosis = replace(diagnosis, module=ROOT, module_type=type(call.module()).__name__)
        rows = diagnosis.rows
        if rows is not None:
            diagnosis = replace(diagnosis, rows=_from_samples(rows, rows.rows, call))
    name = diagnosis.name
    if diagnosis.where in ("weight", "buffer"):
        name = call.prefix + name
    module = diagnosis.module
    if module == ROOT:
        module = call.name
    elif module:
        module = call.prefix + module
    return replace(
        diagnosis,
        certainty="partial" if reasons else "reproduced",
        reasons=tuple(reasons),
        step=failed.step,
        rank=failed.rank,
        micro_batch=number,
        micro_batches=failed.kept.passes,
        module=module,
        name=name,
        scale=failed.scale,
    )
