"""The page `rules/python-api.md`, made of the docstrings of what `gradsurgeon` exports."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gradsurgeon
from gradsurgeon.actions import ACTIONS
from gradsurgeon.records.store.memory import RecordQueries

FUNCTIONS = (
    "apply",
    "backward",
    "load",
    "plan",
    "remove",
    "tag",
    "open_run",
    "replay",
    "compare",
    "report.summary",
    "report.grad_cam",
)
CLASSES = (
    "Session",
    "Plan",
    "Binding",
    "Event",
    "RuleStatus",
    "Report",
    "Run",
    "Comparison",
    "RuleSet",
    "Manifest",
    "Diagnosis",
)
# For actions and statistics of a user's own.
KINDS = (
    "EditRule",
    "ObserverRule",
    "TrapRule",
    "CheckRule",
    "CaptureRule",
    "FreezeRule",
    "LossRule",
)
PARTS = (
    "Edit",
    "At",
    "Shard",
    "Observer",
    "Decision",
    "Examination",
    "Check",
    "Finding",
    "Example",
    "Statistic",
)
WARNING = "GradSurgeonWarning"
HEAD = """\
# Python API

<!-- Written by `python tests/unit/test_rules_readme.py` from the docstrings: do not edit. -->

Every name on this page is one of `gradsurgeon`. Importing it does not import PyTorch; `load`, `plan` on a manifest and
`open_run` work without PyTorch.
"""
RULES = """\
## Rules built in Python

`apply`, `plan` and `load` also take a list of rules. Each action is a class, with the options that the action has in a rule
file:

```python
rules = [
    gradsurgeon.NormLog(id="norms", params="*"),
    gradsurgeon.Clamp(id="bounds", params="*.weight", at="step", min=-0.01, max=0.01),
]
```
"""


OWN = """\
## Actions of your own

The [guide](guide/extending.md) has an example. An action is a class derived from the kind that fits; what its
`compile` returns says what the action does.
"""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD, "## Functions\n", *_functions(FUNCTIONS), "## Classes\n", *_classes(CLASSES)]
    lines += [*_rules(), OWN, *_functions(["add_statistic"]), *_classes((*KINDS, *PARTS))]
    return "\n".join([*lines, *_errors()])


def exported() -> set[str]:
    """Return every name that the page has a place for."""
    actions = {rule.__name__ for rule in ACTIONS.values()}
    functions = {name.partition(".")[0] for name in FUNCTIONS} | {"add_statistic"}
    return functions | {*CLASSES, *KINDS, *PARTS, *actions, *errors(), WARNING}


def errors() -> list[str]:
    """Return the names of the errors, each after those that it is derived from."""
    found = [name for name in gradsurgeon.__all__ if name.endswith("Error")]
    return sorted(found, key=lambda name: (len(getattr(gradsurgeon, name).__mro__), name))


def _functions(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        value: Any = gradsurgeon
        for part in name.split("."):
            value = getattr(value, part)
        yield from _callable(f"### `{name}`", name, value)


def _classes(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        kind = getattr(gradsurgeon, name)
        yield f"### `{name}`\n"
        yield from _text(kind)
        for member, value in _members(kind):
            if isinstance(value, property):
                yield f"#### `{name}.{member}`\n"
                yield from _text(value)
            else:
                yield from _callable(f"#### `{name}.{member}()`", member, value)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the documented members of a class, in the order in which they are written."""
    inherited = vars(RecordQueries) if issubclass(kind, RecordQueries) else {}
    for name, value in {**inherited, **vars(kind)}.items():
        written = getattr(value, "func", value)  # what a cached property holds
        if name.startswith("_") or not (isinstance(value, property) or inspect.isfunction(written)):
            continue
        yield (
            name,
            value if inspect.isfunction(value) else property(getattr(value, "fget", written)),
        )


def _rules() -> Iterator[str]:
    yield RULES
    yield "| class | action |\n|---|---|"
    for action, rule in ACTIONS.items():
        yield f"| `{rule.__name__}` | [`{action}`](reference.md#{action}) |"
    yield ""


def _errors() -> Iterator[str]:
    yield "## Errors and the warning\n"
    for name in (*errors(), WARNING):
        kind = getattr(gradsurgeon, name)
        yield f"### `{name}`\n"
        yield f"Derived from `{kind.__mro__[1].__name__}`.\n"
        yield from _text(kind)


def _callable(heading: str, name: str, value: Callable[..., Any]) -> Iterator[str]:
    yield f"{heading}\n"
    yield f"```python\n{_signature(name.rpartition('.')[2], value)}\n```\n"
    yield from _text(value)


def _signature(name: str, value: Callable[..., Any]) -> str:
    """Return a signature, with one argument a line where it is long."""
    signature = inspect.signature(value)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    arguments = list(map(_argument, parameters))
    kinds = [one.kind for one in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = signature.return_annotation
    line = f"{name}({', '.join(arguments)}) -> {result}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {one}," for one in arguments), f") -> {result}"])


def _argument(parameter: inspect.Parameter) -> str:
    # Annotations are texts already, and not quoted once more.
    written = f"{parameter.name}: {parameter.annotation}"
    default = parameter.default
    return written if default is inspect.Parameter.empty else f"{written} = {default!r}"


def _text(value: object) -> Iterator[str]:
    """Yield the paragraphs of a docstring, its sections as lists."""
    text = inspect.cleandoc(getattr(value, "__doc__", "") or "").replace("``", "`")
    body, *sections = re.split(
        r"^(?=(?:Args|Attributes|Returns|Raises):\n)", text, flags=re.MULTILINE
    )
    for paragraph in body.strip().split("\n\n"):
        items = re.split(r"\n(?=\* )", paragraph)
        yield "\n".join(" ".join(item.split()) for item in items) + "\n"
    for section in sections:
        title, _, rest = section.partition("\n")
        items = re.split(r"\n(?=\S)", inspect.cleandoc(f"\n{rest}").strip())
        if title == "Returns:":
            yield f"**Returns** {' '.join(rest.split())}\n"
            continue
        name = {"Args:": "Arguments", "Attributes:": "Attributes", "Raises:": "Raises"}[title]
        yield f"**{name}**\n"
        for item in items:
            key, _, meaning = item.partition(":")
            yield f"* `{key}`: {' '.join(meaning.split())}"
        yield ""
