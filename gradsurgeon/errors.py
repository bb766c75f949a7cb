"""Every error and warning of the package."""

from __future__ import annotations

import posixpath
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

# A note is a fact about rules that may be right.
Severity = Literal["error", "warning", "note"]

# Format characters such as the bidirectional overrides change how the *rest* of a line reads, so
# they are shown as code points like control characters are.
_HIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def printable(text: str) -> str:
    """Return ``text`` with control and invisible characters written as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def _visible(char: str) -> str:
    if unicodedata.category(char) not in _HIDDEN_CATEGORIES:
        return char
    return char.encode("unicode_escape").decode("ascii")


def reason_of(error: BaseException) -> str:
    """Return the first line of an error as printable text, and its type if it has no text."""
    reason = getattr(error, "strerror", None)
    if not reason:
        reason = str(error).strip().partition("\n")[0]
    if not reason:
        reason = type(error).__name__
    return printable(reason)


_SHOWN = 3
_MOST = 100  # complaints that a message shows


def shorten_names(names: Sequence[str]) -> str:
    """Return the first names for a message, and the number of the others."""
    shown = ", ".join(map(printable, names[:_SHOWN]))
    if len(names) <= _SHOWN:
        return shown
    return f"{shown} and {len(names) - _SHOWN} more"


def shorten_prefix(names: Sequence[str]) -> str:
    """Return the first names for a message as `shorten_names` does; a long prefix that all have is there once."""
    if len(names) <= 1:
        return shorten_names(names)
    owners = [name.rpartition(".")[0].replace(".", "/") for name in names]
    prefix = posixpath.commonpath(owners).replace("/", ".")
    if "." not in prefix:
        return shorten_names(names)
    rests = [name.removeprefix(f"{prefix}.") for name in names]
    return f"{printable(prefix)}.{{{shorten_names(rests)}}}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean `x`?`` for the nearest of ``known``, or an empty text."""
    # Folding case finds `Clamp` for `clamp`, which the similarity ratio alone rates as far away.
    folded = {name.casefold(): name for name in known}
    near = get_close_matches(word.casefold(), folded, n=1, cutoff=0.6)
    if not near:
        return ""
    return f"did you mean `{folded[near[0]]}`?"


class HintedError(ValueError):
    """An unusable part of a rule, before its place is known."""

    def __init__(self, message: str, hint: str = "") -> None:
        text = message
        if hint:
            text += f" ({hint})"
        super().__init__(text)
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
        text = printable(self.file)
        # Rules from Python have no line; `file` then names their source.
        if self.line:
            text += f":{self.line}:{self.col}"
        return text

    def excerpt(self) -> str:
        """Return the source line with the place underlined; empty without a text."""
        if not self.line_text.strip():
            return ""
        # A window keeps a line of 10,000 columns readable.
        at = self.col - 1
        start = max(0, at - 60)
        end = at + min(80, self.width)
        before = printable(self.line_text[start:at])
        marked = printable(self.line_text[at:end])
        after = printable(self.line_text[end : at + 40])
        gutter = f"{self.line:>6} | "
        empty_gutter = " " * (len(gutter) - 2) + "| "
        underline = "^" * max(1, len(marked))
        return f"{gutter}{before}{marked}{after}\n{empty_gutter}{' ' * len(before)}{underline}"


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
        message = printable(self.message)
        if self.hint:
            message += f" ({printable(self.hint)})"
        return f"{self.place}: {self.severity}: {message} [{self.check}]"

    def full(self) -> str:
        """Return the form for people: message, source line with underline, remedy."""
        lines = [f"{self.place}: {self.severity}: {printable(self.message)} [{self.check}]"]
        excerpt = self.place.excerpt()
        if excerpt:
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


def _count_of_problems(count: int) -> str:
    if count == 1:
        return "1 problem"
    return f"{count} problems"


class _FileError(GradSurgeonError):
    _of: ClassVar[str]

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(tuple(problems))
        self.problems: tuple[Problem, ...] = tuple(problems)

    def __str__(self) -> str:
        errors = [problem for problem in self.problems if problem.severity == "error"]
        lines = [f"{_count_of_problems(len(errors))} in {self._of}"]
        lines += [problem.full() for problem in self.problems]
        return "\n".join(lines)


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
        super().__init__(tuple(complaints))
        self.complaints: tuple[str, ...] = tuple(complaints)

    def __str__(self) -> str:
        count = len(self.complaints)
        lines = [f"{_count_of_problems(count)} in binding the rules; nothing was changed"]
        lines += self.complaints[:_MOST]
        if count > _MOST:
            lines.append(f"and {count - _MOST} more")
        return "\n".join(lines)


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
    """A ``spike-trap`` rule found a gradient or a loss far larger than those before it and stopped the update."""


class RecordError(GradSurgeonError):
    """Records are missing, damaged or cannot be written."""


class GradSurgeonWarning(UserWarning):
    """A rule cannot or did not act as written; the text names the rule and the cause."""


def to_stderr(text: str) -> None:
    """Write to stderr, or to Python's original stderr if the script has closed, removed or replaced its own."""
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(Exception):
            # `print` would write to stdout for None. A tee need not have `closed`.
            if stream is not None and not getattr(stream, "closed", False):
                print(text, file=stream, flush=True)  # there is no other channel
                return


def warn(text: str, stacklevel: int) -> None:
    """Issue a warning; a closed or broken stderr does not matter."""
    try:
        warnings.warn(text, GradSurgeonWarning, stacklevel + 1)
    except GradSurgeonWarning:
        raise
    except Exception:  # noqa: BLE001, S110 # whatever the script has put in the place of stderr
        pass
