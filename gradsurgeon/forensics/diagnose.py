"""From the kept calls of a step to a diagnosis: all calls are replayed, and the earliest source is judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from gradsurgeon import _dist, _torch
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.distributed import fully_shard
from gradsurgeon.forensics.cause import cause_of
from gradsurgeon.forensics.kept_calls import MAX_BYTES
from gradsurgeon.forensics.kept_step import FailedStep, KeptCall
from gradsurgeon.forensics.loss import birth_in
from gradsurgeon.forensics.replay import INPUT, Replayed, replay
from gradsurgeon.forensics.sources import Birth, Origin, Source, is_intended
from gradsurgeon.tensors.structure import tensors_in

_NO_CALL = (
    "no call of the model was kept: the script calls parts of the model by itself, or the model is compiled: then apply "
    "the rules to the module that torch.compile returned"
)
_TOO_LARGE = (
    f"{{}} of the calls of this step were not kept: the tensors exceed {MAX_BYTES // 2**20} MiB"
)
_DIFFERENT = (
    "the replay returned other outputs than the call: state in Python has changed, an input was written to, the model "
    "uses random numbers from elsewhere, or the machine made an error"
)
_CLOSE = (
    "the replay differs from the call in the last digits (an operation is not deterministic), or the script has "
    "written into the output, which can then not be compared"
)
_UPDATED = (
    "another optimizer has updated weights since the call, and the replay used the new weights: its outputs differ and "
    "cannot be compared"
)
_NOTHING_FINITE = (
    "the call returned no finite number to compare the replay with: anything that ends in NaN looks alike, such as a "
    "replay after state in Python has changed"
)
_FINITE = (
    "all gradients are finite in the replay: the script changed them after backward, made them without the forward pass "
    "of the model or by `torch.autograd.grad` (a gradient penalty), or the model uses random numbers from elsewhere, or "
    "the machine made an error"
)
_ITERATOR = (
    "the model was given an iterator ({}), which a replay would use up for the training: give the model the items of "
    "the iterator instead"
)
_LEFT = (
    "the replay changed an object and could not put it back, so the training goes on with it: {}"
)
_LONGEST = 300
_DIVIDED = (
    "the parameters are divided over ranks, which would have to run the step again together: they do so with "
    "`fully_shard`, but not with the older FSDP or with tensor parallelism"
)
_ALONE = (
    "the parameters are divided over ranks, which run a step again together only if a rule makes them agree on it: "
    "`then: raise` or `skip-step`, and not while rules only observe"
)
_FINITE_HERE = "all gradients that this rank contributes are finite in the replay"
_OUTSIDE = (
    "the loss is computed outside of the model and cannot be run again: only its graph is known"
)
_OTHERS = (
    "the replay has non-finite gradients in other parameters than the update: the script, or a hook of it, has changed "
    "gradients by itself"
)
_UNSEEN = "no operation that PyTorch shows has made it"
_INFINITE = (
    "the output of the model is infinite there, not NaN, and the script may mean that: the loss is computed outside and "
    "cannot be run again"
)
_COMPILED = "the model was compiled, and the replay ran it without the compiler"
_WRITTEN = "an input was written to after the call"


def diagnose(
    failed: FailedStep, doubts: Sequence[str] = (), *, debugger: bool = False
) -> Diagnosis:
    """Replay the calls of a step, and return where and why a number became non-finite. Waits for the device.

    Args:
        failed: the step.
        doubts: reasons that make any result less certain.
        debugger: open `pdb` at the operation.
    """
    blank = Diagnosis("not reproduced", (), failed.step, failed.rank)
    cut: tuple[str, ...] = ()
    if failed.problem:
        cut = (f"a call of the model could not be kept: {failed.problem}",)
    elif failed.dropped:
        cut = (_TOO_LARGE.format(failed.dropped),)
    if not failed.calls:
        return replace(blank, reasons=cut or (_NO_CALL,))
    modules = [module for call in failed.calls if (module := call.module()) is not None]
    if not failed.together and any(map(fully_shard.casts, modules)):
        return replace(blank, reasons=(_ALONE,))
    if any(_dist.is_divided(param) for module in modules for param in module.parameters()):
        return replace(blank, reasons=(_DIVIDED,))
    reasons = [*cut, *doubts]
    blamed = _search(failed, reasons)
    if blamed is None:
        finite = _FINITE_HERE if failed.together else _FINITE
        return replace(blank, reasons=tuple(dict.fromkeys(reasons)) or (finite,))
    replayed, source = blamed
    if debugger and isinstance(source, Birth):
        replay(replayed.call, stop_at=source.when)
    reasons += _doubts(replayed, source, failed)
    return _told(replayed.call, source, replace(blank, reasons=tuple(reasons)), failed)


def _search(failed: FailedStep, reasons: list[str]) -> tuple[Replayed, Source] | None:
    """Replay calls until one is to blame; add to ``reasons`` why others show nothing."""
    outside: tuple[Replayed, Source] | None = None
    for call in failed.calls:
        replayed = replay(call)
        reasons += [_LEFT.format(_shortened(what)) for what in replayed.left]
        if (problem := _problem(replayed, failed)) is not None:
            reasons.append(problem)
        elif (source := _to_blame(replayed, failed)) is None:
            if replayed.sources and failed.bad:
                reasons.append(_OTHERS)
        elif not _is_from_outside(source):
            return replayed, source
        elif outside is None:
            # Another call may have sent the gradient back.
            outside = replayed, source
    return outside


def _problem(replayed: Replayed, failed: FailedStep) -> str | None:
    """Return why a replay shows nothing about the call, ``None`` if it does."""
    if replayed.call.iterators:
        return _ITERATOR.format(", ".join(replayed.call.iterators))
    error = replayed.error
    if error is not None:
        return f"the replay raised {type(error).__name__}: {_shortened(str(error))}"
    return None if failed.updated or all(replayed.differs.values()) else _DIFFERENT


def _shortened(text: str) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _to_blame(replayed: Replayed, failed: FailedStep) -> Source | None:
    """Return the earliest source of the non-finite gradients, or of the tensors of watched modules."""
    blamed = [
        source
        for name, source in replayed.sources.items()
        # The gradient of an input goes back to another call.
        if (not failed.bad or name in failed.bad or name.startswith(INPUT))
        and not is_intended(source)
    ]
    if any(map(_is_from_outside, blamed)):
        # A non-finite output may have made the loss non-finite, and so the gradient that came back.
        blamed += [
            source
            for path, (kind, source) in replayed.outputs.items()
            if path in replayed.grads
            and not is_intended(source)
            and (kind == "NaN" or not _made_by_loss(replayed.call, failed))
        ]
    if not blamed:
        # A trap on modules can trip without a non-finite gradient.
        blamed = [s for name, s in replayed.modules.items() if name in failed.modules]
    return min(blamed, key=lambda source: source.when, default=None)


def _is_from_outside(source: Source) -> bool:
    return isinstance(source, Origin) and source.what == "output gradient"


def _made_by_loss(call: KeptCall, failed: FailedStep) -> bool:
    """Tell whether a loss outside of the model made NaN of an infinity that the script may have meant."""
    loss = failed.losses.get(call.number)
    birth = None if loss is None else birth_in(loss)
    return isinstance(birth, Birth) and birth.repeated


def _doubts(replayed: Replayed, source: Source, failed: FailedStep) -> Iterator[str]:
    call = replayed.call
    if replayed.differs:
        yield _UPDATED if failed.updated else _CLOSE
    elif not (replayed.is_compared or _has_moved_alike(replayed, failed)):
        yield _NOTHING_FINITE
    written = {path: _torch.writes(tensor) for path, tensor in tensors_in([call.args, call.kwargs])}
    if call.written and written != call.written:
        yield _WRITTEN
    if _is_from_outside(source):
        yield _OUTSIDE
    if isinstance(source, Origin) and source.what == "unknown":
        yield _UNSEEN
    if isinstance(source, Birth) and source.rival:
        yield f"{source.rival} made an infinity at the same elements, and may be the cause instead"
    infinite = any(kind != "NaN" and one is source for kind, one in replayed.outputs.values())
    # Nobody means a number that is too large for its format.
    if replayed.grads and infinite and cause_of(source).fault != "overflow":
        yield _INFINITE
    if call.compiled:
        yield _COMPILED
    if failed.rested:
        yield f"rules that edit tensors of modules did not act in the replay: {', '.join(failed.rested)}"


def _has_moved_alike(replayed: Replayed, failed: FailedStep) -> bool:
    """Tell whether the replay changed a buffer to the same finite numbers as the call."""
    call, module = replayed.call, replayed.call.module()
    if module is None:
        return False
    later = failed.calls[failed.calls.index(call) + 1 :]
    following = next((one for one in later if one.name == call.name), None)
    then = {**dict(module.named_buffers()), **call.weights}
    then |= {} if following is None else dict(following.buffers.items())
    for name, (before, after) in replayed.moved.items():
        # A counter of calls would be equal after any call.
        if after.is_floating_point() and after.shape == before.shape == then[name].shape:
            changed = (after != before) & after.isfinite()
            if bool(changed.any()) and torch.equal(after[changed], then[name][changed]):
                return True
    return False


def _told(call: KeptCall, source: Source, blank: Diagnosis, failed: FailedStep) -> Diagnosis:
    """Return a diagnosis that blames a source."""
    loss = failed.losses.get(call.number) if _is_from_outside(source) else None
    if loss is not None and (told := birth_in(loss)) is not None:
        source = told
    diagnosis = replace(
        blank,
        certainty="partial" if blank.reasons else "reproduced",
        micro_batch=call.number,
        micro_batches=failed.passes,
        scale=None if failed.scale is None else float(failed.scale),
        cause=cause_of(source, failed.step),
        loss=None if loss is None or loss.value is None else float(loss.value),
        loss_nodes=() if loss is None else tuple(node.name for node in loss.nodes),
        lines=source.lines,
    )
    if isinstance(source, Birth):
        module = source.module
        if module and call.prefix:
            module = call.name if module == "." else call.prefix + module
        return replace(
            diagnosis,
            what=source.kind,
            where=source.direction,
            module=module,
            module_type=source.module_type,
            operation=source.operation,
            node=source.node,
            inputs=source.inputs,
            output=source.output,
            history=source.history,
        )
    called = call.module()
    if source.what == "input" and called is not None:
        diagnosis = replace(diagnosis, module=call.name, module_type=type(called).__name__)
    return replace(
        diagnosis,
        what="" if source.facts is None else source.facts.kind,
        where=source.what,
        name=call.prefix + source.name if source.what in ("weight", "buffer") else source.name,
        output=source.facts,
    )
