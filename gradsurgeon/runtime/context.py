"""The state of a session that its rules use while they act."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from gradsurgeon.actions import Rule
from gradsurgeon.common.diagnosis import BUILD
from gradsurgeon.common.events import Event
from gradsurgeon.distributed.ranks import Ranks
from gradsurgeon.errors import GradSurgeonError, printable
from gradsurgeon.language.planning import Plan
from gradsurgeon.records.captured import CapturedTensors
from gradsurgeon.records.event_log import EventLog
from gradsurgeon.records.recorder import Recorder
from gradsurgeon.runtime.parameters import Parameters
from gradsurgeon.runtime.refusals import Refusals
from gradsurgeon.runtime.scaler_watch import Scaling
from gradsurgeon.runtime.step_counters import StepCounter, StepCounters
from gradsurgeon.runtime.training_curves import TrainingCurves
from gradsurgeon.tensors import _dist, _job_store, _torch

_NO_CAPTURE = "a CUDA graph is being captured, and its replays run no rule: call session.pause() before the capture"
_CAPTURE = "a CUDA graph is being captured: no rule acts during the capture, nor in its replays"


Mode = Literal["act", "observe"]


class SessionOptions(NamedTuple):
    """The options of `apply`, and further options for the launcher."""

    # `None` to search for optimizers, empty if the script updates the weights by hand.
    optimizers: Sequence[Optimizer] | None = None
    scaler: GradScaler | None = None
    mode: Mode = "act"
    # The number of the first update.
    start_step: int = 0
    # The launcher applied the rules: the script has no session, or its session acts before this one.
    beside: bool = False
    # Is called with each event.
    on_event: Callable[[Event], object] | None = None
    # Nobody chose these rules for the script: a rule that cannot act rests, and never ends the script.
    lenient: bool = False
    # Shows a line to the person at the terminal; without it lines are warnings and records of `logging`.
    say: Callable[[str], None] | None = None
    # Is called with each diagnosed step, as a function that opens the debugger where the fault was made.
    on_failed_step: Callable[[Callable[[], object]], None] | None = None
    # The value of `--model` that builds the model anew, for the commands that a diagnosis proposes.
    build: str = BUILD


def mention(title: str) -> str:
    """Return how a line names a model of a script that has several; nothing without a title."""
    return f", model {printable(title)}" if title else ""


class Context:
    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        options: SessionOptions,
        event_log: EventLog,
        recorder: Recorder,
    ) -> None:
        self.event_log = event_log
        self.recorder = recorder
        self.captures = CapturedTensors(event_log)
        self.mode = options.mode
        self.acts = options.mode == "act"
        # All rules, also rules that match nothing on this rank.
        self.rules = tuple(plan.rules.rules)
        # All parameters. Even without rules on them, their optimizer counts the steps.
        self.names = tuple([param.name for param in plan.manifest.params])
        self.index_of = {name: index for index, name in enumerate(self.names)}
        self.parameters = Parameters(model, self.names)
        self.counters = StepCounters(self.names, options.start_step)
        # The launcher applied the rules: the script has no session.
        self.outside = options.beside
        self.refusals = Refusals(event_log, self.rules, lenient=options.lenient)
        # Whether the session was told to pause.
        self.is_paused = False
        # The name of the model, if the process has several.
        self.title = ""
        # Is called with the name and the tensor of each tag, while a step is run again.
        self.tag_watcher: Callable[[str, Tensor], None] | None = None
        self.on_failed_step = options.on_failed_step
        self.build = options.build
        self.scaling = Scaling(options.scaler, self.refusals)
        self.curves = TrainingCurves(self.rules, recorder, self.counters, self.names)
        self._several = Ranks(self.parameters.params, self.parameters.groups_of)
        # The ranks of this process when the last backward pass began.
        self.ranks = Ranks()

    @property
    def are_averaged(self) -> bool:
        """Whether an engine averages gradients over ranks before they can be seen."""
        return self.parameters.elsewhere is not None and self.ranks.are_several

    @property
    def scaler_name(self) -> str:
        return "the GradScaler" if self.parameters.elsewhere is None else "DeepSpeed"

    @property
    def paused(self) -> bool:
        """Whether no rule acts now: the session is paused, all its rules rest, or a pack waits for the end of a capture."""
        if self.is_paused or self.refusals.over:
            return True
        return self.refusals.lenient and _torch.is_capturing()

    def meet_ranks(self) -> None:
        """Notice if this process is one of several ranks by now."""
        if self.ranks is not self._several and _dist.world() > 1:
            self.ranks = self._several
            # Later the rank that hosts the store may have ended.
            _job_store.connect()

    @property
    def reaches_ranks(self) -> bool:
        """Whether there are other ranks. The script may have ended the process group."""
        return self.ranks.are_several and _dist.world() > 1

    def names_of(self, indices: Iterable[int]) -> list[str]:
        return [self.names[index] for index in indices]

    def is_due(self, rule: Rule, counter: StepCounter) -> bool:
        return not self.paused and self.refusals.lets_act(rule, counter.step)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Suspend all rules, and the search for exchanged parameters, while a step is run again."""
        paused = self.is_paused
        self.is_paused = True
        try:
            with self.parameters.lock:
                yield
        finally:
            self.is_paused = paused

    @contextmanager
    def watching_tags(self, watcher: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call a function with the name and the tensor of each tag."""
        self.tag_watcher = watcher
        try:
            yield
        finally:
            self.tag_watcher = None

    def place(self, step: int, rule: str) -> str:
        return f"step {step}, rule {rule}{mention(self.title)}"

    def refuse_graph_capture(self) -> None:
        """Raise if a CUDA graph is being captured; a pack only reports that it waits."""
        if self.is_paused or self.refusals.over:
            return
        if _torch.is_capturing():
            text = _CAPTURE if self.refusals.lenient else _NO_CAPTURE
            self.refusals.abstain(GradSurgeonError(text))
