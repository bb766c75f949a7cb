"""The models of a script and the sessions on them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import _dist, api, planning
from gradsurgeon.errors import BindError, GradSurgeonError, RecordError, printable
from gradsurgeon.launcher import launch_status
from gradsurgeon.launcher.attached_model import AttachedModel
from gradsurgeon.launcher.discovery import roots_of
from gradsurgeon.launcher.messages import say
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.launcher.summary import write_header
from gradsurgeon.planning import Plan
from gradsurgeon.runtime import Options, lacking
from gradsurgeon.schema import RuleSet
from gradsurgeon.store import job
from gradsurgeon.store.layout import database_name


class Models:
    """Puts the rules on models as their training is noticed."""

    def __init__(self, settings: Settings, rules: RuleSet) -> None:
        self.settings = settings
        self.rules = rules
        self.attached: list[AttachedModel] = []
        # Leaves of earlier backward passes, by their ids.
        self._seen: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        # Where this process records its first model.
        self._folder = Path()
        # The rules have turned out to fit the models; or not to, after so many updates.
        self.fitting = False
        self.refused: int | None = None

    def cover(self, params: Iterable[Tensor]) -> bool:
        """Return whether all of these parameters are under rules already.

        Those that have come to a model since its rules were bound are not.
        """
        bound = {param for model in self._alive() for param in model.bound_ids()}
        return all(id(param) in bound for param in params)

    def _alive(self) -> list[AttachedModel]:
        return [m for m in self.attached if m.module() is not None and not m.session.removed]

    @property
    def is_any_waiting(self) -> bool:
        return any(model.is_waiting for model in self._alive())

    @property
    def provisional(self) -> list[AttachedModel]:
        """The models that a backward pass reached and nobody has updated yet."""
        return [model for model in self._alive() if model.provisional]

    def attach(
        self, roots: Sequence[nn.Module], params: Sequence[Tensor], optimizer: Optimizer | None
    ) -> None:
        """Put the rules on models that have none yet.

        Args:
            roots: the models.
            params: what is trained.
            optimizer: by which; ``None`` where that is not known, because a backward pass came first.

        Raises:
            BindError: a rule cannot act on what it matches.
            RecordError: records cannot be written.
        """
        owned = {id(param) for root in roots for param in root.parameters()}
        free = sum(id(param) not in owned for param in params)
        if free and optimizer is not None:
            say(
                f"{free} parameters of {type(optimizer).__name__} are in no module: no rule acts on them"
            )
        for root in roots:
            self._put_on(root, optimizer, provisional=optimizer is None)

    def attach_reached(self, leaves: Sequence[Tensor]) -> None:
        """Put the rules on models that a backward pass is the first to reach, while no optimizer is known."""
        # Inputs are leaves as well, and others in each pass.
        new = [
            leaf for leaf in leaves if id(leaf) not in self._seen and isinstance(leaf, nn.Parameter)
        ]
        self._seen |= {id(leaf): leaf for leaf in new}
        if new and not self.cover(new):
            self.attach(roots_of(new), new, None)

    def before_backward(self, leaves: Sequence[Tensor]) -> None:
        """Prepare for a backward pass to these leaves, which need not be one to train by."""
        ids = {id(leaf) for leaf in leaves}
        for model in self.provisional:
            model.reached = bool(model.bound_ids() & ids)
            if model.reached:
                model.session.controller.manual.again()
                model.remember_weights()

    def updated_by_hand(self) -> list[AttachedModel]:
        return [model for model in self.provisional if model.is_updated()]

    def keep(self, updated: Sequence[AttachedModel]) -> None:
        """Keep the models that were updated by hand, and those that the last backward pass reached.

        Raises:
            GradSurgeonError: the rules cannot act on such updates.
        """
        for model in self.provisional:
            if model.reached or model in updated:
                model.provisional = False
                try:
                    model.session.controller.manual.confirm()
                except GradSurgeonError:
                    self.refused = self._updates()
                    raise
        self.discard_provisional()

    def discard_provisional(self) -> None:
        """Let go of models that a backward pass reached and nobody updated, with their records."""
        for model in self.provisional:
            model.session.discard()
        # A session may be gone without that.
        self.attached = [model for model in self.attached if not model.provisional]

    def conclude(self, updated: Sequence[AttachedModel]) -> list[str]:
        """Decide at the end on the models that a backward pass reached and nobody was seen to update.

        Args:
            updated: those that were updated by hand since the last pass.

        Returns:
            Why the rules cannot act on them, if they cannot.
        """
        problems = []
        if updated:
            try:
                self.keep(updated)
            except GradSurgeonError as error:
                problems.append(str(error))
        elif len(self.provisional) < len(self._alive()):
            self.discard_provisional()
        # Where that is all that there is, it is what the script was about.
        for model in self._alive():
            if model.provisional or (model.reached and not model.begun):
                model.provisional = False
                self._begin(model, ())
        return problems

    def give_to(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        """Give the models that backward passes have reached before to a new optimizer.

        Returns:
            Whether one of them stays as it is; others give way to a larger model, or a smaller one.
        """
        wanted = {id(param) for param in params}
        shared = [model for model in self.provisional if wanted & model.bound_ids()]
        roots = {id(root) for root in roots_of(params)} if shared else set()
        for model in shared:
            owned = wanted & set(map(id, model.params()))
            if id(model.module()) in roots and owned <= model.bound_ids():
                model.session.controller.steps.meet(optimizer)
                model.provisional = model.reached = False
            else:
                model.session.discard()
        self.attached = [m for m in self.attached if m not in shared or not m.provisional]
        return any(not model.provisional for model in shared)

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Write the headers, now that training begins.

        A model may have been incomplete when its optimizer was built, above all where it builds its
        own: what has become larger since, or a part of something larger, is bound again.

        Args:
            optimizers: all that are known.

        Raises:
            BindError: a rule cannot act on what it matches.
            RecordError: records cannot be written.
        """
        waiting = [model for model in self._alive() if model.is_waiting]
        params = [param for model in waiting for param in model.params()]
        known = [root for model in waiting if (root := model.module()) is not None]
        for root in roots_of(params, known) if params else []:
            inside = {id(module) for module in root.modules()}
            parts = [model for model in waiting if id(model.module()) in inside]
            # A mere wrapper that came after it has the same parameters, and gives way to what it wraps.
            whole = {id(param) for param in root.parameters()}
            if parts and all(model.bound_ids() != whole for model in parts):
                self._put_on(root, None)
        for model in self._alive():
            if model.is_waiting:
                self._begin(model, optimizers)

    def _begin(self, model: AttachedModel, optimizers: Sequence[Optimizer]) -> None:
        model.begun = True
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
        write_header(model, self.rules, list(owners))

    def _put_on(
        self, root: nn.Module, optimizer: Optimizer | None, *, provisional: bool = False
    ) -> None:
        launch_status.note(launch_status.EXPLAINED)
        try:
            start = self._replace_parts(root)
            plan = planning.bind(self.rules, planning.from_model(root), alone=False)
            self._attach(root, plan, optimizer, start, provisional=provisional)
        except GradSurgeonError:
            raise
        except Exception as error:
            # Nobody has asked for training without the rules.
            raise GradSurgeonError(
                f"the rules cannot be put on {printable(type(root).__name__)}: {type(error).__name__} above. "
                "That is a fault of gradsurgeon, please report it; with GRADSURGEON_DISABLE=1 the script "
                "trains without rules"
            ) from error

    def _replace_parts(self, root: nn.Module) -> int:
        """Let go of models that turn out to be a part of this one; return the step they were at."""
        inside = {id(module) for module in root.modules()}
        step = self.settings.start_step
        for model in self._alive():
            if id(model.module()) in inside:
                if not model.provisional:
                    step = max(step, model.session.step)
                if model.begun:
                    model.replaced = True
                    model.session.remove()
                else:
                    model.session.discard()
                    self.attached.remove(model)
        return step

    def _attach(
        self,
        root: nn.Module,
        plan: Plan,
        optimizer: Optimizer | None,
        start: int,
        *,
        provisional: bool,
    ) -> None:
        title = self._title(plan.manifest.origin)
        plan = replace(plan, title=title)
        options = Options(
            optimizers=None if optimizer is None else [optimizer],
            mode="observe" if self.settings.observe else "act",
            start_step=start,
            beside=True,
            provisional=provisional,
        )
        while True:
            record = self._run_directory(title)
            try:
                session = api.attach(root, plan, options, record=record)
                break
            except RecordError:
                # Another process may have taken the directory since it was chosen: then there is a next one.
                if record is None or record != self._folder or record == self._run_directory(""):
                    raise
        self.attached.append(
            AttachedModel(
                title,
                weakref.ref(root),
                plan,
                session,
                str(record or ""),
                _dist.rank(),
                observing=self.settings.observe,
                start=start,
                provisional=provisional,
            )
        )
        if len(self.attached) > 1:
            # Models of one script like to have the same names for their parameters.
            for model in self.attached:
                model.session.context.title = model.title

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
        """Refuse to train where a rule matches nothing in any model.

        Raises:
            BindError: naming the rules and the nearest names.
        """
        for model in self.attached:
            # The process group may have come after the optimizer, and will be gone at the end.
            model.rank = _dist.rank()
        plans = {model.title: model.plan for model in self.attached if not model.replaced}
        if self.attached and (missing := lacking(self.rules, plans)[0]):
            self.refused = self._updates()
            raise BindError(missing)
        self.fitting = True

    def _updates(self) -> int:
        return sum(model.session.step - model.start for model in self.attached)

    @property
    def is_unused(self) -> bool:
        """Whether nothing has been updated, or nothing since the rules were refused."""
        return self._updates() <= (self.refused or 0)

    def shortfalls(self) -> list[str]:
        """Return what is wrong with rules that match too little in all models together."""
        return planning.shortfalls(
            self.rules,
            {m.title: m.plan.manifest for m in self.attached if not m.replaced},
        )
