"""Runs the checks of a session: hands them the facts of passes and updates, and makes events of their findings."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from gradsurgeon import _dist, _live, _numbers
from gradsurgeon.actions import Examination
from gradsurgeon.checks.base import Check, Finding, Mail
from gradsurgeon.compiler import Stage
from gradsurgeon.errors import CheckError, shorten_names
from gradsurgeon.forensics.kept_calls import KeptCalls
from gradsurgeon.planning import slots
from gradsurgeon.runtime import optimizers
from gradsurgeon.runtime.context import Context
from gradsurgeon.runtime.due_rules import StepCounter
from gradsurgeon.runtime.gradients import Gradients
from gradsurgeon.runtime.replica_mail import replica_mail
from gradsurgeon.runtime.training_events import BackwardPass, Step
from gradsurgeon.tensors.backward_graph import BackwardGraph

# Modules that compute something else in evaluation mode.
_MODAL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)  # noqa: SLF001 # their public base classes
# Nodes between a loss and the operation that made it.
_PLAIN = {"MulBackward0", "DivBackward0", "AddBackward0", "SumBackward0", "ToCopyBackward0"}


class _Looked(Mapping[int, Tensor]):
    """Tensors that are looked up when they are asked for."""

    def __init__(self, tensors: Sequence[int], find: Callable[[int], Tensor | None]) -> None:
        self._tensors, self._find = tensors, find

    def __getitem__(self, tensor: int) -> Tensor:
        if (found := self._find(tensor)) is None:
            raise KeyError(tensor)
        return _dist.local(found.detach())

    def __contains__(self, tensor: object) -> bool:
        return isinstance(tensor, int) and self._find(tensor) is not None

    def __iter__(self) -> Iterator[int]:
        return (tensor for tensor in self._tensors if tensor in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class _Running:
    """The check of one rule."""

    stage: Stage
    check: Check
    raises: bool
    members: frozenset[int]
    # Whether it is due in each step; asked many times in a step.
    always: bool


@dataclass(eq=False)
class _Moment:
    checks: Checks
    running: _Running
    counter: StepCounter

    def __post_init__(self) -> None:
        # The counter goes on before values have arrived on the host.
        self.step = self.counter.step

    @cached_property
    def params(self) -> Mapping[int, Tensor]:
        return _Looked(self.running.stage.tensors, self._param)

    @cached_property
    def grads(self) -> Mapping[int, Tensor]:
        return _Looked(self.running.stage.tensors, self._grad)

    def _param(self, tensor: int) -> Tensor | None:
        return self.checks.context.parameters.param(tensor)

    def _grad(self, tensor: int) -> Tensor | None:
        param = self._param(tensor)
        return None if param is None else param.grad

    def tell(self, findings: Iterable[Finding]) -> None:
        if findings != ():
            self.checks.tell(self.running, self.step, findings)

    def later(self, values: Tensor, judge: Callable[[Tensor], Iterable[Finding]]) -> None:
        log = self.checks.context.event_log
        # Values travel flat.
        shape = values.shape
        log.when_read(values.detach(), lambda flat: self.tell(judge(flat.view(shape))))


@dataclass(eq=False)
class _Pass(_Moment):
    reached: Collection[int]
    graph: BackwardGraph | None

    @cached_property
    def tensors(self) -> Sequence[int]:
        reached = set(self.reached)
        return [tensor for tensor in self.running.stage.tensors if tensor in reached]

    @property
    def loss(self) -> Tensor | None:
        return None if self.graph is None else self.graph.loss

    @property
    def evaluated(self) -> bool | None:
        return self.checks.is_evaluated()

    @property
    def loss_made_by(self) -> str:
        return "" if self.graph is None else _maker(self.graph)

    def divisors(self) -> Sequence[Tensor]:
        nodes = () if self.graph is None else _last_nodes(self.graph)
        divisions = (node for node in nodes if node.name() == "DivBackward0")
        # The pass releases what its nodes have saved.
        with suppress(RuntimeError):
            saved = [node._saved_other for node in divisions]  # noqa: SLF001 # the only way to it
            return [other for other in saved if isinstance(other, Tensor) and other.numel() == 1]
        return ()

    def strangers(self) -> Sequence[Tensor]:
        if self.graph is None:
            return ()
        known = set(self.checks.context.parameters.ids())
        # Other leaves, such as points at which a derivative is taken, are inputs.
        leaves = (leaf for leaf in self.graph.leaves() if isinstance(leaf, nn.Parameter))
        return [leaf for leaf in leaves if id(leaf) not in known]

    def is_homeless(self, leaf: Tensor) -> bool:
        held = (module.parameters(recurse=False) for module in _live.instances(nn.Module))
        in_module = any(param is leaf for param in chain.from_iterable(held))
        return not in_module and not optimizers.owning([leaf])


@dataclass(eq=False)
class _Update(_Moment):
    tensors: Sequence[int]
    optimizer: Optimizer | None
    took_place: bool = True
    scale: float | None = None
    gradients: Gradients | None = None

    @property
    def owner(self) -> Hashable:
        return self.counter

    @property
    def kinds(self) -> Mapping[int, str]:
        return self.checks.kinds

    @property
    def mail(self) -> Mail | None:
        return self.checks.mail

    @property
    def apart(self) -> bool:
        return self.checks.is_configured_apart()

    @property
    def evaluations(self) -> int | None:
        return self.checks.evaluations

    def is_resting(self, tensor: int) -> bool:
        return self.checks.is_resting(tensor)

    def norms(self, tensors: Sequence[int]) -> Tensor:
        known = None if self.gradients is None else self.gradients.known_norms(tensors)
        return (
            _numbers.norms([self.grads[tensor] for tensor in tensors]) if known is None else known
        )

    @cached_property
    def groups(self) -> Mapping[int, Mapping[str, Any]]:
        found = self.optimizer.param_groups if self.optimizer is not None else ()
        return self._by_tensor({id(param): group for group in found for param in group["params"]})

    @cached_property
    def state(self) -> Mapping[int, Mapping[str, Any]]:
        found = self.optimizer.state if self.optimizer is not None else {}
        return self._by_tensor({id(param): state for param, state in found.items()})

    @property
    def frozen(self) -> Mapping[int, str]:
        context = self.checks.context
        freezes = context.program.freezes if context.mode == "act" else ()
        due = [stage for stage in freezes if stage.rule.steps.due(self.step)]
        return {tensor: stage.rule.id for stage in due for tensor in stage.tensors}

    def _by_tensor(self, by_id: Mapping[int, Any]) -> dict[int, Any]:
        params = self.checks.context.parameters.params(self.tensors)
        pairs = zip(self.tensors, params, strict=True)
        return {tensor: by_id[id(param)] for tensor, param in pairs if id(param) in by_id}


def _optimizer_of(step: Step) -> Optimizer | None:
    return step.optimizer() if isinstance(step, optimizers.Update) else None


def _carries_scale(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether a scaler is going to unscale the gradients of an optimizer itself."""
    states = scaler._per_optimizer_states  # noqa: SLF001 # no public name tells
    return states[id(optimizer)]["stage"] is OptState.READY


def _last_nodes(graph: BackwardGraph) -> Iterator[Any]:
    """Yield the nodes from a loss back to the operation that made it."""
    node: Any = graph.roots[0] if graph.roots else None
    while node is not None and not isinstance(node, Tensor):
        yield node
        going_on = node.next_functions if node.name() in _PLAIN else ()
        node = next((one for one, _ in going_on if one is not None), None)


def _maker(graph: BackwardGraph) -> str:
    """Return the operation that made the loss of a pass, such as ``nll_loss``."""
    *_, name = "", *(node.name() for node in _last_nodes(graph))
    words = re.findall(r"[A-Z][a-z0-9]*", re.sub(r"Backward\d*$", "", name))
    return "_".join(words).lower()


class Checks:
    """The checks of a session. Without any it does nothing."""

    def __init__(self, context: Context, model: nn.Module, kept: KeptCalls) -> None:
        self.context, self._kept = context, kept
        compiled = [(stage, stage.rule.compile()) for stage in context.program.checks]
        self._running = [
            _Running(
                stage,
                effect.check,
                effect.then == "raise",
                frozenset(stage.tensors),
                stage.rule.steps.always,
            )
            for stage, effect in compiled
            if isinstance(effect, Examination)
        ]
        # The checks that have a method of their own, by its name; all of them by no name.
        self._having = {"": self._running} | {
            name: [one for one in self._running if getattr(type(one.check), name) is not method]
            for name, method in vars(Check).items()
            if callable(method)
        }
        # The module that holds each parameter, and its class.
        self._holders: dict[int, weakref.ref[nn.Module]] = {}
        self.kinds: dict[int, str] = {}
        self._modal = weakref.WeakSet[nn.Module]()
        self._root = weakref.ref(model)
        self._told: set[tuple[str, str, Hashable]] = set()
        self._tensors: dict[tuple[str, StepCounter], tuple[int, Sequence[int]]] = {}
        self._mail: Mail | None = None
        if self._running:
            numbers = {name: number for number, name in enumerate(context.program.names)}
            found = [slot for slot in slots(model) if slot.name in numbers]
            self._holders = {numbers[slot.name]: weakref.ref(slot.owner) for slot in found}
            self.kinds = {numbers[slot.name]: type(slot.owner).__name__ for slot in found}
            self._modal.update(m for m in model.modules() if isinstance(m, _MODAL))
            self._mail = replica_mail(context)

    @property
    def mail(self) -> Mail | None:
        return self._mail if _dist.world() > 1 else None

    def before_pass(self, graph: BackwardGraph) -> None:
        for running, counter in self._due("before_pass"):
            moment = _Pass(self, running, counter, (), graph)
            moment.tell(running.check.before_pass(moment))

    def after_pass(self, done: BackwardPass) -> None:
        for running, counter in self._due("after_pass"):
            if not running.members.isdisjoint(done.tensors):
                moment = _Pass(self, running, counter, done.tensors, done.graph)
                moment.tell(running.check.after_pass(moment))

    def before_unscaling(
        self, counter: StepCounter, optimizer: Optimizer, scaler: GradScaler
    ) -> None:
        """Look at gradients that carry a loss scale right before the scaler unscales them, because the script has not."""
        for update, check in self._updates("before_unscaling", counter, optimizer):
            if not _carries_scale(scaler, optimizer):
                return
            update.scale = scaler.get_scale()
            update.tell(check.before_unscaling(update))

    def before_update(self, step: Step) -> None:
        for running, counter in self._due("", step.counter):
            self.context.event_log.count_fired(running.stage.rule.id, counter.step)
        for update, check in self._updates("before_update", step.counter, _optimizer_of(step)):
            update.tell(check.before_update(update))

    def before_edits(self, step: Step, gradients: Gradients | None) -> None:
        for update, check in self._updates("before_edits", step.counter, _optimizer_of(step)):
            update.gradients = gradients
            update.tell(check.before_edits(update))

    def after_update(self, step: Step, *, took_place: bool) -> None:
        for update, check in self._updates("after_update", step.counter, _optimizer_of(step)):
            update.took_place = took_place
            update.tell(check.after_update(update))

    def _due(
        self, method: str, counter: StepCounter | None = None
    ) -> list[tuple[_Running, StepCounter]]:
        """Return the due checks, of those that have a method; without a counter, each by that of its first parameter."""
        having, counters = self._having[method], self.context.counters
        if not having or self.context.paused:
            return []
        clocks = [(one, counter or counters[one.stage.tensors[0]]) for one in having]
        return [
            (one, clock)
            for one, clock in clocks
            if one.always or one.stage.rule.steps.due(clock.step)
        ]

    def _updates(
        self, method: str, counter: StepCounter, optimizer: Optimizer | None
    ) -> Iterator[tuple[_Update, Check]]:
        for running, _ in self._due(method, counter):
            if tensors := self._owned(running.stage, counter):
                yield _Update(self, running, counter, tensors, optimizer), running.check

    def _owned(self, stage: Stage, counter: StepCounter) -> Sequence[int]:
        """Return the parameters of a rule that the optimizer of a counter owns, or that no optimizer owns."""
        counters = self.context.counters
        version, tensors = self._tensors.get((stage.rule.id, counter), (-1, ()))
        if version != counters.version:
            known = (counter, counters.common)
            tensors = [tensor for tensor in stage.tensors if counters[tensor] in known]
            self._tensors[stage.rule.id, counter] = counters.version, tensors
        return tensors

    @property
    def evaluations(self) -> int | None:
        return self._kept.evaluations

    def is_resting(self, tensor: int) -> bool:
        root, holder = self._root(), self._holders.get(tensor, lambda: None)()
        return root is not None and holder is not None and root.training and not holder.training

    def is_configured_apart(self) -> bool:
        root = self._root()
        configs = (getattr(m, "config", None) for m in (root.modules() if root is not None else ()))
        # Models of Hugging Face have one.
        return any(getattr(config, "tie_word_embeddings", None) is False for config in configs)

    def is_evaluated(self) -> bool | None:
        root = self._root()
        if root is None or not self._modal:
            return None
        return not root.training and not any(module.training for module in self._modal)

    def tell(self, running: _Running, step: int, findings: Iterable[Finding]) -> None:
        """Make events of findings, each cause once for each tensor; raise the first error at the next update."""
        rule, names = running.stage.rule.id, self.context.program.names
        for finding in findings:
            places: Sequence[Hashable] = finding.tensors or (finding.names,)
            news = [place for place in places if (rule, finding.cause, place) not in self._told]
            if not news:
                continue
            self._told.update((rule, finding.cause, place) for place in news)
            told = [names[tensor] for tensor in finding.tensors if tensor in news] or finding.names
            it = "them" if len(told) > 1 else "it"
            text = finding.text.format(names=shorten_names(told), it=it)
            event_log, name = self.context.event_log, told[0] if told else ""
            at = step if finding.step is None else finding.step
            message = f"{self.context.place(at, rule)}: {text}"
            event_log.count_changed(rule, 1)
            event_log.emit("check", message, rule=rule, step=at, name=name)
            if running.raises:
                event_log.raise_later(
                    CheckError(message, rule=rule, step=at, rank=_dist.rank(), name=name)
                )
