"""The public functions: only this module joins the stages from rule text to session."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Literal, cast

from gradsurgeon.actions import Rule
from gradsurgeon.common import _arguments, _live
from gradsurgeon.errors import BindError, GradSurgeonError, printable
from gradsurgeon.language import packs, planning, schema, source
from gradsurgeon.language.planning import Manifest, Plan
from gradsurgeon.language.planning.run_json import describe
from gradsurgeon.language.schema import RuleSet

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from gradsurgeon.common.diagnosis import Diagnosis
    from gradsurgeon.common.events import Event
    from gradsurgeon.records.delivery import Delivery
    from gradsurgeon.records.store.writer import RunWriter
    from gradsurgeon.report.run import Run
    from gradsurgeon.runtime import Attachment, SessionOptions
    from gradsurgeon.runtime.session import Session
    from gradsurgeon.sinks.sink import Sink

Rules = str | os.PathLike[str] | dict[str, Any] | RuleSet | Sequence[Rule]


def load(rules: Rules) -> RuleSet:
    """Read and validate rules. Needs no torch.

    Args:
        rules: the path of a rule file; the name of a pack, such as ``gradsurgeon:debug@1``; the text of a rule file,
            recognised by its line breaks; the same content as a dict; a list of rules built in Python; or a `RuleSet`,
            which is returned unchanged.

    Raises:
        RuleFileError: the rules are not valid; the error lists every problem with its place.
    """
    if isinstance(rules, RuleSet):
        return rules
    with _live.uncollected():
        if isinstance(rules, dict):
            return schema.validate(schema.Built(rules))
        if isinstance(rules, str) and "\n" in rules:
            return schema.validate(source.parse(rules))
        if isinstance(rules, str) and rules.startswith(packs.PREFIX):
            return schema.validate(schema.pack(rules))
        if isinstance(rules, str | os.PathLike):
            return schema.validate(source.read(rules))
        if isinstance(rules, list | tuple) and all(isinstance(rule, Rule) for rule in rules):
            return schema.from_rules(rules)
    raise TypeError(
        "rules are a path, a text, a RuleSet, a list of rules built in Python alone, or the whole file as a dict "
        f'{{"version": 1, "rules": [...]}}, not {type(rules).__name__}'
    )


def plan(model_or_manifest: nn.Module | Manifest, rules: Rules) -> Plan:
    """Bind rules to the names of a model without touching it.

    Args:
        model_or_manifest: a module on any device, including ``meta``, or the manifest of one.
        rules: any input of `load`.

    Raises:
        RuleFileError: the rules are not valid.
        BindError: rules match nothing or cannot act on their matches; the error lists all of them.
    """
    rule_set = load(rules)
    if isinstance(model_or_manifest, Manifest):
        return planning.bind(rule_set, model_or_manifest)
    return planning.bind(rule_set, planning.from_model(model_or_manifest))


def apply(
    model: nn.Module,
    rules: Rules,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: GradScaler | None = None,
    record: str | os.PathLike[str] | None = None,
    mode: Literal["act", "observe"] = "act",
    start_step: int = 0,
    replace: bool = False,
    sinks: Sequence[Sink] = (),
    on_event: Callable[[Event], object] | None = None,
    params: str | os.PathLike[str] | None = None,
) -> Session:
    """Attach rules to a model. A call that fails changes nothing.

    The rules stay bound to the tensors that the plan shows. A parameter that is replaced before the first update comes
    under its rules; on one that is replaced later no rule acts. A module that replaces another under its name comes under
    its rules. A warning names each, and new parameters and modules that a rule would match: apply the rules again with
    ``replace=True``. Lazy modules must have seen an input before. Copies of the model and saved models carry no rules.

    Rules on parameters act in training only: they do not change the results of `torch.autograd.grad`
    and `torch.func`. Rules on modules act wherever the modules run, except in transforms of
    `torch.func`, where they skip all tensors, with a warning.

    Args:
        model: the module whose parameters the rules name.
        rules: any input of `load`.
        optimizer: the optimizer or optimizers that update the model. By default gradsurgeon finds them.
            An empty list declares that the script updates the weights by hand, with `Session.tick`.
        scaler: the gradient scaler in use. By default gradsurgeon finds it. It cannot know a loss that the
            script multiplies by hand: rules at `backward` and `accumulated` see its gradients as they are.
        record: the run directory for the records. By default they stay in memory, up to 64 MiB: a step uses
            160 bytes per rule and statistic, and 4 more per tensor. At the limit new records replace the oldest,
            and an event reports it.
        mode: ``"act"``, or ``"observe"`` to arm every rule, edit nothing, and count the changes that each rule
            would have made.
        start_step: the number of the first update, if training resumes.
        replace: whether to replace the model's existing session, if any.
        sinks: trackers that receive aggregates and all events during training, such as
            `sinks.TensorBoard("runs/today")`. They receive the aggregates of each step, or in fast training the worst
            of every few steps; see `gradsurgeon.sinks`. If there are several ranks, rank 0 sends.
        on_event: called with each event, on the thread that saw it. Its exceptions are logged, and training goes on.
        params: the names of the model with which the rules were reviewed, as `gradsurgeon params` writes them.

    Returns:
        The session. It is a context manager that removes the rules at its end.

    Raises:
        RuleFileError: the rules are not valid.
        BindError: rules match nothing or cannot act on their matches, or the model is not that of ``params``.
        RecordError: the run directory cannot be written, or holds a run already.
        GradSurgeonError: the model already has a session, or PyTorch is missing.
    """
    _arguments.check_options(scaler, mode, start_step, on_event)
    optimizers = _arguments.optimizers_of(optimizer)
    bound = _bound(model, rules)
    planning.check_reviewed(bound.manifest, params)
    options = _runtime().SessionOptions(optimizers, scaler, mode, start_step, on_event=on_event)
    attachment = attach(model, bound, options, record=record, sinks=sinks, replace=replace)
    from gradsurgeon.runtime.session import Session  # noqa: PLC0415 # needs torch

    return Session(attachment)


def _bound(model: nn.Module, rules: Rules) -> Plan:
    """Bind rules to the model of this rank; a rule may match only on another rank."""
    _runtime()  # binding needs torch
    from gradsurgeon.distributed import session_discovery  # noqa: PLC0415 # the same
    from gradsurgeon.tensors import _dist  # noqa: PLC0415 # needs torch

    if _dist.world() == 1:
        return plan(model, rules)
    rule_set = load(rules)
    bound = planning.bind(rule_set, planning.from_model(model), alone=False)
    errors, elsewhere = session_discovery.lacking(rule_set, {bound.subject: bound}, alone=True)
    if errors:
        raise BindError(errors)
    return dataclasses.replace(bound, elsewhere=elsewhere)


@_live.uncollected()
def attach(
    model: nn.Module,
    bound: Plan,
    options: SessionOptions,
    *,
    record: str | os.PathLike[str] | None = None,
    sinks: Sequence[Sink] = (),
    title: str = "",
    replace: bool = False,
) -> Attachment:
    """Attach a plan to its model, as `apply` does once it has bound the rules."""
    runtime = _runtime()
    if not (options.beside or replace) and runtime.applied_to(model):
        raise GradSurgeonError(
            "rules are already applied to this model or its modules: call gradsurgeon.remove(model) first, or pass replace=True"
        )
    with ExitStack() as undo:
        writer = None
        if record is not None:
            writer = _writer(model, record, bound, options)
            undo.callback(writer.discard)
        deliveries = _deliveries(sinks, bound, title)
        for delivery in deliveries:
            undo.callback(delivery.discard)
        attachment = runtime.Attachment(model, bound, options, writer, deliveries)
        log = attachment.context.event_log
        for delivery in deliveries:
            doubt = planning.curves_of_nothing(bound, delivery.patterns)
            if doubt:
                log.emit("notice", f"{delivery.name}: {doubt}", step=options.start_step, warn=True)
        runtime.enter(model, attachment)
        undo.pop_all()
    for delivery in deliveries:
        delivery.begin()
    return cast("Attachment", attachment)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run directory for reading, even while it is being written. Needs no torch.

    Args:
        path: the directory given as ``record=``.

    Raises:
        RecordError: the directory holds no run, or its files are damaged or have another format.
    """
    from gradsurgeon.report import run  # noqa: PLC0415 # other functions work without SQLite

    return run.open_run(path)


def remove(model: nn.Module) -> None:
    """Remove the rules from a model without a trace; also rules from a container that is gone. No rules: no effect."""
    for attachment in _runtime().applied_to(model):
        attachment.end()


def tag(tensor: Tensor, name: str) -> Tensor:
    """Give a tensor in the middle of a forward pass a name that rules can match.

    The call costs nothing while no session is attached. Events of traps and spikes have the integers named ``sample_ids``.

    Args:
        tensor: any tensor, of any shape and dtype.
        name: the name that `tensors:` in a rule is matched against.

    Returns:
        The same tensor. If a rule edits it, a tensor with another value; if a rule acts on the gradient of a leaf, a
        view of it.
    """
    registry = sys.modules.get("gradsurgeon.runtime.registry")
    if registry is None:
        return tensor
    return cast("Tensor", registry.tag(tensor, name))


def backward(losses: Mapping[str, Tensor], *, scaler: GradScaler | None = None) -> None:
    """Run one backward pass of several named losses, instead of ``(seg + depth).backward()``.

    Without a rule on losses the two calls are identical, bit for bit. The actions `conflict` and `combine` see the gradient of
    each loss separately, in all models that have a session. Gradients accumulate as usual; each call combines separately.

    Args:
        losses: the losses by name, each with one element. The script applies its own weights (``{"seg": 0.3 * seg}``).
            A loss that reaches no parameter, or needs no gradient, takes part as in a sum.
        scaler: the scaler of the script, which then multiplies the losses, as in ``scaler.scale(seg + depth).backward()``.

    Raises:
        TypeError: the losses are not a mapping of names to tensors.
        ValueError: there is no loss, or one has several elements.
        GradSurgeonError: the gradients of single losses are not available; the text says why, and what to do.
    """
    _arguments.check_scaler(scaler)
    _runtime().backward(losses, scaler)


# Code compiled before the first session must not trace the import. Without torch there is no public name.
backward._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001


def replay(
    bundle: str | os.PathLike[str], model: nn.Module, *, debugger: bool = False
) -> Diagnosis:
    """Run a step again that a trap has stopped, from its bundle, and report where it went wrong.

    Args:
        bundle: the directory that the report of the trap names.
        model: the same model, built anew. The replay uses the weights and buffers of the bundle, and leaves the model
            unchanged. It may be on another device.
        debugger: stop in `pdb` where the first non-finite value arose, with the tensors in scope.

    Returns:
        The result of the replay, as in the report of the trap.

    Raises:
        GradSurgeonError: the directory is not a bundle, or not a bundle of this model.
    """
    runtime = _runtime()
    from gradsurgeon import forensics  # noqa: PLC0415 # needs torch

    planning.from_model(model)  # reports an argument that is no module
    failed, doubts = forensics.read(bundle, model)
    attachment = runtime.find(model)
    watch_tags: Any = nullcontext
    resting: Any = nullcontext()
    if attachment is not None:
        watch_tags = attachment.context.watching_tags
        resting = attachment.context.resting()
    with resting:
        try:
            return forensics.diagnose(failed, doubts, watch_tags=watch_tags, debugger=debugger)
        except Exception as error:
            # A bundle from elsewhere may contain anything.
            line = str(error).partition("\n")[0]
            why = f"cannot be diagnosed: {type(error).__name__}: {line[:200]}"
            raise GradSurgeonError(printable(f"{bundle} {why}")) from error


def _runtime() -> Any:
    try:
        from gradsurgeon import runtime  # noqa: PLC0415 # linting and planning must not need torch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        raise GradSurgeonError(
            "applying rules needs PyTorch, which is not installed: pip install 'gradsurgeon[torch]', or "
            "the build of torch that fits your machine"
        ) from error
    from gradsurgeon.tensors import _torch  # noqa: PLC0415 # as above

    # A graph that breaks at a rule on tags must not break a second time inside this call.
    _torch.compile_within_caller(tag)
    _torch.uncompiled(backward)
    return runtime


def _writer(
    model: nn.Module, record: str | os.PathLike[str], bound: Plan, options: SessionOptions
) -> RunWriter:
    import torch  # noqa: PLC0415 # a session exists, so torch is installed

    from gradsurgeon.distributed.ranks import Ranks  # noqa: PLC0415 # the same
    from gradsurgeon.records.store import writer  # noqa: PLC0415 # other functions work without SQLite
    from gradsurgeon.tensors import _dist  # noqa: PLC0415 # the same

    ranks = Ranks()
    if _dist.world() > 1:
        ranks = Ranks(lambda: list(model.parameters()))
    meta = describe(
        bound,
        mode=options.mode,
        start_step=options.start_step,
        torch=str(torch.__version__),
        ranks=_dist.world(),
        replicas=bool(ranks.wrappers()),
    )
    return writer.RunWriter(record, rank=_dist.rank(), meta=meta)


def _deliveries(sinks: Any, bound: Plan, title: str) -> list[Delivery]:
    from gradsurgeon.sinks.sink import check_sinks  # noqa: PLC0415 # only `apply` needs it

    check_sinks(sinks)
    if not sinks:
        return []
    from gradsurgeon.records.delivery import Delivery, opened  # noqa: PLC0415 # most sessions have none
    from gradsurgeon.tensors import _dist  # noqa: PLC0415 # needs torch, which is installed by now

    if _dist.rank():
        for sink in sinks:
            opened(sink)
        return []
    texts = {"rules": bound.rules.text, "plan": str(bound)}
    return [Delivery(sink, title=title, texts=texts) for sink in sinks]
