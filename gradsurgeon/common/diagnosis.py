"""The result of replaying a failed step, and how certain it is. Needs no torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gradsurgeon.common import _html
from gradsurgeon.errors import printable

# The headline if no operation is blamed, by ``where``.
_HEADLINES = {
    "output gradient": "{what} came back to the output{name} of the model: born outside of it, in the loss",
    "literal": "{what} was written by the script itself",
    "unknown": "{what} appeared among the inputs of{name}, and no operation shows where from",
    "loss input": "{bare} was not finite when the loss was computed ({what}), and no known operation has made it",
    "input": "the input{name}{of} was not finite when the model was called ({what})",
    "weight": "the weight{name} was not finite before the step began ({what})",
    "buffer": "the buffer{name} was not finite before the step began ({what})",
}

Certainty = Literal["reproduced", "partial", "not reproduced"]
Fault = Literal[
    "overflow", "underflow", "mathematics", "bad input", "kernel", "transient", "unknown"
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

    @property
    def finite(self) -> bool:
        return not (self.nan or self.inf)

    @property
    def kind(self) -> Literal["", "NaN", "Inf", "-Inf"]:
        """The worst kind of its elements: ``NaN``, ``Inf``, ``-Inf`` if all infinities are negative, or nothing."""
        if self.nan:
            return "NaN"
        if self.inf:
            return "-Inf" if self.inf == self.minus_inf else "Inf"
        return ""

    def __str__(self) -> str:
        head = printable(f"{self.name} {list(self.shape)} {self.dtype}".lstrip())
        counts = (("NaN", self.nan), ("Inf", self.inf - self.minus_inf), ("-Inf", self.minus_inf))
        parts = [f"{count:,} of {self.numel:,} {kind}" for kind, count in counts if count]
        if self.low is not None and self.high is not None:
            same = self.low == self.high
            span = f"{self.low:.4g}" if same else f"{self.low:.4g} to {self.high:.4g}"
            parts.append(span if self.finite else f"else {span}")
        return f"{head}: {', '.join(parts) or 'empty'}"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a number became non-finite: the kind of fault, the results of repeating the operation, the next thing to try."""

    fault: Fault
    evidence: tuple[str, ...]
    advice: str


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
        micro_batch: the backward pass of the step, from 1.
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
        bundle: the directory from which the step can be run again, empty if there is none.
        no_bundle: why no bundle could be written.
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
    bundle: str = ""
    no_bundle: str = ""

    def __str__(self) -> str:
        return "\n".join(self.text())

    def _repr_html_(self) -> str:
        head, *evidence = self.text()
        return _html.pre("\n".join([f"{head}; step {self.step}, rank {self.rank}", *evidence]))

    def text(self) -> Iterator[str]:
        """Yield the lines of the report."""
        if self.certainty == "not reproduced" or not self.where:
            yield "diagnosis: not reproduced, so no operation is blamed"
            yield from (f"  because {printable(reason)}" for reason in self.reasons)
        else:
            yield f"diagnosis ({self.certainty}): {self.headline}"
            yield from (
                f"  no more certain, because {printable(reason)}" for reason in self.reasons
            )
            yield from self._evidence()
        if self.bundle:
            command = f"gradsurgeon replay {shlex.quote(self.bundle)} --model MODULE:BUILD"
            yield f"  to run the step again: {printable(command)}"
        if self.no_bundle:
            yield f"  no bundle was written: {printable(self.no_bundle)}"

    def _evidence(self) -> Iterator[str]:
        for number, line in enumerate(reversed(self.lines)):
            yield f"  {'called at' if number else 'at'} {line}"
        yield from (f"  in   {facts}" for facts in self.inputs)
        if self.output is not None:
            yield f"  {'out' if self.operation else 'is'}  {self.output}"
        if self.loss_nodes:
            yield f"  operations of the loss: {printable(', '.join(self.loss_nodes))}"
        if self.loss is not None and self.where == "output gradient":
            moment = "backward" if math.isfinite(self.loss) else "forward"
            yield f"  the loss is {self.loss:.4g}: look at the {moment} pass of these operations"
        if self.scale is not None:
            yield f"  the loss was scaled by {self.scale:g}"
        if self.cause is not None:
            yield f"  cause: {self.cause.fault}"
            yield from (f"    {printable(evidence)}" for evidence in self.cause.evidence)
            yield f"  to try: {self.cause.advice}"
        if self.history:
            yield "  largest magnitudes before it, the last one last:"
            shown = [(printable(label), value) for label, value in self.history]
            width = max(len(label) for label, _ in shown)
            yield from (f"    {label:{width}}  {value:.3g}" for label, value in shown)

    @property
    def headline(self) -> str:
        """Where the number became non-finite, in one line."""
        name = printable(self.name)
        of = f" of {self.place}" if self.module else ""
        if self.operation:
            node = f" ({self.node})" if self.node not in ("", self.operation) else ""
            outside = " outside of the model"
            text = (
                f"{self.what} born in the {self.where} pass{of or outside}: {self.operation}{node}"
            )
        else:
            text = _HEADLINES[self.where].format(
                what=self.what,
                bare=name,
                name=f" {name}" if name not in ("", self.where) else "",
                of=of,
            )
        if self.micro_batches > 1:
            text += f", micro-batch {self.micro_batch} of {self.micro_batches}"
        return text

    @property
    def place(self) -> str:
        """The module with its class."""
        name = "the root" if self.module == "." else printable(self.module)
        return f"{name} ({self.module_type})" if self.module_type else name
