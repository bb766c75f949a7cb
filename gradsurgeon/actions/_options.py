"""A mapping of a rule file: its keys, its values, and every flaw of it in one pass.

pydantic alone stops early: it does not judge fields together while one of them is wrong, and it has no
place for a missing key. So the validator of `Options` first takes out unknown keys and keys without a
value. pydantic then validates the rest, nested mappings in the same way, and `flaws` judges the raw options.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradsurgeon.actions._fields import (
    MAX_FLAWS,
    Dtype,
    Flaw,
    Glob,
    Path,
    described,
    flawed,
    is_whole,
    written,
)
from gradsurgeon.errors import did_you_mean

_TYPE_NAMES = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "a text",
    "string_too_short": "a text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "too_short": "one entry or more",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "{:g} or more"),
    "greater_than": ("gt", "more than {:g}"),
    "less_than": ("lt", "less than {:g}"),
}


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

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        """Yield the flaws that no single field can see, from the raw options.

        It reads raw options rather than validated ones, so a file shows these flaws in the same
        pass as a misspelt key beside them. It must bear options of any type.
        """
        del given
        return iter(())

    @model_validator(mode="wrap")
    @classmethod
    def _all_flaws(cls, given: Any, handler: Any, info: Any) -> Self:
        # The context of a mapping of a file is the known actions. In Python a key may be None, too.
        if info.context is not None and isinstance(given, dict):
            read: Self = _Reader(cls, given, info.context).read(handler)
            return read
        options: Self = handler(given)
        fields = cls.model_fields.items()
        values = {field.alias or name: getattr(options, name) for name, field in fields}
        if flaws := tuple(cls.flaws(values)):
            raise flawed(*flaws)
        return options


@cache
def keys_of(model: type[Options]) -> Mapping[str, Any]:
    """Return the fields of a mapping by the keys of a rule file."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def _nested(info: Any) -> type[Options] | None:
    """Return the model of a nested mapping; ``None`` for a field of any other type."""
    for annotation in (info.annotation, *get_args(info.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, Options):
            return annotation
    return None


class _Reader:
    """Reads one mapping of a file into a model."""

    def __init__(
        self, model: type[Options], given: dict[Any, Any], actions: Mapping[str, type[Options]]
    ) -> None:
        self.model, self.given, self.fields = model, given, keys_of(model)
        self.actions = actions if "action" in self.fields else {}
        self.flaws: list[Flaw] = []
        # Keys with a flaw by now, and their values: a second flaw about such a key is noise.
        self.settled: dict[Any, Any] = {}

    def read(self, handler: Any) -> Any:
        kept = {key: value for key, value in self.given.items() if self.is_sound(key, value)}
        for flaw in self.model.flaws({**self.given, **self.settled}):
            key = flaw.path[0] if flaw.path else ""
            if key not in self.settled and (flaw.missing or key in self.given):
                self.flaws.append(flaw)
        try:
            options = handler(kept)
        except ValidationError as errors:
            for error in errors.errors(include_url=False)[: MAX_FLAWS + 1]:
                self.flaws += self.flaws_of(error)
            if not self.flaws:  # a rule is never dropped without a word
                raise
        if self.flaws:
            raise flawed(*self.flaws)
        return options

    def is_sound(self, key: Any, value: object) -> bool:
        """Note the flaw of an unknown key, or of a key without a value; tell whether there is none."""
        if len(self.flaws) > MAX_FLAWS:
            return False
        if not isinstance(key, str):
            self.flaws.append(Flaw((), f"keys are texts, found {described(key)}", check="key-type"))
        elif key not in self.fields:
            self.note_unknown(key, value)
        elif value is None:
            message, hint = f"`{key}` has no value", "write a value after the colon"
            self.flaws.append(Flaw((key,), message, hint, key=True, check="wrong-type"))
            # No check of `flaws` takes this object for a value.
            self.settled[key] = object()
        else:
            return True
        return False

    def note_unknown(self, key: str, value: object) -> None:
        names = [
            name for name in self.fields if name != "at" or getattr(self.model, "takes_at", True)
        ]
        near = [name for name in names if name not in self.given]
        unsure = bool(self.actions) and not hasattr(self.model, "role")  # the action is unknown
        if unsure:
            near = [*dict.fromkeys(chain(names, *map(keys_of, self.actions.values())))]
        hint = did_you_mean(key, near)
        if hint:
            self.settled[hint.split("`")[1]] = value
        elif owners := [name for name, rule in self.actions.items() if key in keys_of(rule)]:
            hint = f"`{key}` is an option of {' and '.join(owners)}"
        hint = hint or ("no action has it" if unsure else f"known: {', '.join(names)}")
        self.flaws.append(
            Flaw((key,), f"unknown key `{key[:60]}`", hint, key=True, check="unknown-key")
        )

    def flaws_of(self, error: Mapping[str, Any]) -> Iterator[Flaw]:
        # pydantic marks a wrong key of a mapping by one more step.
        path = tuple(step for step in error["loc"] if step != "[key]")
        context = error.get("ctx", {})
        field: Any = self.fields.get(path[0])
        if error["type"] == "flawed":
            for flaw in context["flaws"]:
                message = flaw.message
                if _nested(field) is None and flaw.check in {"wrong-type", "bad-pattern"}:
                    message = f"`{_key(path)}`: {message}"
                yield replace(flaw, at=(*path, *flaw.path), message=message)
        elif error["type"] != "missing":
            if path == ("at",) and hasattr(self.model, "role"):
                # An action accepts some of the points, or none: `flaws` has refused the key then.
                points = ", ".join(map(repr, getattr(self.model, "points", ()))).rsplit(", ", 1)
                context = {"expected": " or ".join(points)}
            if path != ("at",) or getattr(self.model, "takes_at", True):
                yield _bad_value(path, field, error, context)
        elif path[0] not in self.settled:
            meaning = re.split("[.,;]", field.description or "")[0]
            hint = f"add `{path[0]}`: {meaning[:1].lower()}{meaning[1:]}"
            yield Flaw(path, f"missing key `{path[0]}`", hint, missing=True, check="missing-key")


def _key(path: Path) -> str:
    """Return the key at the end of a path, without indices into its list."""
    return next(step for step in reversed(path) if isinstance(step, str))


def _bad_value(
    path: Path, field: Any, error: Mapping[str, Any], context: Mapping[str, Any]
) -> Flaw:
    kind, value, key = error["type"], error["input"], _key(path)
    what = described(value)
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        word = value if isinstance(value, str) else ""
        within = [f"did you mean `{one}`?" for one in choices if one in word]
        hint = did_you_mean(word, choices) or "".join(within[:1])
        expected = context["expected"].replace("'", "`")
        return Flaw(path, f"`{key}` must be {expected}, found {what}", hint)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return Flaw(path, f"`{key}` must be {words.format(context[name])}, found {what}")
    inside = len(path) > 1
    optional = "" if inside or field.is_required() else f", or leave `{key}` out"
    if kind == "finite_number":
        hint = f"write a number from -1.8e308 to 1.8e308{optional}"
        return Flaw(path, f"`{key}` must be finite, found {what}", hint)
    wanted = _TYPE_NAMES.get(kind)
    if wanted is None:
        return Flaw(path, f"`{key}`: {error['msg'][:1].lower()}{error['msg'][1:]}")
    bare = " without quotes" if isinstance(value, str) else ""
    hint = _hint_for_type(field, wanted, value) or f"write {wanted}{bare}{optional}"
    if field.examples and not inside:
        hint = "such as " + str(field.examples[0]).replace("'", "")
    return Flaw(path, f"`{key}`: expected {wanted}, found {what}", hint, check="wrong-type")


def _hint_for_type(field: Any, wanted: str, value: object) -> str:
    if wanted == "a mapping":
        inner = _nested(field)
        return f"its keys are {', '.join(keys_of(inner))}" if inner else ""
    if wanted in ("a text", "a list"):
        scalar = isinstance(value, bool | int | float)
        return f'quote it: "{written(value)}"' if scalar else "write a text in quotes"
    return ""


class Steps(Options):
    """The schedule of a rule, in updates of the optimizer that owns the parameter."""

    from_: Annotated[int, Field(alias="from", ge=0, description="First step, inclusive.")] = 0
    to: Annotated[int | None, Field(ge=1, description="Last step, exclusive.")] = None
    every: Annotated[
        int, Field(ge=1, description="Act on every n-th step, counted from `from`.")
    ] = 1

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        start, stop = given.get("from", 0), given.get("to")
        if is_whole(start) and is_whole(stop) and 0 < stop <= start:
            message = f"the schedule is empty: `to` ({stop}) is not after `from` ({start})"
            yield Flaw("to", message, "`to` is exclusive: make it larger than `from`")

    @property
    def always(self) -> bool:
        return self.from_ == 0 and self.to is None and self.every == 1

    def due(self, step: int) -> bool:
        after = step - self.from_
        return after >= 0 and (self.to is None or step < self.to) and after % self.every == 0

    def meets(self, other: Steps) -> bool:
        first, second = sorted((self, other), key=lambda steps: steps.from_)
        common = math.gcd(first.every, second.every)
        gap = second.from_ - first.from_
        if gap % common:
            return False
        # The smallest number of periods of the second schedule after which the first is due, too.
        period = first.every // common
        turns = (-gap // common) * pow(second.every // common, -1, period) % period
        step = second.from_ + turns * second.every
        return first.due(step) and second.due(step)


class Numel(Options):
    """Bounds on the number of elements, both inclusive."""

    min: Annotated[int | None, Field(ge=0, description="Least number.")] = None
    max: Annotated[int | None, Field(ge=0, description="Largest number.")] = None

    @classmethod
    def flaws(cls, given: Mapping[str, Any]) -> Iterator[Flaw]:
        low, high = given.get("min"), given.get("max")
        if is_whole(low) and is_whole(high) and 0 <= high < low:
            yield Flaw("min", f"min ({low}) is greater than max ({high})", "exchange them")


class Where(Options):
    """Conditions beside the name; all given conditions must hold."""

    module_type: Annotated[
        Glob | None,
        Field(description="Glob over the class names of the owning module, base classes included."),
    ] = None
    owns_params: Annotated[
        bool | None,
        Field(description="Of modules: whether the module has parameters of its own."),
    ] = None
    ndim: Annotated[int | None, Field(ge=0, description="Number of dimensions.")] = None
    dtype: Annotated[Dtype | None, Field(description="Such as float32 or bfloat16.")] = None
    numel: Annotated[Numel | None, Field(description="Bounds on the number of elements.")] = None
    requires_grad: Annotated[bool | None, Field(description="Trainable when binding.")] = None


class Expect(Options):
    """An assertion on the matches of a rule, checked whenever it is bound."""

    params: Annotated[
        int,
        Field(ge=0, description="Exact number of distinct parameters."),
    ]
