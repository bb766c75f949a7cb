"""The session that `apply` returns: control, records and events of the rules on a model, and its display."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from torch import Tensor

from gradsurgeon.actions import CaptureRule, ObserverRule
from gradsurgeon.common import _html
from gradsurgeon.common.events import Event, RuleStatus, is_trip
from gradsurgeon.errors import GradSurgeonError, RecordError, did_you_mean, printable
from gradsurgeon.language.planning import ModuleEntry, Param, Plan
from gradsurgeon.language.planning.run_json import about
from gradsurgeon.records.captured import CaptureKey
from gradsurgeon.records.store import Lookup, RecordQueries
from gradsurgeon.records.store.recorded import Recorded
from gradsurgeon.report import pictures
from gradsurgeon.runtime import session_state
from gradsurgeon.runtime.attachment import Attachment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Answer = TypeVar("Answer")
_PAUSED = "the session pauses on this rank: pause it on all ranks at the same place, or ranks wait and weights drift apart"


class Session(RecordQueries):
    """Rules acting on one model, until `remove()` or the end of the ``with`` block.

    `gradsurgeon.apply` makes it. The rules stay as long as the model, or some module of it that has parameters, lives, even
    if the caller drops the session. Copies of a model that has a session as attribute have ``None`` instead.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    @property
    def plan(self) -> Plan:
        """The bindings of each rule: ``print(session.plan)`` shows a table."""
        return self._attachment.plan

    def remove(self) -> None:
        """Take everything off the model and its optimizers. Records and events stay readable.

        Warns of rules that never fired if gradients came and their optimizer never stepped. A second call does nothing. Raises
        if a trap stopped the last update on a device, or adds a note to an exception that is being handled.
        """
        self._attachment.end()

    def pause(self) -> None:
        """Stop all rules until `resume()`. Steps are still counted.

        On several ranks, pause all of them at the same place. Under DDP a paused rank leaves its gradients unedited while the
        others edit theirs, so the weights drift apart. Rules that need whole gradients of sharded parameters wait for a paused
        rank until the time limit of the process group. Sharded parameters have no records of passes in which one rank is paused.
        """
        context = self._attachment.context
        context.is_paused = True
        if context.ranks.are_several:
            context.event_log.notice_once("paused", _PAUSED)

    def resume(self) -> None:
        """Resume the rules after `pause()`."""
        self._attachment.context.is_paused = self._attachment.removed

    @property
    def step(self) -> int:
        """The number of the next update. It starts at ``start_step`` and includes skipped updates.

        If several optimizers update the model, this is the largest of their numbers.
        """
        return self._attachment.step

    def tick(self) -> bool:
        """Mark one update of a script without a torch optimizer, right before it happens.

        Returns:
            Whether to update: ``False`` if a trap with ``then: skip-step`` tripped.

        Raises:
            NonFiniteGradientError: a trap stops the update.
            GradSurgeonError: a torch optimizer owns the parameters, so its steps are counted already.
        """
        controller = self._attachment.controller
        if controller.steps.owned:
            raise GradSurgeonError(
                "tick() marks manual updates, but a torch optimizer owns the parameters: remove the call"
            )
        return self._attachment.removed or controller.manual.tick()

    @property
    def events(self) -> list[Event]:
        """The events so far, oldest first. Does not wait for the device, as `status()` does."""
        return self._attachment.events

    def status(self) -> dict[str, RuleStatus]:
        """Return what each rule has done so far, by its id. Waits for the device."""
        return self._attachment.status()

    def recorded(self) -> Recorded:
        """Return what has been recorded so far, as a report reads it. Waits for the device."""
        attachment = self._attachment
        options = {"mode": attachment.context.mode, "start_step": attachment.context.counters.start}
        # Passes that come later wait for updates that come later.
        pending = attachment.pending_steps()
        records = attachment.records
        return Recorded(
            meta={**about(self.plan), **options},
            aliases=self._lookup().aliases,
            series=list(records),
            pending=pending,
            dropped=records.dropped,
            events=self.events,
            statuses=self.status(),
            next_step=self.step,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the clocks and the learnt state of rules, for a checkpoint. Waits for the device.

        Returns:
            Plain tensors on the host, numbers and texts, which ``torch.load(weights_only=True)`` reads. For sharded
            models each rank returns the same.

        Raises:
            TrapError: a trap stopped the last update on a device.
        """
        self._attachment.settle(raises=True)
        return session_state.state_dict(self._attachment.controller)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from another session's state: a run that is stopped and resumed behaves as an uninterrupted run.

        Call it before the first step. A `GradSurgeonWarning` names each rule or parameter that the state lacks, or that has
        changed since; rules restart what they learn there.

        Args:
            state: the result of `state_dict`.

        Raises:
            GradSurgeonError: the state is not of a session, or is damaged; nothing has changed then.
        """
        session_state.load_state_dict(self._attachment.controller, state)

    def captured(self, rule: str) -> dict[CaptureKey, Tensor]:
        """Return the tensors that a `capture` rule has kept, oldest first.

        Args:
            rule: the id of the rule.

        Returns:
            Detached copies, each with the shape and dtype of its tensor, by ``(name, step, call)``;
            ``call`` counts from 0 within a step.

        Raises:
            KeyError: no `capture` rule has this id.
        """
        known = self._capture_rules
        if rule not in known:
            hint = did_you_mean(rule, known) or f"there are: {', '.join(known) or 'none'}"
            raise KeyError(f"no capture rule {rule!r}; {hint}")
        return self._attachment.context.captures.tensors_of(rule)

    def plot(
        self,
        kind: Literal["norms", "features"] = "norms",
        *,
        name: str | Sequence[str] | None = None,
        rule: str | None = None,
        step: int | None = None,
        call: int | None = None,
        sample: int = 0,
    ) -> Figure:
        """Draw recorded or captured data. Needs matplotlib, opens no window, and waits for the device.

        * ``"norms"`` (takes `name`, `rule`): l2 norms over the steps. Without `name`, the norm of all parameters
          together and the ten worst layers: non-finite first, then the largest spikes. A gap is a step without a
          gradient or with a norm of 0, a cross at the top a non-finite norm, a vertical line a trap or a skipped step.
        * ``"features"`` (`name`, `rule`, `step`, `call`, `sample`): the first 64 channels of a module's tensor that a
          `capture` has kept, each scaled from its smallest to its largest element.

        Args:
            kind: the picture.
            name: a name, a pattern as in a rule file, or several of them; for captured tensors, exactly one tensor.
            rule: the id of the rule.
            step: the number of the update; by default the last update of which a tensor was kept.
            call: the call of the module in that step, from 0; by default the last call.
            sample: the place in the batch, from 0.

        Returns:
            A figure, which a notebook shows directly; ``figure.savefig("norms.png")`` writes it to a file.

        Raises:
            ValueError: there is no such picture, an option does not apply to it, a tensor does not have the shape
                (N, C, H, W), or there are several to choose from.
            KeyError: a name or pattern matches nothing, or there is no such `capture` rule.
            RecordError: there is nothing to draw: the text names the rule to add.
            GradSurgeonError: matplotlib is missing.
        """
        pictures.check(kind, ["norms", "features"])
        plots = pictures.drawing()
        if kind != "features":
            if (step, call, sample) != (None, None, 0):
                raise ValueError(f"the picture {kind!r} takes only name= and rule=")
            figure: Figure = plots.norms(self, name=name, rule=rule)
        else:
            rule = rule or self._capture_rule()
            figure = plots.features(
                self.captured(rule), rule=rule, name=name, step=step, call=call, sample=sample
            )
        return figure

    @property
    def _capture_rules(self) -> list[str]:
        return [rule.id for rule in self.plan.rules.rules if isinstance(rule, CaptureRule)]

    def _capture_rule(self) -> str:
        ids = self._capture_rules
        if not ids:
            raise RecordError(
                'no rule keeps tensors: add one, such as {id: maps, action: capture, modules: "layer4", tensor: output}'
            )
        if len(ids) > 1:
            raise ValueError(f"several rules keep tensors: pass rule= one of {', '.join(ids)}")
        return ids[0]

    def _asked(self, name: str, stat: str, answer: Callable[[], Answer]) -> Answer:
        # The lookup sends all measurements of this rank on their way before it asks.
        canonical = self._lookup().aliases.get(name, name)
        return self._attachment.context.recorder.shared.ask(canonical, stat, answer)

    def _lookup(self) -> Lookup:
        records = self._attachment.records
        # A module can return several tensors, each with a name of its own.
        measured: dict[str, set[str]] = {}
        for series in records:
            measured.setdefault(series.key.rule, set()).update(series.key.names)
        logged = {}
        for rule in self.plan.rules.rules:
            if isinstance(rule, ObserverRule):
                bound = {binding.name for binding in self.plan.of(rule.id)}
                if rule.compile().joins:
                    bound = measured.setdefault(rule.id, {rule.id})
                logged[rule.id] = getattr(rule, "stats", ()), bound | measured.get(rule.id, set())
        known: dict[str, None] = {}
        aliases = {}
        manifest = self.plan.manifest
        things: list[ModuleEntry | Param] = [*manifest.params, *manifest.modules]
        for thing in things:
            known[thing.name] = None
            aliases.update(dict.fromkeys(thing.aliases, thing.name))
        known |= dict.fromkeys(sorted(set().union(*measured.values())))
        return Lookup(tuple(known), aliases, logged, records.series)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._attachment.end()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Copies and files get `None` instead of the session, without a name of this package.
        return type(None), ()

    def __repr__(self) -> str:
        attachment = self._attachment
        plan = self.plan
        words = [f"step {self.step}"]
        if attachment.removed:
            words.append("removed")
        elif attachment.context.paused:
            words.append("paused")
        if attachment.context.mode == "observe":
            words.append("observing only")
        # A cut by a trap is no trip.
        cutting = {rule.id for rule in plan.rules.rules if rule.edits}
        traps = [event for event in attachment.events if is_trip(event, cutting)]
        last = "no trap has tripped"
        if traps:
            trip = traps[-1]
            last = f"the last trap tripped at step {trip.step}: rule {trip.rule}"
            if trip.name:
                last += f" on {trip.name}"
        # A debugger must not make the training wait.
        statuses = attachment.status(wait=False).values()
        fired = [status for status in statuses if status.fired > 0]
        lines = (
            f"Session of {plan.rules.file} on {plan.subject} ({len(plan.manifest.params)} parameters)",
            f"  {', '.join(words)}; {last}",
            f"  {len(fired)} of {len(statuses)} rules have fired",
        )
        return "\n".join(map(printable, lines))

    def _repr_html_(self) -> str:
        more = "print(session.plan), gradsurgeon.report.summary(session), session.plot()"
        return _html.pre(f"{self!r}\nto see more: {more}")


def attachment_of(session: Session) -> Attachment:
    """Return the attachment behind a session, for other parts of this package."""
    return session._attachment  # noqa: SLF001 # users have no use for it
