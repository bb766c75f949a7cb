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
from gradsurgeon.errors import BindError, RecordError, printable
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.discovery import roots_of
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.resuming import resume
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.summary import AttachedModel, write_header
from gradsurgeon.runtime import Attachment, Options
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
        # Where this process records its first model.
        self._folder = Path()
        # The rules have turned out to fit the models.
        self.fitting = False
        # By how they were asked for, once they are made.
        self._sinks: dict[str, Sink] | None = None

    def cover(self, params: Iterable[Tensor]) -> bool:
        """Tell whether these are under rules already: what came to a model since its rules were bound is not."""
        bound = {param for model in self._alive() for param in model.bound_ids()}
        return all(id(param) in bound for param in params)

    def _alive(self) -> list[AttachedModel]:
        return [m for m in self.attached if m.module() is not None and not m.session.removed]

    @property
    def is_any_waiting(self) -> bool:
        return any(not model.begun for model in self._alive())

    def attach(
        self, roots: Sequence[nn.Module], params: Sequence[Tensor], optimizer: Optimizer | None
    ) -> None:
        """Put the rules on the models of an optimizer, or of updates by hand, that have none yet."""
        owned = {id(param) for root in roots for param in root.parameters()}
        if free := sum(id(param) not in owned for param in params):
            whose = "the script" if optimizer is None else type(optimizer).__name__
            say(f"{free} parameters of {whose} are in no module: no rule acts on them")
        for root in roots:
            self._put_on(root, optimizer)

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Write the headers, now that training begins.

        A model may have been incomplete when its optimizer was built, above all where it builds its
        own: what has become larger since, or a part of something larger, is bound again.
        """
        waiting = [model for model in self._alive() if not model.begun]
        params = [param for model in waiting for param in model.params()]
        for root in roots_of(params) if params else []:
            inside = {id(module) for module in root.modules()}
            parts = [model for model in waiting if id(model.module()) in inside]
            # A mere wrapper that came after it has the same parameters, and gives way to what it wraps.
            whole = {id(param) for param in root.parameters()}
            if parts and all(model.bound_ids() != whole for model in parts):
                self._put_on(root, None)
        for model in self._alive():
            if not model.begun:
                self._begin(model, optimizers)

    def _begin(self, model: AttachedModel, optimizers: Sequence[Optimizer]) -> None:
        model.begun = True
        # The process group may have come after the optimizer, and will be gone at the end.
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
        write_header(model, list(owners))

    def _replace_parts(self, root: nn.Module) -> int:
        """Let go of models that turn out to be a part of this one; return the step they were at."""
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
        launch_status.note(launch_status.EXPLAINED)
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
                # Another process may have taken the directory since it was chosen: then there is a next one.
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
                observing=self.settings.observe,
                start=session.step,
                sinks=tuple(self._made_sinks()),
            )
        )
        if len(self.attached) > 1:
            # Models of one script like to have the same names for their parameters.
            for model in self.attached:
                model.session.context.title = model.title

    def _resume(self, session: Attachment, title: str) -> None:
        """Let a model go on from what the rules on it have learnt in the run that is resumed."""
        if not self.settings.resume or session.step > (self.settings.start_step or 0):
            return  # A larger model takes over from a part that has been trained since.
        folder = Path(self.settings.resume)
        resume(session, folder / title if self.attached else folder, self.settings)

    def _made_sinks(self) -> dict[str, Sink]:
        """Return the sinks that were asked for, all models the same; a rank but the first one has none."""
        if self._sinks is None:
            self._sinks = {}
            wanted = self.settings.sinks if os.environ.get("RANK", "0") == "0" else ()
            for text in () if self.settings.dry_run else wanted:
                try:
                    self._sinks[text] = at_place(text)
                except Exception as error:  # noqa: BLE001 # whatever a client raises: the script goes on
                    reason = str(error).strip().partition("\n")[0] or type(error).__name__
                    if self.settings.strict:
                        launch_status.refuse()
                        say(
                            f"error: the sink {printable(text)} cannot be made: {printable(reason)}"
                        )
                        raise SystemExit(launch_status.REFUSED) from None
                    say(f"the script runs without the sink {printable(text)}: {printable(reason)}")
        return self._sinks

    def _prefix(self) -> str:
        """Return what the curves of a model begin with, where it is not the first one."""
        return f"model-{len(self.attached) + 1}" if self.attached else ""

    def _title(self, origin: str) -> str:
        title, number = origin, 1
        while any(model.title == title for model in self.attached):
            number += 1
            title = f"{origin}-{number}"
        return title

    def _run_directory(self, title: str) -> Path | None:
        """Return the run directory of a model: the one asked for, or one inside it for further models.

        Processes of one script that are no ranks of one group, such as those of a sweep, have
        directories of their own; so have ranks that are started once more.
        """
        if not self.settings.record or self.settings.dry_run:
            return None
        if any(model.record == str(self._folder) for model in self.attached):
            return self._folder / title
        base = self._folder = Path(self.settings.record)
        number = 1
        # Ranks go by their own files: they come to the same number without asking each other.
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
