"""The models of a script, found among all live objects, and the sessions on them."""

import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import api
from gradsurgeon.common import _live
from gradsurgeon.distributed.session_discovery import lacking
from gradsurgeon.errors import BindError, GradSurgeonError, RecordError, printable
from gradsurgeon.integrations.launcher.messages import explain, say, write
from gradsurgeon.integrations.launcher.settings import Settings
from gradsurgeon.integrations.launcher.summary import header
from gradsurgeon.language import packs, planning
from gradsurgeon.language.planning import Plan
from gradsurgeon.language.planning.table import count
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.records.store.layout import database_name, is_of_another_start
from gradsurgeon.runtime import Attachment, Guard, SessionOptions, session_state
from gradsurgeon.sinks.sink import Sink, at_place
from gradsurgeon.tensors import _dist
from gradsurgeon.tensors.readable import readable


@dataclass(slots=True, eq=False)
class AttachedModel:
    """A model of the script and the rules on it; another model with all of its parameters may have replaced it."""

    module: weakref.ref[nn.Module]
    attachment: Attachment
    record: Path | None
    start: int
    # The ids of its parameters when the rules were bound. Between passes a sharded model may show others.
    owned: frozenset[int]
    begun: bool = False
    replaced: bool = False

    @property
    def title(self) -> str:
        return self.attachment.plan.subject

    def params(self) -> list[nn.Parameter]:
        module = self.module()
        return [] if module is None else list(module.parameters())

    def bound_ids(self) -> set[int]:
        names = {name for param in self.attachment.plan.manifest.params for name in param.names}
        return {
            id(slot.owner._parameters[slot.key])  # noqa: SLF001 # the slot itself
            for slot in planning.slots(self.module())
            if slot.name in names
        }


class Models:
    def __init__(self, settings: Settings, rules: RuleSet) -> None:
        self.settings = settings
        self.rules = rules
        self.attached: list[AttachedModel] = []
        # The rank of this process; its process group may be gone at the end.
        self.rank = 0
        self.fitting = False
        # Nobody chose the rules of a pack for this script, so they never end it.
        self.guard = Guard(self._speak, lenient=settings.rules.startswith(packs.PREFIX))
        # Opens the debugger where the fault of the last diagnosed step was made.
        self.debug: Callable[[], object] | None = None
        # Whether the script has ended, so the summary reports what comes now.
        self.at_end = False
        # The run directory of the first model of this process.
        self._folder: Path | None = None
        # The class of the optimizer of each parameter that belongs to no module, by the id of the parameter.
        self._free: dict[int, str] = {}

    def cover(self, params: Iterable[Tensor]) -> bool:
        """Tell whether rules were bound to all of these; parameters that a model gained later are not bound."""
        bound = {param for model in self._alive() for param in model.bound_ids()}
        return all(id(param) in bound for param in params)

    def _alive(self) -> list[AttachedModel]:
        return [m for m in self.attached if m.module() is not None and not m.attachment.removed]

    def waiting(self) -> list[AttachedModel]:
        return [model for model in self._alive() if not model.begun]

    def attach(
        self, roots: Sequence[nn.Module], params: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        owned = {id(param) for root in roots for param in root.parameters()}
        self._free.update(
            (id(param), type(optimizer).__name__) for param in params if id(param) not in owned
        )
        for root in roots:
            with self.guard:
                self._put_on(root, [optimizer])

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Write the headers, now that training begins; bind models again that were incomplete before."""
        waiting = self.waiting()
        params = [param for model in waiting for param in model.params()]
        for root in roots_of(params) if params else []:
            inside = {id(module) for module in root.modules()}
            parts = [model for model in waiting if id(model.module()) in inside]
            # A later wrapper without parameters of its own changes nothing: the wrapped model keeps the rules.
            whole = {id(param) for param in root.parameters()}
            if parts and all(model.bound_ids() != whole for model in parts):
                with self.guard:
                    self._put_on(root, None)
        # The process group may be newer than the optimizer.
        self.rank = _dist.rank()
        for model in self.waiting():
            model.begun = True
            over = model.attachment.context.refusals.over
            if not (over or self.settings.quiet or self.settings.dry_run):
                write(self._header(model, optimizers), self.rank)

    def _speak(self, text: str) -> None:
        if not self.at_end:
            rank = f"rank {_dist.rank()}: " if _dist.rank() else ""
            write([f"gradsurgeon: {rank}{text}"], 0)

    def _keep_debug(self, debug: Callable[[], object]) -> None:
        self.debug = debug

    def without_module(self) -> Iterator[str]:
        """Yield a line about the parameters that optimizers update and no module holds, if there are any."""
        if not self._free:
            return
        numbers = Counter(self._free.values())
        names = " and ".join(f"{count(n, 'parameter')} of {kind}" for kind, n in numbers.items())
        where = f"{names} in no module"
        explain()
        if self.attached:
            yield f"gradsurgeon: {where}: no rule acted there"
        else:
            yield f"gradsurgeon: no rule acted: {where}; rules act on the parameters of a torch.nn.Module"

    def _header(self, model: AttachedModel, optimizers: Sequence[Optimizer]) -> list[str]:
        params = {id(param) for param in model.params()} | model.owned
        owners = [
            type(optimizer).__name__
            for optimizer in optimizers
            for group in getattr(optimizer, "param_groups", ())
            if any(id(param) in params for param in group["params"])
        ]
        more = ["  observing only: nothing is edited"] if self.settings.observe else []
        if model.record is not None:
            more.append(f"  records: {printable(str(model.record))}")
        if self._sinks:
            more.append(f"  sinks: {printable(', '.join(self._sinks))}")
        return [*header(model.attachment.plan, [*dict.fromkeys(owners)], model.start), *more]

    def _replace_parts(self, root: nn.Module) -> int:
        inside = {id(module) for module in root.modules()}
        step = self.settings.start_step or 0
        for model in self._alive():
            if id(model.module()) in inside:
                step = max(step, model.attachment.step)
                if model.begun:
                    model.replaced = True
                    model.attachment.remove()
                else:
                    model.attachment.discard()
                    self.attached.remove(model)
        return step

    def _put_on(self, root: nn.Module, optimizers: Sequence[Optimizer] | None) -> None:
        explain()
        options = SessionOptions(
            optimizers,
            mode="observe" if self.settings.observe else "act",
            start_step=self._replace_parts(root),
            beside=True,
            lenient=self.guard.lenient,
            say=self._speak,
            on_failed_step=self._keep_debug if self.settings.pdb else None,
        )
        manifest = planning.from_model(root)
        plan = planning.bind(self.rules, manifest, alone=False, lenient=self.guard.lenient)
        plan = replace(plan, title=self._title(plan.manifest.origin))
        attachment, record = self._attach(root, plan, options)
        self._resume(attachment, plan.title)
        self.rank = _dist.rank()
        owned = frozenset(map(id, root.parameters()))
        self.attached.append(
            AttachedModel(weakref.ref(root), attachment, record, attachment.step, owned)
        )
        if len(self.attached) > 1:
            # Models of one script often have parameters of the same names.
            for model in self.attached:
                model.attachment.context.title = model.title

    def _attach(
        self, root: nn.Module, plan: Plan, options: SessionOptions
    ) -> tuple[Attachment, Path | None]:
        # The curves of a further model have a prefix.
        prefix = f"model-{len(self.attached) + 1}" if self.attached else ""
        sinks = list(self._sinks.values())
        while True:
            record = self._run_directory(plan.title)
            try:
                attachment = api.attach(
                    root, plan, options, record=record, sinks=sinks, title=prefix
                )
            except RecordError:
                # Another process may have taken the directory meanwhile: then try the next one.
                if record is None or record != self._folder or record == self._run_directory(""):
                    raise
            else:
                return attachment, record

    def _resume(self, attachment: Attachment, title: str) -> None:
        settings = self.settings
        if not settings.resume or attachment.step > (settings.start_step or 0):
            return  # A larger model replaces a part that was trained since.
        folder = Path(settings.resume, title) if self.attached else Path(settings.resume)
        shown = printable(str(folder))
        try:
            end = session_state.resume(folder, attachment.controller, step=settings.start_step)
            if end is not None:
                if not settings.quiet and _dist.rank() == 0:
                    say(f"the rules go on from {shown}, saved before step {end:,}")
                return
            say(f"{shown} cannot be resumed: it has no state of this model, or of this rank")
        except GradSurgeonError as error:
            say(str(error))
        say(
            f"the rules start without what they had learnt, at step {settings.start_step or 0}: pass --start-step N if the "
            "script continues a training"
        )

    @cached_property
    def _sinks(self) -> dict[str, Sink]:
        sinks: dict[str, Sink] = {}
        if self.settings.dry_run or os.environ.get("RANK", "0") != "0":
            return sinks
        for text in self.settings.sinks:
            try:
                sinks[text] = at_place(text)
            except Exception as error:  # noqa: BLE001 # no error of a client stops the script
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                say(f"the script runs without the sink {printable(text)}: {printable(reason)}")
        return sinks

    def _title(self, origin: str) -> str:
        title = origin
        number = 1
        while any(model.title == title for model in self.attached):
            number += 1
            title = f"{origin}-{number}"
        return title

    def _run_directory(self, title: str) -> Path | None:
        """Return the run directory of a model; further models, sweeps and restarted ranks get folders inside it."""
        if not self.settings.record or self.settings.dry_run:
            return None
        if self._folder and any(model.record == self._folder for model in self.attached):
            return self._folder / title
        base = folder = Path(self.settings.record)
        number = 1
        # Each rank looks for its own file, so all ranks find the same number without asking each other.
        while is_of_another_start(folder) or (folder / database_name(_dist.rank())).exists():
            number += 1
            folder = base / f"process-{number}"
        self._folder = folder
        return folder

    def _plans(self) -> dict[str, Plan]:
        return {model.title: model.attachment.plan for model in self.attached if not model.replaced}

    def check(self) -> None:
        """Refuse rules that match nothing on any rank; of a pack report them, without asking the other ranks."""
        plans = self._plans()
        if plans and self.guard.lenient:
            for problem in self.shortfalls():
                self._speak(problem)
        elif plans and (missing := lacking(self.rules, plans)[0]):
            raise BindError(missing)
        self.fitting = True

    def shortfalls(self) -> list[str]:
        models = {title: plan.manifest for title, plan in self._plans().items()}
        return planning.shortfalls(self.rules, models)


def roots_of(params: Sequence[Tensor]) -> list[nn.Module]:
    """Return the models that have some parameters; a script may replace a wrapper around one of them."""
    return [planning.unwrapped(root) for root in _outermost(params)]


def _outermost(params: Sequence[Tensor]) -> list[nn.Module]:
    wanted = {id(param) for param in params}
    # An unreachable module that the collector has not yet freed must not pass for a model.
    gc.collect()
    modules = _live.instances(nn.Module)
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        if not _is_loss(module):
            for child in module._modules.values():  # noqa: SLF001 # `children` hides shared ones
                parents.setdefault(id(child), []).append(module)
    _pass_over_keepers(parents, wanted)
    roots: list[nn.Module] = []
    seen: set[int] = set()
    for module in modules:
        trains = any(id(param) in wanted for param in module._parameters.values())  # noqa: SLF001 # as above
        waiting = [module] if trains else []
        while waiting:
            current = waiting.pop()
            if id(current) in seen:
                continue
            seen.add(id(current))
            above = parents.get(id(current), [])
            waiting += above
            if not above:
                roots.append(current)
    return _without_repetition(roots, wanted)


def _is_loss(module: nn.Module) -> bool:
    losses = nn.modules.loss._Loss  # noqa: SLF001 # the base of all of torch's
    return isinstance(module, losses) or type(module).__name__.endswith(("Loss", "Criterion"))


def _pass_over_keepers(parents: dict[int, list[nn.Module]], wanted: set[int]) -> None:
    """Remove parents that only keep a model and frozen copies of it: such a whole is not trained."""
    for child, above in parents.items():
        parents[child] = [
            keeper
            for keeper in above
            if parents.get(id(keeper)) or not _keeps_copies(keeper, child, wanted)
        ]


def _keeps_copies(keeper: nn.Module, child: int, wanted: set[int]) -> bool:
    # A container may hold equal layers of which one is trained.
    if isinstance(keeper, nn.Sequential | nn.ModuleList | nn.ModuleDict) or any(
        param is not None
        for param in keeper._parameters.values()  # noqa: SLF001 # `parameters` hides shared ones
    ):
        return False
    children = {id(module): module for module in keeper.children()}
    if (model := children.pop(child, None)) is None:
        return False  # an empty place for a module
    copies = [module for module in children.values() if any(True for _ in module.parameters())]
    own = {id(param) for param in model.parameters()}
    return bool(copies) and all(
        _equal(copy, model)
        and not any(p.requires_grad or id(p) in wanted or id(p) in own for p in copy.parameters())
        for copy in copies
    )


def _equal(copy: nn.Module, model: nn.Module) -> bool:
    ours = dict(copy.named_parameters())
    theirs = dict(model.named_parameters())
    return ours.keys() == theirs.keys() and all(
        a is not None and b is not None and torch.equal(a, b.to(a))
        for a, b in zip(map(readable, ours.values()), map(readable, theirs.values()), strict=True)
    )


def _without_repetition(roots: list[nn.Module], wanted: set[int]) -> list[nn.Module]:
    """Drop roots whose trained parameters all belong to other roots: no gradient is edited twice."""
    chosen: list[nn.Module] = []
    covered: set[int] = set()
    held = {id(root): {id(param) for param in root.parameters()} for root in roots}
    # First the root that covers most; among equals, the root with the fewest other parameters.
    order = sorted(roots, key=lambda r: (-len(held[id(r)] & wanted), len(held[id(r)])))
    for root in order:
        if not (held[id(root)] & wanted) <= covered:
            chosen.append(root)
            covered |= held[id(root)]
    return chosen
