"""The result of replaying a failed step, and how certain it is. Needs no torch."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from gradsurgeon.common import _html
from gradsurgeon.common.rows import Rows
from gradsurgeon.common.tried import Tried, in_words
from gradsurgeon.errors import printable

# A placeholder for the value of ``--model``.
BUILD = "MODULE:BUILD"
# Words for the names of operands in PyTorch.
OPERANDS = {"self": "input", "other": "second input", "mat2": "second matrix"}
# The headline if no operation is blamed, by ``where``.
_HEADLINES = {
    "output gradient": "{what} came back to the output{name} of the model: born outside of it, in the loss",
    "literal": "{what} was written by the script itself",
    "unknown": "{what} appeared among the inputs of{name}, and no operation shows where from",
    "loss input": "the loss was given {what}:{name}, and no operation that PyTorch shows made it",
    "input": "the input{name}{of} was not finite when the model was called ({what})",
    "weight": "the weight{name} was not finite before the step began ({what})",
    "buffer": "the buffer{name} was not finite before the step began ({what})",
}

# The attributes that are keys for programs, too.
_KEYS = (
    "certainty",
    "reasons",
    "what",
    "where",
    "module",
    "name",
    "rows",
    "inputs",
    "history",
    "before",
    "rank",
    "bundle",
)
_MOST_NODES = 20
# A usual operation changes magnitudes less.
_LEAST_LEAP = 1e3
_NOBODY = "not reproduced, so no operation is blamed"

Certainty = Literal["reproduced", "partial", "not reproduced"]
Fault = Literal[
    "", "overflow", "underflow", "mathematics", "bad input", "kernel", "transient", "unknown"
]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of Python, as a traceback shows it."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return printable(f"{self.file}:{self.line}, in {self.function}: {self.text}")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """Shape, range of the finite elements, and number of non-finite elements of one tensor.

    Attributes:
        name: its name in the schema of the operation, or its origin.
        shape: its shape; for a sharded tensor the shape of the whole.
        inf: number of infinite elements, ``minus_inf`` included.
        rows: the rows with non-finite elements, ``None`` if all rows, very many or none have some.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float | None
    high: float | None
    nan: int
    inf: int
    numel: int
    minus_inf: int = 0
    rows: Rows | None = None

    @property
    def kind(self) -> Literal["", "NaN", "Inf", "-Inf"]:
        """The worst kind of its elements: ``NaN``, ``Inf``, ``-Inf`` if all infinities are negative, or nothing."""
        if self.nan:
            return "NaN"
        if not self.inf:
            return ""
        if self.inf == self.minus_inf:
            return "-Inf"
        return "Inf"

    def __str__(self) -> str:
        head = printable(f"{self.name} {list(self.shape)} {self.dtype}".lstrip())
        if self.numel == 1 and self.kind:
            return f"{head}: {self.kind}"
        counts = {"NaN": self.nan, "Inf": self.inf - self.minus_inf, "-Inf": self.minus_inf}
        parts = [f"{count:,} of {self.numel:,} {kind}" for kind, count in counts.items() if count]
        if self.low is not None and self.high is not None:
            span = f"{self.low:.4g}"
            if self.low != self.high:
                span += f" to {self.high:.4g}"
            if self.kind:
                span = f"else {span}"
            parts.append(span)
        if not parts:
            return f"{head}: empty"
        return f"{head}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a number became non-finite: the kind of fault, the results of repeating the operation, the next thing to try."""

    fault: Fault
    evidence: tuple[str, ...]
    advice: str
    # The narrowest format in which the result is finite, if it overflowed.
    wider: str = ""


_NO_LINE = Line("", 0, "", "")
_NO_CAUSE = Cause("", (), "")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where and why a number became NaN or infinite, and how certain that is.

    Attributes:
        certainty: ``reproduced``, ``partial``, or ``not reproduced``: then no operation is blamed.
        reasons: why the diagnosis is not more certain.
        step: the update that was about to happen, counted from 0.
        rank: rank of this process.
        what: ``NaN``, ``Inf``, ``-Inf``, or nothing if no operation is blamed.
        where: ``forward``, ``backward``, or the kind of tensor that was non-finite before: ``weight``, ``buffer``,
            ``input``, ``loss input``, ``output gradient``, ``literal``, ``unknown``.
        micro_batch: the backward pass of the step, from 1; 0 if it may be any of several.
        micro_batches: number of backward passes of the step.
        module: canonical name of the module that ran or built the operation, or got the input; ``"."`` is the root.
        module_type: its class.
        name: the weight, buffer, input or output that was non-finite before.
        operation: the name of the operation in the dispatcher.
        node: the node of the autograd graph, in a backward pass or the loss; of several alike, also which one.
        lines: the line of the script that called the operation, and the innermost line outside of torch.
        inputs: the inputs of the operation.
        output: its output, or the tensor that was non-finite before.
        history: the largest magnitudes in the outputs of the last operations before, oldest first.
        cause: the kind of fault, with evidence and advice.
        scale: the factor of a `GradScaler`, ``None`` without one.
        loss: the loss, if it was computed outside of the model and the fault is in there.
        loss_nodes: the nodes of its graph, from the outputs of the model to the loss.
        loss_place: the place of the blamed operation among them, that of the last one if none is blamed.
        before: learning rates and losses up to the step, in words.
        bundle: the directory from which the step can be run again, empty if there is none.
        no_bundle: why no bundle could be written.
        rows: the rows of ``output`` with non-finite elements, ``None`` if all rows or very many have some.
        build: the value of ``--model`` that builds the model anew, or a placeholder.
        tried: the remedies under which the step was run once more.
    """

    certainty: Certainty
    reasons: tuple[str, ...]
    step: int
    rank: int
    what: str = ""
    where: str = ""
    micro_batch: int = 0
    micro_batches: int = 0
    module: str = ""
    module_type: str = ""
    name: str = ""
    operation: str = ""
    node: str = ""
    lines: tuple[Line, ...] = ()
    inputs: tuple[TensorFacts, ...] = ()
    output: TensorFacts | None = None
    history: tuple[tuple[str, float], ...] = ()
    cause: Cause | None = None
    scale: float | None = None
    loss: float | None = None
    loss_nodes: tuple[str, ...] = ()
    loss_place: int = -1
    before: str = ""
    bundle: str = ""
    no_bundle: str = ""
    rows: Rows | None = None
    build: str = BUILD
    tried: tuple[Tried, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.text())

    def _repr_html_(self) -> str:
        return _html.pre(f"step {self.step}, rank {self.rank}: {self}")

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as values that JSON has, documented under ``The diagnosis as JSON``."""
        whole = asdict(self)
        values = {key: whole[key] for key in _KEYS}
        line = whole["lines"][-1] if self.lines else asdict(_NO_LINE)
        why = whole["cause"] or asdict(_NO_CAUSE)
        has_direction = self.where in ("forward", "backward")
        values.update(
            headline=self.headline,
            op=self.operation,
            direction=self.where if has_direction else "",
            file=line["file"],
            line=line["line"] or None,
            code=line["text"],
            cause=why["fault"],
            evidence=why["evidence"],
            remedy=why["advice"],
            outputs=[whole["output"]] if self.output is not None else [],
            tried=[tried.to_json() for tried in self.tried],
        )
        # Tuples become lists.
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain

    @property
    def blames(self) -> bool:
        """Whether it names an operation or a tensor."""
        return self.certainty != "not reproduced" and bool(self.where)

    def text(self) -> Iterator[str]:
        """Yield the lines of the report."""
        word = "diagnosis"
        if self.blames:
            word += f" ({self.certainty})"
        yield f"{word}: {self.headline}"
        yield from self.details()

    def details(self) -> Iterator[str]:
        """Yield the lines below the headline: the place, the remedy, and then the evidence."""
        verb = "at"
        for line in reversed(self.lines):
            yield f"  {verb} {line}"
            verb = "called at"
        if self.rows is not None:
            yield f"  {self.rows}"
        if self.cause is not None:
            yield f"  to try: {self.cause.advice}"
        if self.tried:
            yield f"  tried in the replay: {printable(in_words(self.tried))}"
        if self.cause is not None:
            yield f"  cause: {self.cause.fault}"
            yield from [f"    {printable(evidence)}" for evidence in self.cause.evidence]
        for reason in self.reasons:
            yield f"  {self.certainty} because {printable(reason)}"
        yield from self._evidence()
        if self.before:
            yield f"  before: {printable(self.before)}"
        if self.bundle:
            command = f"gradsurgeon replay {shlex.quote(self.bundle)} --model {self.build}"
            yield f"  to run the step again: {printable(command)}"
        if self.no_bundle:
            yield f"  no bundle was written: {printable(self.no_bundle)}"

    def _evidence(self) -> Iterator[str]:
        for facts in self.inputs:
            yield f"  in   {replace(facts, name=OPERANDS.get(facts.name, facts.name))}"
        if self.output is not None:
            word = "out"
            if not self.operation:
                word = "is "
            yield f"  {word}  {self.output}"
        if self.loss_nodes:
            names = ", ".join(self.loss_nodes[-_MOST_NODES:])
            head = "operations of the loss"
            if len(self.loss_nodes) > _MOST_NODES:
                head = f"last {_MOST_NODES} {head}"
            yield f"  {head}: {printable(names)}"
        if self.loss is not None and self.where == "output gradient":
            direction = "backward" if math.isfinite(self.loss) else "forward"
            yield f"  the loss is {self.loss:.4g}: look at the {direction} pass of these operations"
        if self.scale is not None:
            yield f"  the GradScaler multiplied the loss by {self.scale:g}"
        yield from self._leap()
        if self.history:
            yield "  largest magnitudes before it, the last one last:"
        for label, value in self.history:
            yield f"    {value:<9.3g} {printable(label)}"

    def _leap(self) -> Iterator[str]:
        """Say where the magnitude grows most from one operation to the next, if that is a leap."""
        most = _LEAST_LEAP
        text = ""
        for (_, before), (label, after) in pairwise(self.history):
            if before > 0 and after / before >= most:
                most = after / before
                text = (
                    f"  the magnitude leaps most in {printable(label)}: {before:.3g} to {after:.3g}"
                )
        if text:
            yield text

    @property
    def headline(self) -> str:
        """Where the number became non-finite, in one line."""
        if not self.blames:
            return _NOBODY
        place = ""
        if self.module == ".":
            place = " of the root"
        elif self.module:
            place = f" of {printable(self.module)}"
        if self.module_type:
            place += f" ({self.module_type})"
        if self.operation:
            if not place:
                place = " outside of the model"
            text = f"{self.what} born in the {self.where} pass{place}: {self.operation}"
            if self.node not in ("", self.operation):
                text += f" ({self.node})"
        else:
            bare = printable(self.name)
            name = ""
            if bare not in ("", self.where):
                name = f" {bare}"
            text = _HEADLINES[self.where].format(what=self.what, name=name, of=place)
        # Several passes may have sent one gradient.
        if self.micro_batches > 1 and self.micro_batch:
            text += f", micro-batch {self.micro_batch} of {self.micro_batches}"
        return text
