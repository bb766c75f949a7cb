"""The values of options, the tensor that a rule means, and the description of a wrong value.

The reader of a description has a training run that does not start. So it names the value that was found, the
reason why it cannot work, and the remedy, in the words of the rule file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, TypeAlias, TypeGuard

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from gradsurgeon._expressions import PatternError
from gradsurgeon.errors import did_you_mean
from gradsurgeon.match import compile_pattern

Path: TypeAlias = tuple[str | int, ...]

MAX_FLAWS = 50  # of one rule: no reader needs more, and the search takes time


@dataclass(frozen=True, slots=True)
class Flaw:
    """A fault in the options of one rule: its key, the reason, and the remedy."""

    at: (
        str | Path
    )  # the key, or the keys and indices that lead to the value; empty for the whole rule
    message: str  # the value that was found, and why it cannot work
    hint: str = ""  # the remedy
    missing: bool = False  # the key is missing: the flaw is shown at the mapping
    key: bool = False  # the key itself is wrong, not its value
    check: str = "bad-value"

    @property
    def path(self) -> Path:
        return ((self.at,) if self.at else ()) if isinstance(self.at, str) else self.at


def flawed(*flaws: Flaw) -> PydanticCustomError:
    """Return the error of a validator. Several flaws travel in one, because pydantic takes one."""
    text = "; ".join(
        f"{flaw.message} ({flaw.hint})" if flaw.hint else flaw.message for flaw in flaws
    )
    # `{` in a text would be read as a placeholder of the template.
    return PydanticCustomError("flawed", "{text}", {"text": text, "flaws": flaws})


def described(value: object) -> str:
    """Return a value of a file in words: ``the text "x"``, ``a list``."""
    if isinstance(value, str):
        return f'the text "{value[:60]}{"..." if len(value) > 60 else ""}"'  # noqa: PLR2004 # as shown
    if value is None or isinstance(value, bool):
        return "nothing" if value is None else written(value)
    if isinstance(value, int | float):
        special = {"inf": "infinity", "-inf": "minus infinity", "nan": "NaN"}
        return special.get(str(value), f"the number {value}")
    kinds: dict[type, str] = {list: "list", tuple: "list", dict: "mapping"}
    kind = kinds.get(type(value))
    if kind is None:
        return f"a value of the type {type(value).__name__}"
    return f"a {kind}" if value else f"an empty {kind}"


def written(value: object) -> str:
    """Return a value as a rule file spells it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {written(one)}' for key, one in value.items())}}}"
    if isinstance(value, str):
        bare = re.fullmatch(r"[a-z][a-z0-9.-]*", value)
        return value if bare else json.dumps(value, ensure_ascii=False)
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan", "True": "true", "False": "false"}
    return special.get(str(value), str(value))


# A file has lists, and strict fields take tuples.
FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


def each_once(values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a list that names something twice."""
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise flawed(Flaw((index,), f"`{value[:60]}` is listed twice", "remove one of them"))
        seen.add(value)
    return values


def _glob(value: str) -> str:
    try:
        compile_pattern(value)
    except PatternError as error:
        raise flawed(Flaw("", error.message, error.hint, check="bad-pattern")) from None
    return value


Glob = Annotated[str, AfterValidator(_glob)]

_PATTERN_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ]
}
Patterns = Annotated[
    tuple[Glob, ...],
    FROM_LIST,
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(min_length=1),
    WithJsonSchema(_PATTERN_SCHEMA),
]

# The expression accepts names that torch may add later, and refuses names that it will never have.
_DTYPE = re.compile(r"(?:torch\.)?(?:bool|bfloat16|float\d+(?:_\w+)?|complex\d+|u?int\d+)")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int64", "bool")


def _dtype(value: str) -> str:
    if _DTYPE.fullmatch(value) is None:
        hint = did_you_mean(value[:60], _DTYPES) or f"such as {', '.join(_DTYPES[:4])}"
        raise flawed(Flaw("", f"`{value[:60]}` is not a dtype of torch", hint))
    return value


Dtype = Annotated[str, AfterValidator(_dtype)]

_KEBAB = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_MAX_ID = 100  # characters: each line of plans, diffs and reports has an id


def _rule_id(value: str) -> str:
    if len(value) > _MAX_ID or _KEBAB.fullmatch(value) is None:
        words = re.findall(r"[a-z0-9]+", value[:60].lower())
        message = (
            f"`{value[:60]}` is not a rule id: an id is words of a-z and 0-9 joined by `-`, at most "
            f"{_MAX_ID} characters"
        )
        raise flawed(Flaw("", message, f"such as `{'-'.join(words) or 'my-rule'}`"))
    return value


RuleId = Annotated[
    str,
    AfterValidator(_rule_id),
    WithJsonSchema({"type": "string", "pattern": f"^{_KEBAB.pattern}$", "maxLength": _MAX_ID}),
]


def is_number(value: object) -> TypeGuard[float]:
    """Tell whether a raw option is a number; bool is not, although Python says so."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


TargetKind = Literal["params", "modules", "tensors"]
TARGETS: tuple[TargetKind, ...] = ("params", "modules", "tensors")
Side = Literal["param", "update", "input", "output", "tag"]

_STEP = re.compile(r"\[(\d{1,6})\]|\.([A-Za-z_]\w*)")
_MODULE_TENSOR = re.compile(r"(output|input)((?:\[\d{1,6}\]|\.[A-Za-z_]\w*)*?)(\.grad)?")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor of a target, or every tensor of a structure if ``path`` is empty."""

    side: Side
    path: tuple[int | str, ...] = ()  # into the arguments or the result of the module
    grad: bool = True  # the gradient of the tensor, not its value

    def __str__(self) -> str:
        if self.side == "update":
            return self.side
        if self.side in ("param", "tag"):
            return "grad" if self.grad else "value"
        return f"{self.side}{spelled(self.path)}{'.grad' if self.grad else ''}"


def spelled(path: tuple[int | str, ...]) -> str:
    """Return a path as rule files write it: ``[0].logits``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def gradient_pairs(rules: Mapping[str, TensorRef]) -> list[tuple[str, str]]:
    """Return the pairs of rules on a value and on its gradient. ``rules`` has the tensor of each rule by id."""
    return [
        (value, gradient)
        for value, of_value in rules.items()
        for gradient, of_gradient in rules.items()
        if (of_value.grad, of_gradient.grad) == (False, True)
        and (of_value.side, of_value.path) == (of_gradient.side, of_gradient.path)
    ]


@cache
def parse_tensor(target: TargetKind, text: str | None) -> TensorRef | str:
    """Return the meaning of ``tensor`` for a kind of target, or a message if it has none."""
    if target == "params":
        side: Side = "update" if text == "update" else "param"
        if text in (None, "grad", "value", "update"):
            return TensorRef(side, grad=text in (None, "grad"))
        return f"`{text[:60]}` is no tensor of a parameter"
    if target == "tensors":
        found = f"the tensor of a tag is `grad` or `value`, found `{(text or '')[:60]}`"
        return TensorRef("tag", grad=text != "value") if text in (None, "grad", "value") else found
    if text is None:
        return "missing key `tensor`: a module has several"
    parts = _MODULE_TENSOR.fullmatch(text)
    if parts is None:
        return f"`{text[:60]}` is no tensor of a module"
    path = tuple(int(index) if index else key for index, key in _STEP.findall(parts[2]))
    return TensorRef("input" if parts[1] == "input" else "output", path, parts[3] is not None)


def _limit(value: object) -> object:
    if value == "never" or (is_whole(value) and value >= 1):
        return value
    if is_whole(value):
        raise flawed(Flaw("", f"expected 1 or more, or `never`, found {described(value)}", ""))
    message = f"expected a whole number or `never`, found {described(value)}"
    hint = "write a whole number without quotes, or leave it out"
    raise flawed(Flaw("", message, hint, check="wrong-type"))


# A number of times after which something happens, or that it never does.
Limit = Annotated[
    int | Literal["never"],
    BeforeValidator(_limit),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "never"}]}),
]
