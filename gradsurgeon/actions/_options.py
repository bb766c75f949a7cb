"""A mapping of a rule file, and everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradsurgeon.actions._fields import Dtype, Flaw, Glob, Path, described, flawed
from gradsurgeon.actions._synonyms import key_meant, value_meant
from gradsurgeon.errors import did_you_mean

# Types by what pydantic calls their errors, as the author of a rule file calls them.
_TYPES = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
}

_MAX_FLAWS = 50  # of one mapping: no reader needs more, and the search takes time
_MAX_DEPTH = 3  # of mappings inside a rule


class Options(BaseModel):
    """A mapping of a rule file. Strict, frozen, and without unknown keys."""

    # Strict, because lax mode reads `max: on` as 1.0; frozen, because a plan holds these values; built
    # at first use, because a file uses few of the actions.
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        populate_by_name=True,
        defer_build=True,
    )

    def flaws(self) -> Iterator[Flaw]:
        """Yield the flaws that no single option has."""
        return iter(())

    @model_validator(mode="after")
    def _together(self) -> Self:
        flaws = tuple(self.flaws())
        if flaws:
            raise flawed(*flaws)
        return self


_Model = TypeVar("_Model", bound=Options)


def read_options(model: type[_Model], given: Mapping[Any, Any]) -> tuple[_Model | None, list[Flaw]]:
    """Return the options that a mapping of a file describes, or everything that is wrong with it."""
    options = None
    flaws = list[Flaw]()
    empty = set(_without_value(given))
    try:
        options = model.model_validate(given, by_name=False)
    except ValidationError as errors:
        for error in errors.errors(include_url=False)[: _MAX_FLAWS + 1]:
            # pydantic marks a wrong key of a mapping by one more step.
            path = tuple(step for step in error["loc"] if step != "[key]")
            if error["type"] == "extra_forbidden":
                empty.discard(path)
            if path not in empty:
                flaws += _flaws_of(model, given, path, error)
    if len(flaws) > _MAX_FLAWS:
        message = f"over {_MAX_FLAWS} problems in one rule: the rest of it is not checked"
        flaws[_MAX_FLAWS:] = [Flaw("", message, "correct these first", "too-large")]
    for path in sorted(empty, key=str):
        message = f"`{path[-1]}` has no value"
        flaws.append(Flaw(path, message, "write a value after the colon", "wrong-type"))
    return None if flaws else options, flaws


def _without_value(given: Mapping[Any, Any], at: Path = ()) -> Iterator[Path]:
    """Yield the keys without a value. In Python they may be None, and in a file they may not."""
    for key, value in given.items():
        if value is None:
            yield (*at, key)
        elif isinstance(value, dict) and len(at) < _MAX_DEPTH:
            yield from _without_value(value, (*at, key))


def keys_of(model: type[Options]) -> dict[str, Any]:
    """Return the fields of a mapping by the keys of a rule file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _flaws_of(
    model: type[Options], given: Mapping[Any, Any], path: Path, error: Any
) -> Iterator[Flaw]:
    kind = error["type"]
    field, fields = _field_at(model, path)
    key = next((step for step in reversed(path) if isinstance(step, str)), "")
    if kind == "flawed":
        for flaw in error["ctx"]["flaws"]:
            at = (*path, *flaw.path)
            key = str(at[0]) if at else ""
            # A flaw of several options has the whole rule as its input.
            value = error["input"] if path else given.get(key)
            yield replace(flaw, at=at, hint=value_meant(key, value) or flaw.hint)
    elif kind == "invalid_key":
        yield Flaw(path[:-1], f"keys are texts, found {described(path[-1])}", check="key-type")
    elif kind == "extra_forbidden":
        unused = [name for name in fields if name not in given]
        hint = key_meant("/".join(map(str, path)), given) or did_you_mean(key, unused)
        hint = hint or f"known: {', '.join(fields)}"
        yield Flaw(path, f"unknown key `{key[:60]}`", hint, "unknown-key")
    elif kind == "missing":
        hint = f"add it: {(field.description or '').rstrip('.')}"
        yield Flaw(path, f"missing key `{key}`", hint, "missing-key")
    elif kind in ("string_too_short", "too_short"):
        yield Flaw(path, f"`{key}` is empty", "write one entry or more")
    else:
        yield _wrong_value(field, path, key, error)


def _field_at(model: type[Options], path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the field to which a path leads, and the fields inside it by their keys."""
    field = None
    fields = keys_of(model)
    for step in path:
        if step not in fields:
            break
        field = fields[str(step)]
        kinds = [kind for kind in get_args(field.annotation) if isinstance(kind, type)]
        if isinstance(field.annotation, type):
            kinds = [field.annotation]
        fields = {}
        for kind in kinds:
            if issubclass(kind, Options):
                fields = keys_of(kind)
    return field, fields


def _hint_on(field: Any, kind: str, value: Any, choices: list[str], wanted: str) -> str:
    """Return what to write in place of a wrong value, empty if only the message can say."""
    if field.examples:
        return f"such as {field.examples[0]}".replace("'", "")
    if choices and isinstance(value, str):
        return did_you_mean(value, choices)
    if kind == "tuple_type":
        return 'quote patterns, such as "*.weight"'
    if kind not in _TYPES:
        return ""
    if isinstance(value, str):
        return f"write {wanted} without quotes"
    return f"write {wanted}"


def _wrong_value(field: Any, path: Path, key: str, error: Any) -> Flaw:
    kind = error["type"]
    value = error["input"]
    text = error["msg"]
    wanted = _TYPES.get(kind) or text.removeprefix("Input should be ").replace("'", "`")
    if wanted == text:  # of a validator of an action of the user
        return Flaw(path, f"`{key or 'the rule'}`: {text}")
    choices: list[str] = []
    if kind == "literal_error":
        choices = error["ctx"]["expected"].split("'")[1::2]
    hint = value_meant(key, value)
    # Another action may take more values.
    is_of_key = hint.startswith(f"did you mean `{key}: ")
    if choices and is_of_key and not any(f": {choice}" in hint for choice in choices):
        hint = ""
    if not hint:
        hint = _hint_on(field, kind, value, choices, wanted)
    check = "wrong-type" if kind in _TYPES else "bad-value"
    return Flaw(path, f"`{key}` must be {wanted}, found {described(value)}", hint, check)


class Steps(Options):
    """The schedule of a rule, in updates of the optimizer that owns the parameter."""

    from_: Annotated[int, Field(alias="from", ge=0, description="First step, inclusive.")] = 0
    to: Annotated[int | None, Field(ge=1, description="Last step, exclusive.")] = None
    every: Annotated[
        int, Field(ge=1, description="Act on every n-th step, counted from `from`.")
    ] = 1

    def flaws(self) -> Iterator[Flaw]:
        if self.to is not None and self.to <= self.from_:
            message = f"the schedule is empty: `to` ({self.to}) is not after `from` ({self.from_})"
            yield Flaw("to", message, "`to` is exclusive: make it larger than `from`")

    @property
    def always(self) -> bool:
        return self.from_ == 0 and self.to is None and self.every == 1

    @property
    def text(self) -> str:
        """The steps as a table has them: ``all``, or such as ``100..199 every 10``."""
        parts = []
        if self.to is not None:
            parts.append(f"{self.from_}..{self.to - 1}")  # a range names its last number everywhere
        elif self.from_:
            parts.append(f"{self.from_}..")
        if self.every > 1:
            parts.append(f"every {self.every}")
        return " ".join(parts) or "all"

    @property
    def in_words(self) -> str:
        """The same in a sentence, such as ``in steps 100..199 every 10``."""
        if self.always:
            return "in every step"
        if self.to is None and self.every == 1:
            return f"from step {self.from_} for ever"
        if self.to is None and not self.from_:
            return f"{self.text} steps"
        return f"in steps {self.text}"

    def includes(self, step: int) -> bool:
        if step < self.from_ or (self.to is not None and step >= self.to):
            return False
        return (step - self.from_) % self.every == 0

    def covers(self, other: Steps) -> bool:
        """Tell whether this schedule has all steps of another one."""
        if not self.includes(other.from_) or other.every % self.every:
            return False
        return self.to is None or (other.to is not None and other.to <= self.to)

    def meets(self, other: Steps) -> bool:
        """Tell whether two schedules have a step in common."""
        first, second = sorted((self, other), key=attrgetter("from_"))
        common = math.gcd(first.every, second.every)
        gap = second.from_ - first.from_
        if gap % common:
            return False
        # The smallest number of periods of the second schedule after which the first is also due.
        period = first.every // common
        turns = (-gap // common) * pow(second.every // common, -1, period) % period
        step = second.from_ + turns * second.every
        return first.includes(step) and second.includes(step)


class Numel(Options):
    """Bounds on the number of elements, both inclusive."""

    min: Annotated[int | None, Field(ge=0, description="Least number.")] = None
    max: Annotated[int | None, Field(ge=0, description="Largest number.")] = None

    def flaws(self) -> Iterator[Flaw]:
        if self.min is not None and self.max is not None and self.min > self.max:
            message = f"min ({self.min}) is greater than max ({self.max})"
            yield Flaw("min", message, "exchange them")


class Where(Options):
    """Conditions beside the name; all given conditions must hold."""

    module_type: Annotated[
        Glob | None,
        Field(description="Glob over the class names of the owning module, base classes included."),
    ] = None
    owns_params: Annotated[
        bool | None, Field(description="Of modules: whether the module has parameters of its own.")
    ] = None
    ndim: Annotated[int | None, Field(ge=0, description="Number of dimensions.")] = None
    dtype: Annotated[Dtype | None, Field(description="Such as float32 or bfloat16.")] = None
    numel: Annotated[Numel | None, Field(description="Bounds on the number of elements.")] = None
    requires_grad: Annotated[bool | None, Field(description="Trainable when binding.")] = None


class Expect(Options):
    """An assertion on the matches of a rule, checked whenever it is bound."""

    params: Annotated[int, Field(ge=0, description="Exact number of distinct parameters.")]
