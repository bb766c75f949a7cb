"""The values of options, and their descriptions."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from gradsurgeon.common.match import PatternError, compile_pattern

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Flaw:
    """A fault in the options of one rule: its key, the reason, and the remedy."""

    # The key, or the keys and indices that lead to the value; empty for the whole rule.
    at: str | Path
    message: str  # the value that was found, and why it cannot work
    hint: str = ""  # the remedy
    check: str = "bad-value"

    @property
    def path(self) -> Path:
        if not isinstance(self.at, str):
            return self.at
        if not self.at:
            return ()
        return (self.at,)

    @property
    def is_missing(self) -> bool:
        return self.check == "missing-key"

    @property
    def is_unknown_key(self) -> bool:
        return self.check == "unknown-key"


def flawed(*flaws: Flaw) -> PydanticCustomError:
    """Return the error of a validator. Several flaws travel in one, because pydantic takes one."""
    sentences = []
    for flaw in flaws:
        sentence = flaw.message
        if flaw.hint:
            sentence += f" ({flaw.hint})"
        sentences.append(sentence)
    text = "; ".join(sentences)
    # `{` in a text would be read as a placeholder of the template.
    return PydanticCustomError("flawed", "{text}", {"text": text, "flaws": flaws})


def described(value: object) -> str:
    """Return a value of a file in words: ``the text "x"``, ``a list``."""
    if isinstance(value, str):
        return f'the text "{value[:60]}"'
    if value is None:
        return "nothing"
    kinds: dict[type, str] = {list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value)) or written(value)[:60]


def written(value: object) -> str:
    """Return a value as a rule file spells it."""
    if isinstance(value, list | tuple):
        entries = [written(entry) for entry in value]
        return f"[{', '.join(entries)}]"
    if isinstance(value, Mapping):
        entries = [f"{key}: {written(entry)}" for key, entry in value.items()]
        return f"{{{', '.join(entries)}}}"
    if isinstance(value, str):
        if re.fullmatch(r"[a-z][a-z0-9.-]*", value):
            return value
        return json.dumps(value, ensure_ascii=False)
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan", "True": "true", "False": "false"}
    return special.get(str(value), str(value))


# A file has lists, and strict fields take tuples.
def _tuple_of_list(value: object) -> object:
    if isinstance(value, list):
        return tuple(value)
    return value


FROM_LIST = BeforeValidator(_tuple_of_list)


def _tuple_of_text(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return value


def each_once(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _glob(value: str) -> str:
    try:
        compile_pattern(value)
    except PatternError as error:
        raise flawed(Flaw("", error.message, error.hint, "bad-pattern")) from None
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
    BeforeValidator(_tuple_of_text),
    Field(min_length=1),
    WithJsonSchema(_PATTERN_SCHEMA),
]

# The expression accepts names that torch may add later, and refuses names that it will never have.
_DTYPE = re.compile(r"(?:torch\.)?(?:bool|bfloat16|float\d+(?:_\w+)?|complex\d+|u?int\d+)")


def _dtype(value: str) -> str:
    if _DTYPE.fullmatch(value) is None:
        raise flawed(Flaw("", f"`{value[:60]}` is not a dtype of torch", "such as float32"))
    return value.removeprefix("torch.")


Dtype = Annotated[str, AfterValidator(_dtype)]

_KEBAB = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_MAX_ID = 100  # characters: each line of plans, diffs and reports has an id


def _rule_id(value: str) -> str:
    if len(value) > _MAX_ID or _KEBAB.fullmatch(value) is None:
        message = (
            f"`{value[:60]}` is not a rule id: an id is words of a-z and 0-9 joined by `-`, at most "
            f"{_MAX_ID} characters"
        )
        raise flawed(Flaw("", message, "such as `my-rule`"))
    return value


RuleId = Annotated[
    str,
    AfterValidator(_rule_id),
    WithJsonSchema({"type": "string", "pattern": f"^{_KEBAB.pattern}$", "maxLength": _MAX_ID}),
]


TargetKind = Literal["params", "modules", "tensors"]
TARGETS: tuple[TargetKind, ...] = ("params", "modules", "tensors")
Side = Literal["param", "update", "state", "input", "output", "tag"]

STATE_NAME = re.compile(r"state\.[A-Za-z_]\w*")
_STEP = re.compile(r"\[(\d{1,6})\]|\.([A-Za-z_]\w*)")
_MODULE_TENSOR = re.compile(r"(output|input)((?:\[\d{1,6}\]|\.[A-Za-z_]\w*)*?)(\.grad)?")


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor of a target, or every tensor of a structure if ``path`` is empty."""

    side: Side
    # Into the arguments or the result of the module; of a state its name.
    path: tuple[int | str, ...] = ()
    grad: bool = True  # the gradient of the tensor, not its value

    def __str__(self) -> str:
        if self.side == "update":
            return "update"
        if self.side in ("input", "output", "state"):
            text = f"{self.side}{spelled(self.path)}"
            if self.grad:
                text += ".grad"
            return text
        if self.grad:
            return "grad"
        return "value"


def spelled(path: Sequence[int | str]) -> str:
    """Return a path as rule files write it: ``[0].logits``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}"
    return text


@cache
def parse_tensor(target: TargetKind, text: str | None) -> TensorRef | str:
    """Return the meaning of ``tensor`` for a kind of target, or a message if it has none."""
    if target == "modules":
        return _parse_module_tensor(text)
    side: Side = "param"
    if target == "tensors":
        side = "tag"
    if text is None or text in ("grad", "value"):
        return TensorRef(side, grad=text != "value")
    if side == "tag":
        return f"the tensor of a tag is `grad` or `value`, found `{text[:60]}`"
    if text == "update":
        return TensorRef("update", grad=False)
    if STATE_NAME.fullmatch(text):
        return TensorRef("state", (text.removeprefix("state."),), grad=False)
    return f"`{text[:60]}` is no tensor of a parameter"


def _parse_module_tensor(text: str | None) -> TensorRef | str:
    if text is None:
        return "missing key `tensor`: a module has several"
    parts = _MODULE_TENSOR.fullmatch(text)
    if parts is None:
        return f"`{text[:60]}` is no tensor of a module"
    side: Side = "output"
    if parts[1] == "input":
        side = "input"
    path: list[int | str] = []
    for index, key in _STEP.findall(parts[2]):
        if index:
            path.append(int(index))
        else:
            path.append(key)
    return TensorRef(side, tuple(path), grad=parts[3] is not None)


def _limit(value: object) -> object:
    if value == "never" or (type(value) is int and value >= 1):
        return value
    message = f"expected a whole number from 1 on, or `never`, found {described(value)}"
    raise flawed(Flaw("", message, "leave it out for 10"))


# A number of times after which something happens, or that it never does.
Limit = Annotated[
    int | Literal["never"],
    BeforeValidator(_limit),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "never"}]}),
]
