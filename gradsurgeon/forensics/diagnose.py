"""From the kept calls of a step to a diagnosis: all are replayed, the earliest source is judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from gradsurgeon import _dist, _torch
from gradsurgeon.diagnosis import Diagnosis
from gradsurgeon.distributed import fully_shard
from gradsurgeon.forensics.cause import judge
from gradsurgeon.forensics.kept_calls import MAX_BYTES
from gradsurgeon.forensics.kept_step import FailedStep, Fingerprint
from gradsurgeon.forensics.loss import birth_in
from gradsurgeon.forensics.replay import INPUT, Replayed, replay, spelled_input
from gradsurgeon.forensics.sources import Birth, Origin, Source, is_intended
from gradsurgeon.planning import ROOT
from gradsurgeon.tensors.structure import tensors_in

_NO_CALL = (
    "no call of the model was kept: the script drives it through its parts, or it is compiled: then apply the rules "
    "to what torch.compile has returned"
)
_TOO_LARGE = f"{{}} of the calls of this step were not kept, whose tensors are beyond {MAX_BYTES // 2**20} MiB"
_DIFFERENT = (
    "what came out of the replay is not what had come out of the call: its state in Python has moved on, an "
    "input was written to, or it takes random numbers from elsewhere"
)
_CLOSE = (
    "the replay differs from the call in its last digits (an operation in it is not deterministic), or the "
    "script has written into what came out, so that it cannot be compared"
)
_UPDATED = (
    "another optimizer has updated weights since the call, and it was run again with those: what came out is not "
    "the same, and cannot be compared"
)
_NOTHING_FINITE = (
    "nothing finite has come out of the call that the replay could be compared with: whatever ends in NaN looks "
    "alike, such as a replay whose state in Python has moved on"
)
_FINITE = (
    "all gradients are finite in the replay: the script has changed them after backward or made them without the "
    "forward pass of the model, it takes random numbers from elsewhere, or it was a fault of the machine"
)
_DIFFERENTIATED = (
    "the script took gradients of the model with create_graph=True, as for a gradient penalty, and what goes back "
    "through these (double backward) cannot be run again: look at the penalty, such as at the root of a norm of 0"
)
_FINITE_NOW = (
    "what came out of the call was not finite, and in the replay it is: a fault of the machine, a race, or state "
    "in Python that has moved on"
)
_ITERATOR = (
    "the model was given an iterator ({}): to run the call again would take from it what the training is to get. "
    "Give the model what the iterator yields"
)
_LEFT = "the replay has changed what could not be put back, and the training goes on with it: {}"
_LONGEST = 300
_DIVIDED = (
    "the parameters are divided over ranks, which would have to run the step again together: they do so where "
    "`fully_shard` divides them, not where the older FSDP or tensor parallelism does"
)
_ALONE = (
    "the parameters are divided over ranks, which run a step again together only where a rule makes them agree "
    "on it: `then: raise` or `skip-step`, and not while they only observe"
)
_FINITE_HERE = "all gradients that this rank contributes are finite in the replay"
_OUTSIDE = "the loss is computed outside of the model, and cannot be run again: only what its graph has kept is known"
_OTHERS = (
    "in the replay the gradients of other parameters are not finite than at the update: the script, or a hook of it, "
    "has changed gradients by itself"
)
_UNSEEN = "no operation that PyTorch shows has made it"
_INFINITE = (
    "what came out of the model is infinite there, not NaN, and can be meant so: the loss, which is computed "
    "outside, cannot be run again"
)
_COMPILED = "the model was compiled, and has been run again without that"
_WRITTEN = "an input was written to after the call"


def diagnose(
    failed: FailedStep, doubts: Sequence[str] = (), *, debugger: bool = False
) -> Diagnosis:
    """Replay the calls of a step and tell where what is not finite was born. Waits for the device.

    Args:
        failed: the step.
        doubts: what makes any result less certain.
        debugger: stand in `pdb` at the birth.
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
        if any(call.differentiated for call in failed.calls):
            finite = _DIFFERENTIATED
        return replace(blank, reasons=tuple(dict.fromkeys(reasons)) or (finite,))
    replayed, source = blamed
    if debugger and isinstance(source, Birth):
        replay(replayed.call, stop_at=source.when)
    reasons += _doubts(replayed, source, failed)
    return _told(replayed, source, replace(blank, reasons=tuple(reasons)), failed)


def _search(failed: FailedStep, reasons: list[str]) -> tuple[Replayed, Source] | None:
    """Replay the calls until one is to blame; note why others say nothing."""
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
            return _followed(replayed, source, failed)
        elif outside is None:
            # Another call may have sent it back.
            outside = replayed, source
    return outside


def _followed(replayed: Replayed, source: Source, failed: FailedStep) -> tuple[Replayed, Source]:
    """Go from an input that was not finite to the earlier call of the step that it came out of, if there is one."""
    if not (isinstance(source, Origin) and source.what == "input"):
        return replayed, source
    given = [
        Fingerprint.of(tensor)
        for path, tensor in tensors_in([replayed.call.args, replayed.call.kwargs])
        if spelled_input(replayed.call, path) == source.name
    ]
    for call in failed.calls[: failed.calls.index(replayed.call)]:
        for path, kept in call.outputs.items():
            if any(map(kept.is_like, given)) and path in (earlier := replay(call)).outputs:
                _, before = earlier.outputs[path]
                if not is_intended(before) and _problem(earlier, failed) is None:
                    return _followed(earlier, before, failed)
    return replayed, source


def _problem(replayed: Replayed, failed: FailedStep) -> str | None:
    """Return why a replay says nothing of the call, ``None`` where it does."""
    if replayed.call.iterators:
        return _ITERATOR.format(", ".join(replayed.call.iterators))
    error = replayed.error
    if error is not None:
        return f"the replay raised {type(error).__name__}: {_shortened(str(error))}"
    if failed.updated or all(replayed.differs.values()):
        return None
    for path, close in replayed.differs.items():
        if not close and path not in replayed.outputs:
            sample = replayed.call.outputs[path].sample
            if sample.is_floating_point() and not bool(sample.isfinite().all()):
                return _FINITE_NOW
    return _DIFFERENT


def _shortened(text: str) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _to_blame(replayed: Replayed, failed: FailedStep) -> Source | None:
    """Return what is to blame: what led to the gradients that are not finite, or to what the trap watched."""
    bad = {
        name: source
        for name, source in replayed.sources.items()
        # The gradient of an input goes back to another call.
        if not failed.bad or name in failed.bad or name.startswith(INPUT)
    }
    blamed = [source for source in bad.values() if not is_intended(source)]
    if any(map(_is_from_outside, blamed)):
        # A loss that is not finite because the output was not has come back as a gradient.
        blamed += [
            source
            for path, (kind, source) in replayed.outputs.items()
            if path in replayed.grads
            and not is_intended(source)
            and (kind == "NaN" or not _made_by_loss(replayed, failed))
        ]
    if not blamed:
        # A trap on modules need not have spoiled a gradient.
        blamed = [s for name, s in replayed.modules.items() if name in failed.modules]
    return min(blamed, key=lambda source: source.when, default=None)


def _is_from_outside(source: Source) -> bool:
    return isinstance(source, Origin) and source.what == "output gradient"


def _made_by_loss(replayed: Replayed, failed: FailedStep) -> bool:
    """Tell whether a loss outside of the model has made a NaN of what may be infinite on purpose."""
    loss = failed.losses.get(replayed.call.number)
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
    infinite = any(kind != "NaN" and one is source for kind, one in replayed.outputs.values())
    # What is too large for its format is never meant.
    if replayed.grads and infinite and judge(source).fault != "overflow":
        yield _INFINITE
    if call.compiled:
        yield _COMPILED
    if failed.rested:
        yield f"rules that edit what passes through modules rested in the replay: {', '.join(failed.rested)}"


def _has_moved_alike(replayed: Replayed, failed: FailedStep) -> bool:
    """Tell whether the replay has brought a buffer from finite numbers to those that the call had brought it to."""
    call, module = replayed.call, replayed.call.module()
    if module is None:
        return False
    later = failed.calls[failed.calls.index(call) + 1 :]
    following = next((one for one in later if one.name == call.name), None)
    then = {**dict(module.named_buffers()), **call.weights}
    then |= {} if following is None else dict(following.buffers.items())
    for name, (before, after) in replayed.moved.items():
        # A count of calls is the same for each of them.
        if after.is_floating_point() and after.shape == before.shape == then[name].shape:
            changed = (after != before) & after.isfinite()
            if bool(changed.any()) and torch.equal(after[changed], then[name][changed]):
                return True
    return False


def _told(replayed: Replayed, source: Source, blank: Diagnosis, failed: FailedStep) -> Diagnosis:
    call = replayed.call
    loss = failed.losses.get(call.number) if _is_from_outside(source) else None
    if loss is not None and (told := birth_in(loss)) is not None:
        source = told
    diagnosis = replace(
        blank,
        certainty="partial" if blank.reasons else "reproduced",
        micro_batch=call.number,
        micro_batches=failed.passes,
        scale=None if failed.scale is None else float(failed.scale),
        cause=judge(source, failed.step),
        loss=None if loss is None or loss.value is None else float(loss.value),
        loss_nodes=() if loss is None else tuple(node.name for node in loss.nodes),
    )
    prefix = "" if call.name == ROOT else f"{call.name}."
    if isinstance(source, Birth):
        return replace(
            diagnosis,
            what=source.kind,
            where=source.direction,
            module=_inside(prefix, source.module),
            module_type=source.module_type,
            operation=source.operation,
            node=source.node,
            lines=source.lines,
            inputs=source.inputs,
            output=source.output,
            history=source.history,
        )
    facts = source.facts
    if source.what == "input" and (module := call.module()) is not None:
        diagnosis = replace(diagnosis, module=call.name, module_type=type(module).__name__)
    return replace(
        diagnosis,
        what="" if facts is None else facts.kind,
        where=source.what,
        name=prefix + source.name if source.what in ("weight", "buffer") else source.name,
        output=facts,
        lines=source.lines,
    )


def _inside(prefix: str, module: str) -> str:
    if not module or not prefix:
        return module
    return prefix.removesuffix(".") if module == "." else prefix + module
