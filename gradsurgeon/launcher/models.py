"""The models of a script and the sessions on them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import _dist, api, planning
from gradsurgeon.errors import BindError, GradSurgeonError, RecordError, printable
from gradsurgeon.launcher import idle, telling
from gradsurgeon.launcher.attached import Attached
from gradsurgeon.launcher.discovery import roots_of
from gradsurgeon.launcher.importing import say
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.planning import Plan
from gradsurgeon.runtime import lacking
from gradsurgeon.schema import RuleSet
from gradsurgeon.store import job
from gradsurgeon.store.layout import database_name


class Models:
    """Puts the rules on models as they are found."""

    def __init__(self, settings: Settings, rules: RuleSet) -> None:
        self.settings = settings
        self.rules = rules
        self.attached: list[Attached] = []
        # Leaves of earlier backward passes, by their ids.
        self._seen: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        # Where this process records its first model.
        self._folder = Path()
        # The rules have been found to fit the models; or not to, after so many updates.
        self.fitting = False
        self.refused: int | None = None
        # Optimizers whose parameters are in no module, by class name.
        self.homeless: dict[str, int] = {}

    def cover(self, params: Iterable[Tensor]) -> bool:
        """Tell whether all of some parameters are under rules already.

        Those that have come to a model since its rules were bound are not.
        """
        held = {param for one in self._living() for param in one.bound()}
        return all(id(param) in held for param in params)

    def _living(self) -> list[Attached]:
        return [one for one in self.attached if one.model() is not None and not one.session.removed]

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
        held = {id(param) for root in roots for param in root.parameters()}
        free = sum(id(param) not in held for param in params)
        if free and optimizer is not None:
            self.homeless[type(optimizer).__name__] = free
            say(
                f"{free} parameters of {type(optimizer).__name__} are in no module: no rule acts on them"
            )
        for root in roots:
            self._put_on(root, optimizer, provisional=optimizer is None)

    def _put_on(
        self, root: nn.Module, optimizer: Optimizer | None, *, provisional: bool = False
    ) -> None:
        idle.busy()
        try:
            start = self._take_over(root)
            bound = planning.bind(self.rules, planning.from_model(root), alone=False)
            self._attach(root, bound, optimizer, start, provisional=provisional)
        except GradSurgeonError:
            raise
        except Exception as error:
            # Nobody has asked for training without the rules.
            raise GradSurgeonError(
                f"the rules cannot be put on {printable(type(root).__name__)}: {type(error).__name__} above. "
                "That is a fault of gradsurgeon, please report it; with GRADSURGEON_DISABLE=1 the script "
                "trains without rules"
            ) from error

    @property
    def waiting(self) -> bool:
        """Whether rules are on models that have not begun to train."""
        return any(not (one.begun or one.provisional) for one in self._living())

    @property
    def provisional(self) -> list[Attached]:
        """The models that a backward pass reached and nobody has updated yet."""
        return [one for one in self._living() if one.provisional]

    def look(self, leaves: Sequence[Tensor]) -> None:
        """Put the rules on models that a backward pass is the first to reach, while no optimizer is known."""
        # Inputs are leaves as well, and others in each pass.
        new = [
            leaf for leaf in leaves if id(leaf) not in self._seen and isinstance(leaf, nn.Parameter)
        ]
        self._seen |= {id(leaf): leaf for leaf in new}
        if new and not self.cover(new):
            self.attach(roots_of(new), new, None)

    def reached(self, params: Sequence[Tensor]) -> None:
        """Prepare for a backward pass that nobody may mean to train by.

        Args:
            params: the leaves that it will reach.
        """
        leaves = {id(param) for param in params}
        for one in self.provisional:
            one.reached = bool(one.bound() & leaves)
            if one.reached:
                one.session.again()
                one.imprint()

    def updated(self) -> list[Attached]:
        """Return the models that somebody has updated by hand since the last backward pass."""
        return [one for one in self.provisional if one.is_updated()]

    def settle(self, updated: Sequence[Attached]) -> None:
        """Keep the models that were updated by hand, and those that the last backward pass reached.

        Args:
            updated: the former.

        Raises:
            GradSurgeonError: the rules cannot act on such updates.
        """
        for one in self.provisional:
            if one.reached or one in updated:
                one.provisional = False
                try:
                    one.session.confirm()
                except GradSurgeonError:
                    self.refused = self._updates()
                    raise
        self.drop()

    def drop(self) -> None:
        """Let go of models that a backward pass reached and nobody updated, with their records."""
        for one in self.provisional:
            one.session.discard()
        # Some have gone by themselves.
        self.attached = [one for one in self.attached if not one.provisional]

    def conclude(self, updated: Sequence[Attached]) -> list[str]:
        """Decide at the end on the models that a backward pass reached and nobody was seen to update.

        Args:
            updated: those that were updated by hand since the last pass.

        Returns:
            Why the rules cannot act on them, if they cannot.
        """
        problems = []
        if updated:
            try:
                self.settle(updated)
            except GradSurgeonError as error:
                problems.append(str(error))
        elif len(self.provisional) < len(self._living()):
            self.drop()
        # Where that is all that there is, it is what the script was about.
        for one in self._living():
            if one.provisional or (one.reached and not one.begun):
                one.provisional, one.begun = False, True
                self._tell(one, ())
        return problems

    def claim(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        """Let an optimizer that is new have the models that backward passes have reached before.

        Returns:
            Whether one of them stays as it is; others give way to a larger model, or a smaller one.
        """
        wanted = {id(param) for param in params}
        claimed = [one for one in self.provisional if wanted & one.bound()]
        whole = {id(root) for root in roots_of(params)} if claimed else set()
        for one in claimed:
            if id(one.model()) in whole and wanted & set(map(id, one.params())) <= one.bound():
                one.session.meet(optimizer)
                one.provisional = one.reached = False
            else:
                one.session.discard()
        self.attached = [o for o in self.attached if o not in claimed or not o.provisional]
        return any(not one.provisional for one in claimed)

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Tell what the rules are bound to, now that training begins.

        A model may have been incomplete when its optimizer was built, above all where it builds its
        own: what has become larger since, or a part of something larger, is bound again.

        Args:
            optimizers: all that are known.

        Raises:
            BindError: a rule cannot act on what it matches.
            RecordError: records cannot be written.
        """
        fresh = [one for one in self._living() if not (one.begun or one.provisional)]
        params = [param for one in fresh for param in one.params()]
        known = [model for one in fresh if (model := one.model()) is not None]
        for root in roots_of(params, known) if params else []:
            inside = {id(module) for module in root.modules()}
            parts = [one for one in fresh if id(one.model()) in inside]
            # A mere wrapper that came after it has the same parameters, and gives way to what it wraps.
            whole = {id(param) for param in root.parameters()}
            if parts and all(one.bound() != whole for one in parts):
                self._put_on(root, None)
        for one in self._living():
            if not (one.begun or one.provisional):
                one.begun = True
                self._tell(one, optimizers)

    def _tell(self, one: Attached, optimizers: Sequence[Optimizer]) -> None:
        one.rank = _dist.rank()
        if self.settings.quiet or self.settings.dry_run:
            return
        own = {id(param) for param in one.params()}
        by = {
            type(optimizer).__name__: None
            for optimizer in optimizers
            for group in getattr(optimizer, "param_groups", ())
            if any(id(param) in own for param in group["params"])
        }
        telling.header(one, self.rules, list(by))

    def _take_over(self, root: nn.Module) -> int:
        """Let go of models that turn out to be a part of this one; return the step they were at."""
        parts = {id(module) for module in root.modules()}
        step = self.settings.start_step
        for one in self._living():
            model = one.model()
            if model is not None and id(model) in parts:
                if not one.provisional:
                    step = max(step, one.session.step)
                if one.begun:
                    one.replaced = True
                    one.session.remove()
                else:
                    one.session.discard()
                    self.attached = [other for other in self.attached if other is not one]
        return step

    def _attach(
        self,
        root: nn.Module,
        bound: Plan,
        optimizer: Optimizer | None,
        start: int,
        *,
        provisional: bool,
    ) -> None:
        title = self._title(bound.manifest.origin)
        bound = replace(bound, title=title)
        session = record = None
        while session is None:
            record = self._place(title)
            with self._in_turn(record):
                session = api.attach(
                    root,
                    bound,
                    optimizers=None if optimizer is None else [optimizer],
                    record=record,
                    mode="observe" if self.settings.observe else "act",
                    start_step=start,
                    beside=True,
                    provisional=provisional,
                )
        made = Attached(
            title,
            weakref.ref(root),
            bound,
            session,
            str(record or ""),
            _dist.rank(),
            observing=self.settings.observe,
            start=start,
            provisional=provisional,
        )
        self.attached.append(made)
        if len(self.attached) > 1:
            # Models of one script like to have the same names for their parameters.
            for one in self.attached:
                one.session.name_model(one.title)

    def _title(self, origin: str) -> str:
        title, number = origin, 1
        while any(one.title == title for one in self.attached):
            number += 1
            title = f"{origin}-{number}"
        return title

    def _place(self, title: str) -> Path | None:
        """Return the run directory of a model: the one asked for, or one inside it for further models.

        Processes of one script that are no ranks of one group, such as those of a sweep, have
        directories of their own; so have ranks that are started once more.
        """
        if not self.settings.record or self.settings.dry_run:
            return None
        if any(one.record == str(self._folder) for one in self.attached):
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

    @contextmanager
    def _in_turn(self, record: Path | None) -> Iterator[None]:
        """Let another process have a directory that it takes between our look and our claim."""
        try:
            yield
        except RecordError:
            if record is None or record != self._folder or record == self._place(""):
                raise

    def check(self) -> None:
        """Refuse to train where a rule matches nothing in any model.

        Raises:
            BindError: naming the rules and the nearest names.
        """
        for one in self.attached:
            # The process group may have come after the optimizer, and will be gone at the end.
            one.rank = _dist.rank()
        plans = {one.title: one.plan for one in self.attached if not one.replaced}
        if self.attached and (missing := lacking(self.rules, plans)[0]):
            self.refused = self._updates()
            raise BindError(missing)
        self.fitting = True

    def _updates(self) -> int:
        return sum(one.session.step - one.start for one in self.attached)

    @property
    def idle(self) -> bool:
        """Whether nothing has been updated, or nothing since the rules were refused."""
        return self._updates() <= (self.refused or 0)

    def shortfalls(self) -> list[str]:
        """Return what is wrong with rules that match too little in all models together."""
        return planning.shortfalls(
            self.rules,
            {one.title: one.plan.manifest for one in self.attached if not one.replaced},
        )
