"""The models of a script, and the sessions on them."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gradsurgeon import api
from gradsurgeon.common.events import TRIPS, Event
from gradsurgeon.distributed.session_discovery import lacking
from gradsurgeon.errors import BindError, GradSurgeonError, RecordError, printable, reason_of
from gradsurgeon.integrations.launcher.event_command import EventCommand
from gradsurgeon.integrations.launcher.messages import explain, say, write
from gradsurgeon.integrations.launcher.model_roots import module_ids, name_of, param_ids, roots_of
from gradsurgeon.integrations.launcher.next_commands import model_spec
from gradsurgeon.integrations.launcher.settings import Settings
from gradsurgeon.integrations.launcher.summary import header
from gradsurgeon.language import packs, planning
from gradsurgeon.language.planning import Manifest, Plan
from gradsurgeon.language.planning.table import count
from gradsurgeon.language.schema import RuleSet
from gradsurgeon.records.store.layout import database_name, is_of_another_start
from gradsurgeon.runtime import Attachment, Guard, SessionOptions, session_state
from gradsurgeon.runtime.context import mention
from gradsurgeon.runtime.first_update import mention_scales
from gradsurgeon.runtime.running_steps import params_of
from gradsurgeon.sinks.sink import Sink, at_place
from gradsurgeon.tensors import _dist


@dataclass(slots=True, eq=False)
class AttachedModel:
    """A model of the script and the rules on it. A larger model with all its parameters may have replaced it."""

    module: Callable[[], Any]  # a weak reference
    attachment: Attachment
    record: Path | None
    start: int
    # The ids of its parameters when the rules were bound. Between passes a sharded model may show other parameters.
    owned: frozenset[int]
    # The title of the first model of this name with the same parameters; nothing for that model.
    like: str
    begun: bool = False
    replaced: bool = False

    @property
    def title(self) -> str:
        return self.attachment.plan.subject

    def bound_ids(self) -> set[int]:
        """Return the ids of the parameters that now have the names that rules were bound to."""
        names: set[str] = set()
        for entry in self.attachment.plan.manifest.params:
            names.update(entry.names)
        bound = set()
        for slot in planning.slots(self.module()):
            if slot.name in names:
                param = slot.owner._parameters[slot.key]  # noqa: SLF001 # the slot itself
                bound.add(id(param))
        return bound


class Models:
    def __init__(self, settings: Settings, rules: RuleSet) -> None:
        self.settings = settings
        self.rules = rules
        self.attached: list[AttachedModel] = []
        # The rank of this process; its process group may be gone at the end.
        self.rank = _dist.rank()
        # Whether the rules were checked against all models, at the first step.
        self.checked = False
        # Nobody chose the rules of a pack for this script, so they never end it.
        self.guard = Guard(self._report, lenient=settings.rules.startswith(packs.PREFIX))
        # Opens the debugger at the operation that made the last diagnosed step fail.
        self.debug: Callable[[], object] | None = None
        self.event_command = EventCommand(settings, say_from_rank)
        # Whether the script has ended. Then the summary reports the events.
        self.at_end = False
        # The lines that were written while the script runs, without the names of models.
        self._said = set[str]()
        # The titles of the models in which a rule tripped, in the order of their first trips.
        self._tripped: list[str] = []
        # The run directory of the first model of this process.
        self._folder: Path | None = None
        # The ids of the parameters that an optimizer holds and no module does, and of those that were updated.
        self._outside = weakref.WeakKeyDictionary[Optimizer, set[int]]()
        self._outside_modules: set[int] = set()

    def have_bound(self, params: Iterable[Tensor]) -> bool:
        """Tell whether rules were bound to all these parameters. Rules are not bound to a parameter that is newer."""
        bound = set[int]().union(*[model.bound_ids() for model in self._alive()])
        return bound.issuperset(map(id, params))

    def _alive(self) -> list[AttachedModel]:
        present = [model for model in self.attached if not model.attachment.removed]
        return [model for model in present if model.module() is not None]

    def waiting(self) -> list[AttachedModel]:
        return [model for model in self._alive() if not model.begun]

    def attach(
        self, roots: Sequence[nn.Module], params: Sequence[Tensor], optimizer: Optimizer
    ) -> None:
        outside = set(map(id, params))
        for root in roots:
            outside -= param_ids(root)
        if outside:
            self._outside[optimizer] = outside
        for root in roots:
            with self.guard:
                self._attach_rules(self._with_rules(root), [optimizer])

    def stepped(self, optimizer: Optimizer) -> None:
        self._outside_modules |= self._outside.pop(optimizer, set())

    def _with_rules(self, root: nn.Module) -> nn.Module:
        """Return the model that already has rules if a root only wraps it, without parameters of its own: names stay."""
        inside = module_ids(root)
        whole = param_ids(root)
        for model in self._alive():
            if id(model.module()) in inside and param_ids(model.module()) == whole:
                return model.module()  # type: ignore[no-any-return] # a module
        return root

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Write the headers, because training begins. First bind waiting models again that became parts of a larger one."""
        waiting = self.waiting()
        params = chain.from_iterable([model.module().parameters() for model in waiting])
        for outermost in roots_of([*params]):
            root = self._with_rules(outermost)
            inside = module_ids(root)
            parts = [model for model in waiting if id(model.module()) in inside]
            # A later wrapper without parameters of its own changes nothing: the wrapped model keeps the rules.
            whole = param_ids(root)
            if parts and all(model.bound_ids() != whole for model in parts):
                with self.guard:
                    self._attach_rules(root, None)
        # The process group may be newer than the optimizer.
        self.rank = _dist.rank()
        for model in self.waiting():
            model.begun = True
            over = model.attachment.context.refusals.over
            if not (over or self.settings.quiet or self.settings.dry_run):
                write(self._header(model, optimizers), self.rank)
            for optimizer in optimizers:
                # Before the first update, at which a dry run stops.
                attachment = model.attachment
                mention_scales(attachment.context, attachment.controller.effects, optimizer)

    def _report(self, text: str) -> None:
        if not self.at_end:
            say_from_rank(text)

    def _report_once(self, like: str, title: str, text: str) -> None:
        """Write a line unless it says of a further model, as of a client or a fold, what was said of one like it."""
        said = text.replace(mention(title), "", 1)
        if not like or said not in self._said:
            self._said.add(said)
            self._report(text)

    def without_module(self) -> Iterator[str]:
        """Yield a line about the parameters that optimizers update and no module holds, if there are any."""
        if not self._outside_modules:
            return
        where = f"{count(len(self._outside_modules), 'trained parameter')} in no module"
        explain()
        if self.attached:
            yield f"gradsurgeon: {where}: no rule acted there"
        else:
            yield f"gradsurgeon: no rule acted: {where}; rules act on the parameters of a torch.nn.Module"

    def _header(self, model: AttachedModel, optimizers: Sequence[Optimizer]) -> Iterator[str]:
        params = model.owned | param_ids(model.module())
        held = set[int]()
        owners = {}
        for optimizer in optimizers:
            updated = params.intersection(map(id, params_of(optimizer)))
            if updated:
                held |= updated
                owners[type(optimizer).__name__] = optimizer
        words = ""
        if owners:
            words = f"updated by {' and '.join(owners)}"
            number = len(held & model.owned)
            # A model that is sharded later shows other parameters.
            if 0 < number < len(model.owned):
                words = f"{count(number, 'parameter')} {words}"
        plan = model.attachment.plan
        if model.like:
            like = f"{plan.subject}, like {printable(model.like)}"
            yield f"gradsurgeon: {', '.join(filter(None, (like, words)))}"
        else:
            yield from header(plan, words, model.start)
        if self.settings.observe:
            yield "  observing only: nothing is edited"
        if model.record is not None:
            yield f"  records: {printable(str(model.record))}"

    def _replace_parts(self, root: nn.Module) -> int:
        """Remove the rules from the parts of a larger model, and return the step at which it continues."""
        inside = module_ids(root)
        step = self.settings.first_step
        for model in self._alive():
            if id(model.module()) in inside:
                step = max(step, model.attachment.step)
                if model.begun:
                    model.replaced = True
                    model.attachment.remove()
                else:
                    model.attachment.remove_with_records()
                    self.attached.remove(model)
        return step

    def _attach_rules(self, root: nn.Module, optimizers: Sequence[Optimizer] | None) -> None:
        explain()
        lenient = self.guard.lenient
        start = self._replace_parts(root)
        plan = planning.bind(self.rules, planning.from_model(root), alone=False, lenient=lenient)
        like, title = self._titles(name_of(root) or plan.manifest.origin, plan)
        plan = replace(plan, title=title)
        options = SessionOptions(
            optimizers,
            mode="observe" if self.settings.observe else "act",
            start_step=start,
            on_event=partial(self._note, plan.title),
            beside=True,
            lenient=lenient,
            say=partial(self._report_once, like, title),
            build=model_spec(root),
        )
        if self.settings.pdb:
            options = options._replace(on_failed_step=partial(setattr, self, "debug"))
        attachment, record = self._attach(root, plan, options)
        self._resume(attachment, plan.title)
        owned = frozenset(param_ids(root))
        model = AttachedModel(weakref.ref(root), attachment, record, attachment.step, owned, like)
        self.attached.append(model)
        if len(self.attached) > 1:
            # Models of one script often have parameters of the same names.
            for attached in self.attached:
                attached.attachment.context.title = attached.title

    def _attach(
        self, root: nn.Module, plan: Plan, options: SessionOptions
    ) -> tuple[Attachment, Path | None]:
        prefix = ""
        if self.attached:
            # The curves of a further model have a prefix.
            prefix = f"model-{len(self.attached) + 1}"
        while True:
            record = self._run_directory(plan.title)
            try:
                attachment = api.attach(
                    root, plan, options, record=record, sinks=self._sinks, title=prefix
                )
            except RecordError:
                # Another process may have taken the directory meanwhile: then try the next one.
                if record is None or record != self._folder or record == self._run_directory(""):
                    raise
            else:
                return attachment, record

    def _resume(self, attachment: Attachment, title: str) -> None:
        settings = self.settings
        if not settings.resume or attachment.step > settings.first_step:
            return  # A larger model replaces a part that was trained since.
        folder = Path(settings.resume)
        if self.attached:
            folder /= title
        shown = printable(str(folder))
        reason = "it has no state of this model, or of this rank"
        end = None
        try:
            end = session_state.resume(folder, attachment.controller, step=settings.start_step)
        except GradSurgeonError as error:
            reason = str(error)
        if end is None:
            say(
                f"{shown} cannot be resumed: {reason}; the rules start without what they had learnt, at step "
                f"{settings.first_step}: pass --start-step N if the script continues a training"
            )
        elif not settings.quiet and _dist.rank() == 0:
            say(f"the rules go on from {shown}, saved before step {end:,}")

    @cached_property
    def _sinks(self) -> list[Sink]:
        sinks: list[Sink] = []
        if self.settings.dry_run or os.environ.get("RANK", "0") != "0":
            return sinks
        for text in dict.fromkeys(self.settings.sinks):
            try:
                sinks.append(at_place(text))
            except Exception as error:  # noqa: BLE001 # no error of a client stops the script
                say(f"the script runs without the sink {printable(text)}: {reason_of(error)}")
        return sinks

    def _note(self, title: str, event: Event) -> None:
        if event.kind in TRIPS and title not in self._tripped:
            self._tripped.append(title)
        self.event_command.event(event)

    def by_first_trip(self) -> list[AttachedModel]:
        """Return the models in the order of their first trips, then the models in which no rule tripped."""
        return sorted(
            self.attached, key=lambda model: [*self._tripped, model.title].index(model.title)
        )

    def _titles(self, origin: str, plan: Plan) -> tuple[str, str]:
        """Return the title of the first model with this origin and these parameters, if there is one, and a new title."""
        titles = {model.title: model.attachment.plan.manifest.params for model in self.attached}
        title = origin
        like = ""
        number = 1
        while title in titles:
            if not like and titles[title] == plan.manifest.params:
                like = title
            number += 1
            title = f"{origin}-{number}"
        return like, title

    def _run_directory(self, title: str) -> Path | None:
        """Return the run directory of a model; further models, sweeps and restarted ranks get folders inside it."""
        if not self.settings.record or self.settings.dry_run:
            return None
        if self._folder and any(model.record == self._folder for model in self.attached):
            return self._folder / title
        base = Path(self.settings.record)
        folder = base
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
        """Refuse rules that match nothing on any rank. Rules of a pack are reported instead, by this rank alone."""
        plans = self._plans()
        if self.guard.lenient:
            for problem in self.shortfalls():
                self._report(problem)
        elif plans:
            complaints, _ = lacking(self.rules, plans)
            if complaints:
                raise BindError(complaints)
        self.checked = True

    def unlike_reviewed(self) -> list[str]:
        """Return complaints if no model has the reviewed names; report the models without them if another one has."""
        file = self.settings.params
        if not file or not self.attached:
            return []
        models = self._manifests()
        complaints = planning.complaints_of(models, file)
        texts = list(chain.from_iterable(complaints.values()))
        if len(complaints) == len(models):
            return texts
        for text in texts:
            self._report(text)
        return []

    def _manifests(self) -> dict[str, Manifest]:
        return {title: plan.manifest for title, plan in self._plans().items()}

    def shortfalls(self) -> list[str]:
        return planning.shortfalls(self.rules, self._manifests())


def say_from_rank(text: str) -> None:
    """Write a line on every rank. The first rank is not named."""
    rank = _dist.rank()
    if rank:
        text = f"rank {rank}: {text}"
    write([f"gradsurgeon: {text}"], 0)
