"""Every error and warning of the package."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, Self

# A note is a fact about rules that may be right.
Severity = Literal["error", "warning", "note"]

# Format characters such as the bidirectional overrides change how the *rest* of a line reads, so
# they are shown as code points like control characters are.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str) -> str:
    """Return ``text`` with control and invisible characters written as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if unicodedata.category(char) in _HIDDEN_CATEGORIES
        else char
        for char in text
    )


def reason_of(error: BaseException) -> str:
    """Return the first line of an error as printable text, and its type if it has no text."""
    text = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
    return printable(text or type(error).__name__)


_SHOWN = 3
_MOST = 100  # complaints that a message shows


def shorten_names(names: Sequence[str]) -> str:
    """Return the first names for a message, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name) for name in names[:_SHOWN]) + more


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean `x`?`` for the nearest of ``known``, or an empty text."""
    # Folding case finds `Clamp` for `clamp`, which the similarity ratio alone rates as far away.
    folded = {name.casefold(): name for name in known}
    near = get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    return f"did you mean `{folded[near[0]]}`?" if near else ""


class HintedError(ValueError):
    """An unusable part of a rule, before its place is known."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a rule file: 1-based line and column (in code points), and the line itself."""

    file: str
    line: int
    col: int
    line_text: str = ""
    width: int = 1

    def __str__(self) -> str:
        # Rules from Python have no line; `file` then names their source.
        position = f":{self.line}:{self.col}" if self.line else ""
        return f"{printable(self.file)}{position}"

    def excerpt(self) -> str:
        """Return the source line with the place underlined; empty without a text."""
        if not self.line_text.strip():
            return ""
        # A window keeps a 10,000-column line readable and the underline below the right place.
        start = max(0, self.col - 61)
        before = printable(self.line_text[start : self.col - 1])
        marked = printable(self.line_text[self.col - 1 : self.col - 1 + max(1, self.width)][:80])
        after = printable(self.line_text[self.col - 1 + self.width : self.col + 39])
        gutter = f"{self.line:>6} | "
        lead = "..." if start else ""
        under = " " * (len(gutter) - 2) + "| " + " " * len(lead + before)
        return f"{gutter}{lead}{before}{marked}{after}\n{under}{'^' * max(1, len(marked))}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a rule file: its place, the cause and the remedy."""

    place: Place
    check: str
    message: str
    hint: str = ""
    severity: Severity = "error"

    def concise(self) -> str:
        """Return the one-line form ``file:line:col: severity: message (hint) [check]``."""
        hint = f" ({printable(self.hint)})" if self.hint else ""
        return f"{self.place}: {self.severity}: {printable(self.message)}{hint} [{self.check}]"

    def full(self) -> str:
        """Return the form for people: message, source line with underline, remedy."""
        lines = [f"{self.place}: {self.severity}: {printable(self.message)} [{self.check}]"]
        if excerpt := self.place.excerpt():
            lines.append(excerpt)
        if self.hint:
            lines.append(f"       = {printable(self.hint)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, str | int]:
        return {
            "file": self.place.file,
            "line": self.place.line,
            "col": self.place.col,
            "severity": self.severity,
            "check": self.check,
            "message": self.message,
            "hint": self.hint,
        }


class GradSurgeonError(Exception):
    """Base of every error that gradsurgeon raises on purpose."""


class _FileError(GradSurgeonError):
    _of: ClassVar[str]

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        count = sum(problem.severity == "error" for problem in self.problems)
        head = f"{count} problem{'s' * (count != 1)} in {self._of}"
        super().__init__("\n".join([head, *(problem.full() for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[Self], tuple[Sequence[Problem]]]:
        return type(self), (self.problems,)


class RuleFileError(_FileError):
    """A rule file cannot be used. ``problems`` holds all its problems, in order.

    Args:
        problems: all problems found, warnings included; at least one is an error.
    """

    _of = "the rules"


class ManifestError(_FileError):
    """The names of a model cannot be read from a file. ``problems`` holds the reason.

    Args:
        problems: the problem that was found.
    """

    _of = "the names of the model"


class ModelError(GradSurgeonError):
    """A model cannot be imported or built; the text names the attempt and the reason."""


class BindError(GradSurgeonError):
    """Rules cannot act on this model. ``complaints`` holds one text per rule and reason.

    Args:
        complaints: the problems, each with the place of the rule, the reason and a remedy.
    """

    def __init__(self, complaints: Sequence[str]) -> None:
        self.complaints: tuple[str, ...] = tuple(complaints)
        count = len(self.complaints)
        head = f"{count} problem{'s' * (count != 1)} in binding the rules; nothing was changed"
        more = [f"and {count - _MOST} more"] if count > _MOST else []
        super().__init__("\n".join([head, *self.complaints[:_MOST], *more]))

    def __reduce__(self) -> tuple[type[BindError], tuple[Sequence[str]]]:
        return type(self), (self.complaints,)


class TrapError(GradSurgeonError):
    """A rule stopped an update before any weight moved.

    Args:
        message: the whole report: step, rule, parameters.
        rule: id of the rule that tripped.
        step: the update that was about to happen, counted from 0.
        rank: rank of this process, 0 without torch.distributed.
        name: canonical name of the parameter to look at first: for a NaN the first in the order of backward,
            for a spike the parameter with the largest share.
        bundle: path of the post-mortem bundle, ``None`` if none was written.
        diagnosis: the `Diagnosis` from running the step again; ``None`` if it was not run again.
    """

    def __init__(
        self,
        message: str,
        *,
        rule: str = "",
        step: int = 0,
        rank: int = 0,
        name: str | None = None,
        bundle: str | None = None,
        diagnosis: object = None,
    ) -> None:
        super().__init__(message)
        self.rule = rule
        self.step = step
        self.rank = rank
        self.name = name
        self.bundle = bundle
        self.diagnosis: Any = diagnosis


class NonFiniteGradientError(TrapError):
    """A ``nan-trap`` rule found a gradient that is NaN or infinite and stopped the update."""


class CheckError(TrapError):
    """A check with ``then: raise`` found a fault of the training. The update may have taken place."""


class GradientSpikeError(TrapError):
    """A ``spike-trap`` rule found a gradient far larger than those before it and stopped the update."""


class RecordError(GradSurgeonError):
    """Records are missing, damaged or cannot be written."""


class GradSurgeonWarning(UserWarning):
    """A rule cannot or did not act as written; the text names the rule and the cause."""


def warn(text: str, stacklevel: int) -> None:
    """Issue a warning; a closed or broken stderr does not matter."""
    try:
        warnings.warn(text, GradSurgeonWarning, stacklevel + 1)
    except GradSurgeonWarning:
        raise
    except Exception:  # noqa: BLE001, S110 # whatever the script has put in the place of stderr
        pass
