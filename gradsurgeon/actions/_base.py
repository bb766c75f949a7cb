"""The base of all rules: selection, schedule, and the contract of an action."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gradsurgeon.actions._effects import Compiled
from gradsurgeon.actions._fields import (
    STATE_NAME,
    TARGETS,
    Flaw,
    Glob,
    Patterns,
    RuleId,
    TargetKind,
    TensorRef,
    described,
    parse_tensor,
)
from gradsurgeon.actions._options import Expect, Options, Steps, Where, read_options
from gradsurgeon.actions._synonyms import action_meant
from gradsurgeon.errors import did_you_mean

Point = Literal["backward", "accumulated", "step"]
Moment = Literal["forward", "backward", "accumulated", "step", "updated"]
Role = Literal["edit", "observe", "trap", "capture", "freeze", "check"]
POINTS: tuple[Point, ...] = ("backward", "accumulated", "step")
MOMENTS: tuple[Moment, ...] = ("forward", *POINTS, "updated")

GRADIENTS_ONLY = "`when` is for edits of outputs and inputs: gradients exist in training only"

# The hints on `tensor` by target.
_TENSORS: Mapping[TargetKind, str] = {
    "params": "leave `tensor` out, or write `value`, `update` or `state.NAME` with `norm-log`",
    "modules": "write `output`, `input`, `output.grad` or `input.grad`, or one by path as `output[0].grad`",
    "tensors": "write `grad` or `value`",
}

# Every defined action by name: the actions of gradsurgeon, and a user's own.
known_actions: dict[str, type[Rule]] = {}


@dataclass(frozen=True, slots=True)
class Example:
    """The effect of an action on one gradient, or on the gradients of ``losses``: documentation and test at once.

    Exactly one of ``expect`` (an edited gradient), ``record`` (statistics) and ``trips`` is given.
    """

    options: Mapping[str, Any]
    grad: Sequence[float] = ()
    expect: Sequence[float] | None = None
    record: Mapping[str, float] | None = None
    trips: bool | None = None
    losses: Mapping[str, Sequence[float]] | None = None


class Rule(Options):
    """One rule: which tensors, at which moment, and (in the subclass) what to do with them."""

    # The kind of the action in one word, for files and people; code asks for the class of the kind.
    role: ClassVar[Role]
    # The targets of the action.
    targets: ClassVar[tuple[TargetKind, ...]] = TARGETS
    # The possible points of the action; the first is the default unless `at` must be given.
    points: ClassVar[tuple[Point, ...]] = ("backward", "step")
    needs_at: ClassVar[bool] = False
    takes_at: ClassVar[bool] = True
    # Whether editing the parts of a sum is editing the sum.
    linear: ClassVar[bool] = True
    # Whether the rule needs a number of a whole gradient, such as a norm.
    measures: ClassVar[bool] = False
    # Whether the gradient from the script, before any edit at `step`, decides the effect.
    judges_first: ClassVar[bool] = False
    # Which of `value`, `update` and `state.NAME` the rule takes as `tensor` of a parameter, besides gradients.
    of_weights: ClassVar[tuple[str, ...]] = ()
    # The option that a target needs.
    needs: ClassVar[Mapping[TargetKind, str]] = {}
    # Options of which at least one must be given.
    either: ClassVar[tuple[str, ...]] = ()
    EXAMPLES: ClassVar[tuple[Example, ...]] = ()

    id: Annotated[RuleId, Field(description="Unique name of the rule, kebab-case.")]
    action: Annotated[str, Field(description="What the rule does.")]
    params: Annotated[
        Patterns | None,
        Field(description="Patterns of parameter names; `*` crosses dots. Always quoted."),
    ] = None
    modules: Annotated[
        Patterns | None, Field(description='Patterns of module names; "." is the root.')
    ] = None
    tensors: Annotated[
        Patterns | None, Field(description="Patterns of names given by `gradsurgeon.tag`.")
    ] = None
    tensor: Annotated[
        str | None,
        Field(
            description="Which tensor: of a parameter `grad`, or where an action takes it `value`, "
            "`update` or `state.NAME`; of a module `output`, `input`, `output.grad`, `input.grad`, or one by path as "
            "`output[0].grad`; of a tag `grad` or `value`."
        ),
    ] = None
    exclude: Annotated[Patterns, Field(description="Patterns of excluded names.")] = ()
    where: Annotated[Where, Field(description="Further conditions on the matches.")] = Where()
    at: Annotated[Point | None, Field(description="The moment at which the rule acts.")] = None
    steps: Annotated[Steps, Field(description="The steps in which the rule acts.")] = Steps()
    expect: Annotated[Expect | None, Field(description="Assertion on the matches.")] = None
    optional: Annotated[bool, Field(description="Matching nothing is no error.")] = False
    model: Annotated[
        Glob | None, Field(description="Glob over the class name of the root of the model.")
    ] = None
    when: Annotated[
        Literal["train"] | None,
        Field(description="Edit outputs and inputs in training mode only, not in every forward."),
    ] = None

    @property
    def target(self) -> TargetKind:
        """The kind of thing whose names the patterns match."""
        # A plan asks some twenty times per rule, so there is no loop.
        if self.params is not None:
            return "params"
        if self.modules is not None:
            return "modules"
        return "tensors"

    @property
    def ref(self) -> TensorRef:
        """The tensor that the rule means."""
        tensor = parse_tensor(self.target, self.tensor)
        if isinstance(tensor, str):  # validation has refused it
            raise TypeError(tensor)
        return tensor

    @property
    def point(self) -> Moment:
        """The moment at which the rule acts, the default of its action filled in."""
        if self.target == "params":
            if self.ref.grad:
                return self.at or self.points[0]
            return "updated"
        if self.ref.grad:
            return "backward"
        return "forward"

    @property
    def order(self) -> int:
        """The position of the rule among all rules on a tensor; file order decides between equal numbers."""
        return 2 * MOMENTS.index(self.point)

    @property
    def edits(self) -> bool:
        """Whether the rule changes its matches."""
        return self.role == "edit"

    @property
    def keeps_zero(self) -> bool:
        """Whether a zero stays a zero: then the rule can act on the stored values of a sparse gradient."""
        return True

    @property
    def joins_norms(self) -> bool:
        """Whether the rule compares one norm over several gradients with its bound."""
        return False

    @property
    def judges_losses(self) -> bool:
        """Whether its `tensors` are losses of updates, not tags."""
        return False

    @property
    def hides_overflow(self) -> bool:
        """Whether the rule replaces non-finite elements, which a scaler must see."""
        return False

    @property
    def may_overflow(self) -> bool:
        """Whether the rule can make a finite gradient non-finite."""
        return False

    def read_file(self, find: Callable[[str], Path]) -> None:
        """Read what the rule needs of the file that it names; ``find`` returns the path. It may raise `ValueError`."""

    @property
    def file_sha256(self) -> str:
        """The hash of the file that the rule names, empty if there is none: its content is part of the rule."""
        return ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the rule for a reader of the plan, beside its matches."""
        return ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of the names that the rule selects."""
        return tuple(getattr(self, self.target))

    def flaws(self) -> Iterator[Flaw]:
        """Yield the flaws of target and `at`; actions add the flaws of their options."""
        named = [kind for kind in TARGETS if getattr(self, kind) is not None]
        known = " or ".join(f"`{kind}`" for kind in self.targets)
        if not named:
            message = f"missing key `{self.targets[0]}`: a rule names its target by {known}"
            yield Flaw(self.targets[0], message, "add patterns of names", "missing-key")
            return
        target, *others = named
        tensor = parse_tensor(target, self.tensor)
        if others:
            message = f"a rule has one target, found `{'` and `'.join(named)}`"
            yield Flaw(others[0], message, "write one rule for each")
        elif target not in self.targets:
            message = f"{self.name()} acts on {known}, not on `{target}`"
            yield Flaw(target, message, f"name {known}")
        elif isinstance(tensor, str):  # the reason why it is no tensor of the target
            check = "bad-value"
            if self.tensor is None:
                check = "missing-key"
            yield Flaw("tensor", tensor, _TENSORS[target], check)
        yield from self._flaws_of_conditions(target)
        if target == "params":
            yield from self._flaws_of_point()
        elif self.at is not None:
            message = f"`at` is for `params`: {target} act at the moment the tensor exists"
            yield Flaw("at", message, "remove it")

    def _flaws_of_conditions(self, target: TargetKind) -> Iterator[Flaw]:
        conditions: Mapping[TargetKind, set[str]] = {
            "params": Where.model_fields.keys() - {"owns_params"},
            "modules": {"module_type", "owns_params"},
            "tensors": set(),
        }
        for key in sorted(self.where.model_fields_set - conditions[target]):
            yield Flaw(("where", key), f"`{key}` is no condition on {target}", "remove it")
        if target == "params" and self.when is not None:
            yield Flaw("when", GRADIENTS_ONLY, "remove it")
        if target != "params" and self.expect is not None:
            yield Flaw("expect", "`expect` counts parameters", "remove it, or name `params`")

    def _flaws_of_point(self) -> Iterator[Flaw]:
        at = self.at
        kind = self.tensor
        if kind is not None and STATE_NAME.fullmatch(kind):
            kind = "state.NAME"
        if kind in ("value", "update", "state.NAME"):
            yield from self._flaws_of_weights(kind)
        elif at is None:
            if self.needs_at:
                message = (
                    f"missing key `at`: {self.name()} has no default, because its meaning differs"
                )
                hint = (
                    "`at: step` bounds the final gradient, `at: backward` the contribution of each "
                    "backward pass"
                )
                yield Flaw("at", message, hint, "missing-key")
        elif not self.takes_at:
            message = f"{self.name()} takes no `at`: it acts at a moment of its own"
            yield Flaw("at", message, "remove it")
        elif at not in self.points:
            reason = "the action has no such point"
            if at == "accumulated":
                reason = "an edit of accumulated gradients would compound over micro-batches"
            hint = " or ".join(f"`at: {point}`" for point in self.points)
            yield Flaw("at", f"{self.name()} cannot act at `{at}`: {reason}", f"use {hint}")

    def _flaws_of_weights(self, kind: str) -> Iterator[Flaw]:
        if kind not in self.of_weights:
            message = f"{self.name()} does not take `{self.tensor}` of a parameter"
            hint = "leave `tensor` out"
            if self.of_weights:
                hint = f"{hint}, or write `{'` or `'.join(self.of_weights)}`"
            yield Flaw("tensor", message, hint)
        elif self.at is not None:
            message = f"`{self.tensor}` exists once the update is over, and `at` is a moment before"
            yield Flaw("at", message, "remove it")

    @classmethod
    def name(cls) -> str:
        """Return the name of the action, as written in a rule file."""
        return str(cls.model_fields["action"].default)

    def param_problem(
        self,
        names: Sequence[str],  # noqa: ARG002 # of derived rules
        shape: tuple[int, ...],  # noqa: ARG002 # the same
    ) -> str:
        """Return why the rule cannot act on a parameter, after its name; empty if it can.

        ``names`` are the names of the parameter, of a tied one several; the first is that in records.
        """
        return ""

    def complex_problem(self) -> str:
        """Return why the rule cannot act on complex gradients; empty if it can."""
        return ""

    def compile(self) -> Compiled:
        """Return the effect of the rule. May need torch; called once per session."""
        raise NotImplementedError

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: Any) -> None:
        """Register an action by its name when its class is defined."""
        if "action" not in inspect.get_annotations(cls):  # a kind of actions, or a variant of one
            return
        name = cls.name()
        problem = ""
        if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) is None:
            problem = 'give it a name: `action: Literal["my-action"] = "my-action"`'
        elif not hasattr(cls, "role") or inspect.isabstract(cls):
            problem = "derive it from a kind of rule, such as EditRule, and define `compile`"
        elif cls.role == "edit" and "accumulated" in cls.points:
            problem = "an edit cannot act at `accumulated`: remove it from `points`"
        other = known_actions.get(name, cls)
        # A cell of a notebook defines its classes again in each run.
        if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            problem = f"{other.__module__}.{other.__qualname__} is the action `{name}` already"
        if problem:
            raise TypeError(f"{cls.__module__}.{cls.__qualname__} is no action: {problem}")
        known_actions[name] = cls


def in_order(rules: Iterable[Rule]) -> list[Rule]:
    """Return rules, given in file order, in the order in which they act on one tensor."""
    # The sort is stable, so rules of one moment stay in file order.
    return sorted(rules, key=lambda rule: rule.order)


def check_rule(entry: Mapping[Any, Any]) -> tuple[Rule | None, list[Flaw]]:
    """Return the rule that one mapping of a file describes, or everything that is wrong with it."""
    kind = _action_of(entry)
    if isinstance(kind, Flaw):  # the meaning of all other keys depends on the action
        return None, [kind]
    return read_options(kind, {**entry, "action": kind.name()})


def _action_of(entry: Mapping[Any, Any]) -> type[Rule] | Flaw:
    known = f"known: {', '.join(known_actions)}"
    if "action" not in entry:
        return Flaw("action", "missing key `action`", f"add it; {known}", "missing-key")
    action = entry["action"]
    if not isinstance(action, str):
        message = f"`action` must be the name of an action, found {described(action)}"
        return Flaw("action", message, known, "wrong-type")
    module, _, name = action.rpartition(":")
    kind = known_actions.get(name)
    if kind is not None and module in ("", kind.__module__):
        return kind
    message = f"unknown action `{action[:60]}`"
    hint = action_meant(action)
    if module:
        message = f"no module `{module[:60]}` with the action `{name[:60]}` has been imported"
        option = f"--import {module[:60]}"
        hint = (
            f"rule files import nothing: import it before `apply`, or add `{option}` to the command"
        )
    elif not hint:
        near = did_you_mean(action, known_actions)
        hint = (
            f"{near} {known}" if near else f"{known}; an action of your own is written MODULE:NAME"
        )
    return Flaw("action", message, hint, "unknown-action")
