"""The models of a script and the sessions on them."""

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import _dist, api, planning
from gradsurgeon.distributed.session_discovery import lacking
from gradsurgeon.errors import BindError, GradSurgeonError, RecordError, printable
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.discovery import roots_of
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.summary import AttachedModel, write_header
from gradsurgeon.runtime import Attachment, Options, session_state
from gradsurgeon.schema import RuleSet
from gradsurgeon.sinks.places import at_place
from gradsurgeon.sinks.sink import Sink
from gradsurgeon.store import job
from gradsurgeon.store.layout import database_name


class Models:
    def __init__(self, settings: Settings, rules: RuleSet) -> None:
        self.settings = settings
        self.rules = rules
        self.attached: list[AttachedModel] = []
        # The run directory of the first model of this process.
        self._folder = Path()
        # True once the rules turned out to fit the models.
        self.fitting = False
        # By the text of the option; made for the first model.
        self._sinks: dict[str, Sink] | None = None

    def cover(self, params: Iterable[Tensor]) -> bool:
        """Tell whether rules were bound to all of these; parameters that a model gained later are not bound."""
        bound = {param for model in self._alive() for param in model.bound_ids()}
        return all(id(param) in bound for param in params)

    def _alive(self) -> list[AttachedModel]:
        return [m for m in self.attached if m.module() is not None and not m.session.removed]

    @property
    def is_any_waiting(self) -> bool:
        return any(not model.begun for model in self._alive())

    def attach(
        self, roots: Sequence[nn.Module], params: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        """Put the rules on models of an optimizer that have none yet."""
        owned = {id(param) for root in roots for param in root.parameters()}
        if free := sum(id(param) not in owned for param in params):
            of = type(optimizer).__name__
            say(f"{free} parameters of {of} are in no module: no rule acts on them")
        for root in roots:
            self._put_on(root, optimizer)

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Write the headers, now that training begins.

        A model may have been incomplete when its optimizer was built, above all if the model builds the
        optimizer. A model that has grown since, or became part of a larger one, is bound again.
        """
        waiting = [model for model in self._alive() if not model.begun]
        params = [param for model in waiting for param in model.params()]
        for root in roots_of(params) if params else []:
            inside = {id(module) for module in root.modules()}
            parts = [model for model in waiting if id(model.module()) in inside]
            # A later wrapper without parameters of its own changes nothing: the wrapped model keeps the rules.
            whole = {id(param) for param in root.parameters()}
            if parts and all(model.bound_ids() != whole for model in parts):
                self._put_on(root, None)
        for model in self._alive():
            if not model.begun:
                self._begin(model, optimizers)

    def _begin(self, model: AttachedModel, optimizers: Sequence[Optimizer]) -> None:
        model.begun = True
        # The process group may be newer than the optimizer, and will be gone at the end.
        model.rank = _dist.rank()
        if self.settings.quiet or self.settings.dry_run:
            return
        params = {id(param) for param in model.params()}
        owners = {
            type(optimizer).__name__: None
            for optimizer in optimizers
            for group in getattr(optimizer, "param_groups", ())
            if any(id(param) in params for param in group["params"])
        }
        write_header(model, list(owners), list(self._made_sinks()), observing=self.settings.observe)

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

    def _put_on(self, root: nn.Module, optimizer: Optimizer | None) -> None:
        launch_status.explain()
        start = self._replace_parts(root)
        plan = planning.bind(self.rules, planning.from_model(root), alone=False)
        title = self._title(plan.manifest.origin)
        plan = replace(plan, title=title)
        options = Options(
            optimizers=None if optimizer is None else [optimizer],
            mode="observe" if self.settings.observe else "act",
            start_step=start,
            beside=True,
        )
        while True:
            record = self._run_directory(title)
            try:
                session = api.attach(
                    root,
                    plan,
                    options,
                    record=record,
                    sinks=list(self._made_sinks().values()),
                    title=self._prefix(),
                )
                break
            except RecordError:
                # Another process may have taken the directory meanwhile: then try the next one.
                if record is None or record != self._folder or record == self._run_directory(""):
                    raise
        self._resume(session, title)
        self.attached.append(
            AttachedModel(
                title,
                weakref.ref(root),
                plan,
                session,
                str(record or ""),
                _dist.rank(),
                start=session.step,
            )
        )
        if len(self.attached) > 1:
            # Models of one script often have parameters of the same names.
            for model in self.attached:
                model.session.context.title = model.title

    def _resume(self, session: Attachment, title: str) -> None:
        """Load what the rules on a model learnt in the run that is resumed."""
        settings = self.settings
        if not settings.resume or session.step > (settings.start_step or 0):
            return  # A larger model replaces a part that was trained since.
        folder = Path(settings.resume, title) if self.attached else Path(settings.resume)
        try:
            found = session_state.read(folder)
            if found is not None:
                end = found.load(session.controller, step=settings.start_step)
                if not settings.quiet and _dist.rank() == 0:
                    say(f"the rules go on from {printable(str(folder))}, saved before step {end:,}")
                return
            text = f"{printable(str(folder))} cannot be resumed: it has no state of this model, or of this rank"
        except GradSurgeonError as error:
            text = str(error)
        say(text)
        restart = "the rules start without what they had learnt"
        if settings.start_step is None:
            restart += (
                ", and steps count from 0: pass --start-step N if the script continues a training"
            )
        say(restart)

    def _made_sinks(self) -> dict[str, Sink]:
        """Return the requested sinks, which all models share; only the first rank has any."""
        if self._sinks is None:
            self._sinks = {}
            wanted = self.settings.sinks if os.environ.get("RANK", "0") == "0" else ()
            for text in () if self.settings.dry_run else wanted:
                try:
                    self._sinks[text] = at_place(text)
                except Exception as error:  # noqa: BLE001 # no error of a client stops the script
                    reason = str(error).strip().partition("\n")[0] or type(error).__name__
                    say(f"the script runs without the sink {printable(text)}: {printable(reason)}")
        return self._sinks

    def _prefix(self) -> str:
        """Return the prefix of the curves of a further model; empty for the first."""
        return f"model-{len(self.attached) + 1}" if self.attached else ""

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
        if any(model.record == str(self._folder) for model in self.attached):
            return self._folder / title
        base = self._folder = Path(self.settings.record)
        number = 1
        # Each rank looks for its own file, so all ranks find the same number without asking each other.
        while (
            job.is_of_another_start(self._folder)
            or (self._folder / database_name(_dist.rank())).exists()
        ):
            number += 1
            self._folder = base / f"process-{number}"
        return self._folder

    def check(self) -> None:
        plans = {model.title: model.plan for model in self.attached if not model.replaced}
        if plans and (missing := lacking(self.rules, plans)[0]):
            raise BindError(missing)
        self.fitting = True

    def shortfalls(self) -> list[str]:
        models = {m.title: m.plan.manifest for m in self.attached if not m.replaced}
        return planning.shortfalls(self.rules, models)
