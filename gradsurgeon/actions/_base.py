"""The base of all rules: selection, schedule, and the contract of an action.

Each action has one file in this folder: a class derived from one of `_kinds`, with options, examples and
`compile`. `gradsurgeon.actions` finds these files and keeps no list. They import torch only when a rule is
compiled, because linting a rule file must not need torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from gradsurgeon.actions._effects import Effect
from gradsurgeon.actions._fields import (
    MAX_FLAWS,
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
from gradsurgeon.actions._options import Expect, Options, Steps, Where, keys_of
from gradsurgeon.errors import did_you_mean

Point = Literal["backward", "accumulated", "step"]
Moment = Literal["forward", "backward", "accumulated", "step", "updated"]
Role = Literal["edit", "observe", "trap", "capture", "freeze", "check"]
POINTS: tuple[Point, ...] = ("backward", "accumulated", "step")
MOMENTS: tuple[Moment, ...] = ("forward", *POINTS, "updated")

GRADIENTS_ONLY = "`when` is for edits of outputs and inputs: gradients exist in training only"

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
    no_at_reason: ClassVar[str] = ""
    # Whether editing the parts of a sum is editing the sum.
    linear: ClassVar[bool] = True
    # Whether the rule needs a number of a whole gradient, such as a norm.
    measures: ClassVar[bool] = False
    # Whether the gradient from the script, before any edit at `step`, decides the effect.
    judges_first: ClassVar[bool] = False
    # What to write for `tensor`.
    tensor_hints: ClassVar[Mapping[TargetKind, str]] = {
        "params": "leave `tensor` out, or write `value` or `update` with `norm-log`",
        "modules": "write `output`, `input`, `output.grad` or `input.grad`, or one tensor of it by path, such "
        "as `output[0].grad`",
        "tensors": "write `grad` or `value`",
    }
    # Whether the rule can read weights and what updates change, besides gradients.
    reads_weights: ClassVar[bool] = False
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
            description="Which tensor: of a parameter `grad`, or where an action records it `value` or "
            "`update`; of a module `output`, `input`, `output.grad`, `input.grad`, or one by path as "
            "`output[0].grad`; of a tag `grad` or `value`."
        ),
    ] = None
    exclude: Annotated[Patterns, Field(description="Patterns of excluded names.")] = ()
    where: Annotated[Where, Field(description="Further conditions on the matches.")] = Where()
    at: Annotated[Point | None, Field(description="The moment at which the rule acts.")] = None
    steps: Annotated[Steps, Field(description="The steps in which the rule acts.")] = Steps()
    expect: Annotated[Expect | None, Field(description="Assertion on the matches.")] = None
    optional: Annotated[
        bool,
        Field(description="Matching nothing is no error."),
    ] = False
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
        return next(kind for kind in TARGETS if getattr(self, kind) is not None)

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
            return (self.at or self.points[0]) if self.ref.grad else "updated"
        return "backward" if self.ref.grad else "forward"

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
    def hides_overflow(self) -> bool:
        """Whether the rule replaces non-finite elements, which a scaler must see."""
        return False

    @property
    def may_overflow(self) -> bool:
        """Whether the rule can make a finite gradient non-finite."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the rule for a reader of the plan, beside its matches."""
        return ()

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of the names that the rule selects."""
        return tuple(getattr(self, self.target))

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        """Yield the flaws of target and `at`; actions add the flaws of their options."""
        if cls is Rule:  # the action is unknown
            return
        named = [kind for kind in TARGETS if given.get(kind) is not None]
        if not named:
            names = ", ".join(f"`{kind}`" for kind in cls.targets)
            choice = f"one of {names}" if len(cls.targets) > 1 else names
            key = cls.targets[0]
            message = f"missing key `{key}`: a rule names its target by {choice}"
            yield Flaw(key, message, "add patterns of names", missing=True, check="missing-key")
        elif len(named) > 1:
            message = f"a rule has one target, found {' and '.join(f'`{kind}`' for kind in named)}"
            yield Flaw(named[1], message, "write one rule for each", key=True)
        else:
            yield from cls._flaws_of_target(named[0], given)
            if named[0] != "params" and cls.takes_at:
                if given.get("at") is not None:
                    message = (
                        f"`at` is for `params`: {named[0]} act at the moment the tensor exists"
                    )
                    yield Flaw("at", message, "remove it", key=True)
                return
        yield from cls._at_flaws(given.get("at"))

    @classmethod
    def _flaws_of_target(cls, target: TargetKind, given: Mapping[str, Any]) -> Iterator[Flaw]:
        text, where = given.get("tensor"), given.get("where")
        if target not in cls.targets:
            known = " and ".join(f"`{kind}`" for kind in cls.targets)
            message = f"{cls.name()} acts on {known}, not on `{target}`"
            yield Flaw(target, message, f"name {known.replace(' and ', ' or ')}", key=True)
        elif isinstance(text, str | None) and isinstance(ref := parse_tensor(target, text), str):
            check = "missing-key" if text is None else "bad-value"
            yield Flaw("tensor", ref, cls.tensor_hints[target], missing=text is None, check=check)
        keys = where if isinstance(where, Mapping) else getattr(where, "model_fields_set", ())
        if target == "params":
            yield from cls._flaws_of_weights(text, given.get("at"))
            if "owns_params" in keys:
                message = "`where: {owns_params: ...}` is a condition on modules"
                yield Flaw("where", message, "remove it")
            if given.get("when") is not None:
                yield Flaw("when", GRADIENTS_ONLY, "remove it", key=True)
            return
        if given.get("expect") is not None:
            hint = "remove it, or name `params`"
            yield Flaw("expect", "`expect` counts parameters", hint, key=True)
        known_keys = ["module_type", "owns_params"] if target == "modules" else []
        if wrong := sorted(str(key) for key in keys if key not in known_keys):
            message = f"`where: {{{wrong[0]}: ...}}` is a condition on parameters, not on {target}"
            yield Flaw(
                "where",
                message,
                "use `module_type` or `owns_params`" if known_keys else "remove it",
            )

    @classmethod
    def _flaws_of_weights(cls, tensor: object, at: object) -> Iterator[Flaw]:
        if tensor not in ("value", "update"):
            return
        if not cls.reads_weights:
            message = (
                f"{cls.name()} acts on gradients, and `{tensor}` of a parameter is only recorded"
            )
            yield Flaw("tensor", message, "leave `tensor` out, or use `action: norm-log`")
        elif at is not None:
            message = f"`at` is for gradients: `{tensor}` is recorded once the update is over"
            yield Flaw("at", message, "remove it", key=True)

    @classmethod
    def _at_flaws(cls, at: object) -> Iterator[Flaw]:
        if not cls.takes_at:
            if at is not None:
                message = f"{cls.name()} takes no `at`: {cls.no_at_reason}"
                yield Flaw("at", message, "remove it", key=True, check="unknown-key")
        elif at is None and cls.needs_at:
            message = f"missing key `at`: {cls.name()} has no default, because its meaning differs"
            hint = (
                "`at: step` bounds the final gradient, `at: backward` the contribution of each "
                "backward pass"
            )
            yield Flaw("at", message, hint, missing=True, check="missing-key")
        elif isinstance(at, str) and at in POINTS and at not in cls.points:
            reason = "the action has no such point"
            if at == "accumulated":
                reason = "an edit of accumulated gradients would compound over micro-batches"
            hint = " or ".join(f"`at: {point}`" for point in cls.points)
            yield Flaw("at", f"{cls.name()} cannot act at `{at}`: {reason}", f"use {hint}")

    @classmethod
    def name(cls) -> str:
        """Return the name of the action, as written in a rule file."""
        return str(cls.model_fields["action"].default)

    def complex_problem(self) -> str:
        """Return why the rule cannot act on complex gradients; empty if it can."""
        return ""

    def compile(self) -> Effect:
        """Return the effect of the rule. May need torch; called once per session."""
        # Not abstract: a rule with an unknown action is checked as a plain `Rule`.
        raise NotImplementedError

    @classmethod
    def __pydantic_init_subclass__(cls, **_options: Any) -> None:
        """Register an action by its name when its class is defined."""
        if "action" not in inspect.get_annotations(cls):  # a kind of actions, or a variant of one
            return
        name, problem = cls.name(), ""
        if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) is None:
            problem = 'give it a name: `action: Literal["my-action"] = "my-action"`'
        elif not hasattr(cls, "role"):
            problem = "derive it from EditRule, ObserverRule, TrapRule, CheckRule, CaptureRule or FreezeRule"
        elif inspect.isabstract(cls):
            problem = "define `compile`"
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
    kind, flaws = _action_of(entry)
    options = dict(entry)
    if kind is None:
        # The other keys may be options of the action that was meant. A module of the user may define it.
        known = {key for action in known_actions.values() for key in keys_of(action)}
        name = entry.get("action")
        is_slip = isinstance(name, str) and ":" not in name
        options = {
            key: value
            for key, value in entry.items()
            if key in keys_of(Rule) or not isinstance(key, str) or (is_slip and key not in known)
        }
        if options.get("action", "") is not None:
            options["action"] = "unknown"
    elif "action" in options:
        options["action"] = kind.name()
    rule = None
    try:
        rule = (kind or Rule).model_validate(options, context=known_actions)
    except ValidationError as errors:
        (error,) = errors.errors(include_url=False)
        flaws += error["ctx"]["flaws"]
    if len(flaws) > MAX_FLAWS:
        message = f"over {MAX_FLAWS} problems in one rule: the rest of it is not checked"
        flaws[MAX_FLAWS:] = [Flaw("", message, "correct these first", check="too-large")]
    return (None if flaws else rule), flaws


def _action_of(entry: Mapping[Any, Any]) -> tuple[type[Rule] | None, list[Flaw]]:
    known = f"known: {', '.join(known_actions)}"
    key = "action"
    if key not in entry:
        given = [one for one, value in entry.items() if isinstance(one, str) and value is not None]
        misspelt = [one for one in given if did_you_mean(one, [key])]
        if not misspelt:
            message, hint = "missing key `action`", f"add `action`; {known}"
            return None, [Flaw(key, message, hint, missing=True, check="missing-key")]
        key = misspelt[0]  # the validation reports the misspelling
    action = entry[key]
    if action is None:
        return None, []
    if not isinstance(action, str):
        message = f"`action` must be the name of an action, found {described(action)}"
        return None, [Flaw(key, message, known, check="wrong-type")]
    module, _, name = action.rpartition(":")
    if name in known_actions and module in ("", known_actions[name].__module__):
        return known_actions[name], []
    message = f"unknown action `{action[:60]}`"
    near = did_you_mean(action, known_actions)
    hint = f"{near} {known}" if near else f"{known}; an action of your own is written MODULE:NAME"
    if module:
        message = f"no module `{module[:60]}` with the action `{name[:60]}` has been imported"
        command = f"gradsurgeon lint --import {module[:60]}"
        hint = f"rule files import nothing: import it before `apply`, or by `{command}`"
    elif action == "clip":  # `clip-norm` is not the most similar name
        hint = f"did you mean `clip-norm`, which bounds a norm, or `clamp`? {known}"
    return None, [Flaw(key, message, hint, check="unknown-action")]
