"""The models of a script and the sessions on them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import _dist, api, planning
from gradsurgeon.errors import BindError, RecordError
from gradsurgeon.launcher import telling
from gradsurgeon.launcher.importing import say
from gradsurgeon.launcher.settings import Settings
from gradsurgeon.planning import Plan
from gradsurgeon.runtime import Session
from gradsurgeon.schema import RuleSet
from gradsurgeon.store.layout import database_name


@dataclass(slots=True)
class Attached:
    """One model with rules on it.

    Attributes:
        title: class name of the model, with a number where there are several of a kind.
        model: reached weakly, as the session does.
        plan: what the rules bound to.
        session: the rules at work.
        record: its run directory, empty for none.
        rank: the rank of this process, kept for when its process group is gone.
        observing: nothing is edited.
    """

    title: str
    model: weakref.ref[nn.Module]
    plan: Plan
    session: Session
    record: str
    rank: int
    observing: bool = False


class Models:
    """Puts the rules on models as they are found."""

    def __init__(self, settings: Settings, rules: RuleSet) -> None:
        self.settings = settings
        self.rules = rules
        self.attached: list[Attached] = []
        # Where this process records its first model.
        self._folder = Path()
        # Nothing was trained: the rules fit no model.
        self.refused = False
        # Optimizers whose parameters are in no module, by class name.
        self.homeless: dict[str, int] = {}

    def cover(self, params: Iterable[Tensor]) -> bool:
        """Tell whether all of some parameters are under rules already.

        Those that have come to a model since its rules were bound are not.
        """
        held: set[int] = set()
        for one in self._living():
            names = {name for param in one.plan.manifest.params for name in param.names}
            for slot in planning.slots(one.model()):
                if slot.name in names:
                    held.add(id(slot.owner._parameters[slot.key]))  # noqa: SLF001 # the place itself
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
            optimizer: by which; ``None`` where weights are updated by hand.

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
            start = self._take_over(root)
            bound = planning.bind(self.rules, planning.from_model(root), alone=False)
            self._attach(root, bound, optimizer, start)

    def _take_over(self, root: nn.Module) -> int:
        """Let go of models that turn out to be a part of this one; return the step they were at."""
        parts = {id(module) for module in root.modules()}
        step = self.settings.start_step
        for one in self._living():
            model = one.model()
            if model is not None and id(model) in parts:
                step = max(step, one.session.step)
                one.session.remove()
        return step

    def _attach(
        self, root: nn.Module, bound: Plan, optimizer: Optimizer | None, start: int
    ) -> None:
        title = self._title(bound.manifest.origin)
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
                )
        made = Attached(
            title,
            weakref.ref(root),
            bound,
            session,
            str(record or ""),
            _dist.rank(),
            observing=self.settings.observe,
        )
        self.attached.append(made)
        if not self.settings.quiet and not self.settings.dry_run:
            telling.header(made, self.rules, optimizer)

    def _title(self, origin: str) -> str:
        kin = sum(one.plan.manifest.origin == origin for one in self.attached)
        return origin if not kin else f"{origin}-{kin + 1}"

    def _place(self, title: str) -> Path | None:
        """Return the run directory of a model: the one asked for, or one inside it for further models.

        Processes of one script that are no ranks of one group, such as those of a sweep, have
        directories of their own; so have ranks that are started once more.
        """
        if not self.settings.record or self.settings.dry_run:
            return None
        if self.attached:
            return self._folder / title
        base = self._folder = Path(self.settings.record)
        number = 1
        # Ranks go by their own files: they come to the same number without asking each other.
        while (self._folder / database_name(_dist.rank())).exists():
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
        if self.attached and (missing := self.shortfalls()):
            self.refused = True
            raise BindError(missing)

    def shortfalls(self) -> list[str]:
        """Return what is wrong with rules that match too little in all models together."""
        return planning.shortfalls(self.rules, [one.plan.manifest for one in self.attached])
