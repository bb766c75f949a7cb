"""The models of a script and the sessions on them."""

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import _dist, api, planning
from gradsurgeon.distributed.session_discovery import lacking
from gradsurgeon.errors import BindError, GradSurgeonError, RecordError, printable
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.discovery import roots_of
from gradsurgeon.launcher.messages import say, write
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.summary import header
from gradsurgeon.planning import Plan
from gradsurgeon.planning.table import count
from gradsurgeon.runtime import Attachment, Options, session_state
from gradsurgeon.schema import RuleSet
from gradsurgeon.sinks.places import at_place
from gradsurgeon.sinks.sink import Sink
from gradsurgeon.store import job
from gradsurgeon.store.layout import database_name


@dataclass(slots=True, eq=False)
class AttachedModel:
    """A model of the script and the rules on it.

    Attributes:
        module: the model; weak, as in the session.
        session: the rules on it; its plan has the title, a class name with a number if there are several of one class.
        record: the run directory, if any.
        start: number of the first update.
        begun: training has begun, and the header is written.
        replaced: another model with all of its parameters took its place.
    """

    module: weakref.ref[nn.Module]
    session: Attachment
    record: Path | None
    start: int
    begun: bool = False
    replaced: bool = False

    @property
    def title(self) -> str:
        return self.session.plan.subject

    def params(self) -> list[nn.Parameter]:
        """Return the parameters of the model; none once the model is gone."""
        module = self.module()
        return [] if module is None else list(module.parameters())

    def bound_ids(self) -> set[int]:
        names = {name for param in self.session.plan.manifest.params for name in param.names}
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
        # True once the rules turned out to fit the models.
        self.fitting = False
        # The run directory of the first model of this process.
        self._folder: Path | None = None

    def cover(self, params: Iterable[Tensor]) -> bool:
        """Tell whether rules were bound to all of these; parameters that a model gained later are not bound."""
        bound = {param for model in self._alive() for param in model.bound_ids()}
        return all(id(param) in bound for param in params)

    def _alive(self) -> list[AttachedModel]:
        return [m for m in self.attached if m.module() is not None and not m.session.removed]

    def waiting(self) -> list[AttachedModel]:
        """Return the models whose training has not begun."""
        return [model for model in self._alive() if not model.begun]

    def attach(
        self, roots: Sequence[nn.Module], params: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        """Put the rules on models of an optimizer that have none yet."""
        owned = {id(param) for root in roots for param in root.parameters()}
        if free := sum(id(param) not in owned for param in params):
            of = type(optimizer).__name__
            say(f"{count(free, 'parameter')} of {of} in no module: no rule acts there")
        for root in roots:
            self._put_on(root, [optimizer])

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Write the headers, now that training begins.

        A model may have been incomplete when its optimizer was built, above all if the model builds the
        optimizer. A model that has grown since, or became part of a larger one, is bound again.
        """
        waiting = self.waiting()
        params = [param for model in waiting for param in model.params()]
        for root in roots_of(params) if params else []:
            inside = {id(module) for module in root.modules()}
            parts = [model for model in waiting if id(model.module()) in inside]
            # A later wrapper without parameters of its own changes nothing: the wrapped model keeps the rules.
            whole = {id(param) for param in root.parameters()}
            if parts and all(model.bound_ids() != whole for model in parts):
                self._put_on(root, None)
        # The process group may be newer than the optimizer.
        self.rank = _dist.rank()
        for model in self.waiting():
            model.begun = True
            if not (self.settings.quiet or self.settings.dry_run):
                write(self._header(model, optimizers), self.rank)

    def _header(self, model: AttachedModel, optimizers: Sequence[Optimizer]) -> list[str]:
        params = {id(param) for param in model.params()}
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
        return [*header(model.session.plan, [*dict.fromkeys(owners)], model.start), *more]

    def _replace_parts(self, root: nn.Module) -> int:
        """Take the rules off models that are parts of this one; return the step of the furthest."""
        inside = {id(module) for module in root.modules()}
        step = self.settings.start_step or 0
        for model in self._alive():
            if id(model.module()) in inside:
                step = max(step, model.session.step)
                if model.begun:
                    model.replaced = True
                    model.session.remove()
                else:
                    model.session.discard()
                    self.attached.remove(model)
        return step

    def _put_on(self, root: nn.Module, optimizers: Sequence[Optimizer] | None) -> None:
        launch_status.explain()
        options = Options(
            optimizers,
            mode="observe" if self.settings.observe else "act",
            start_step=self._replace_parts(root),
            beside=True,
        )
        plan = planning.bind(self.rules, planning.from_model(root), alone=False)
        plan = replace(plan, title=self._title(plan.manifest.origin))
        session, record = self._attach(root, plan, options)
        self._resume(session, plan.title)
        self.rank = _dist.rank()
        self.attached.append(AttachedModel(weakref.ref(root), session, record, session.step))
        if len(self.attached) > 1:
            # Models of one script often have parameters of the same names.
            for model in self.attached:
                model.session.context.title = model.title

    def _attach(
        self, root: nn.Module, plan: Plan, options: Options
    ) -> tuple[Attachment, Path | None]:
        # The curves of a further model have a prefix.
        prefix = f"model-{len(self.attached) + 1}" if self.attached else ""
        sinks = list(self._sinks.values())
        while True:
            record = self._run_directory(plan.title)
            try:
                session = api.attach(root, plan, options, record=record, sinks=sinks, title=prefix)
            except RecordError:
                # Another process may have taken the directory meanwhile: then try the next one.
                if record is None or record != self._folder or record == self._run_directory(""):
                    raise
            else:
                return session, record

    def _resume(self, session: Attachment, title: str) -> None:
        """Load what the rules on a model learnt in the run that is resumed."""
        settings = self.settings
        if not settings.resume or session.step > (settings.start_step or 0):
            return  # A larger model replaces a part that was trained since.
        folder = Path(settings.resume, title) if self.attached else Path(settings.resume)
        shown = printable(str(folder))
        try:
            end = session_state.resume(folder, session.controller, step=settings.start_step)
            if end is not None:
                if not settings.quiet and _dist.rank() == 0:
                    say(f"the rules go on from {shown}, saved before step {end:,}")
                return
            say(f"{shown} cannot be resumed: it has no state of this model, or of this rank")
        except GradSurgeonError as error:
            say(str(error))
        restart = "the rules start without what they had learnt"
        if settings.start_step is None:
            restart += (
                ", and steps count from 0: pass --start-step N if the script continues a training"
            )
        say(restart)

    @cached_property
    def _sinks(self) -> dict[str, Sink]:
        """The requested sinks by the text of the option; all models share them, and only the first rank has any."""
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
        title, number = origin, 1
        while any(model.title == title for model in self.attached):
            number += 1
            title = f"{origin}-{number}"
        return title

    def _run_directory(self, title: str) -> Path | None:
        """Return the run directory of a model: the requested one, or a folder inside it for further models.

        Processes of one script that are no ranks of one group, such as a sweep, have directories of their
        own; so have restarted ranks.
        """
        if not self.settings.record or self.settings.dry_run:
            return None
        if self._folder and any(model.record == self._folder for model in self.attached):
            return self._folder / title
        base = folder = Path(self.settings.record)
        number = 1
        # Each rank looks for its own file, so all ranks find the same number without asking each other.
        while job.is_of_another_start(folder) or (folder / database_name(_dist.rank())).exists():
            number += 1
            folder = base / f"process-{number}"
        self._folder = folder
        return folder

    def _plans(self) -> dict[str, Plan]:
        return {model.title: model.session.plan for model in self.attached if not model.replaced}

    def check(self) -> None:
        if (plans := self._plans()) and (missing := lacking(self.rules, plans)[0]):
            raise BindError(missing)
        self.fitting = True

    def shortfalls(self) -> list[str]:
        models = {title: plan.manifest for title, plan in self._plans().items()}
        return planning.shortfalls(self.rules, models)
