"""Whichever function of the package fails under a pack, the script trains as without it, and at most one line says so."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import CodeType, FrameType
from typing import Any

import pack_trainings as trainings
import pytest
from pack_trainings import DEBUG, PACKAGE, Train, launched, same

TRAIN: dict[str, tuple[Train, str]] = {
    "plain": (trainings.plain, DEBUG),
    "NaN": (trainings.with_a_nan, DEBUG),
    "NaN, skipped": (trainings.with_a_nan, "gradsurgeon:nan-trap@1"),
    "NaN and spikes": (trainings.with_a_nan, "gradsurgeon:llm-stability@1"),
    "NaN, modules": (trainings.with_a_nan, "gradsurgeon:debug-everything@1"),
    "scaler": (trainings.scaled, "gradsurgeon:debug-everything@1"),
    "LBFGS": (trainings.lbfgs, DEBUG),
    "by hand": (trainings.by_hand, DEBUG),
    "inside backward": (trainings.inside_backward, DEBUG),
    "accumulation": (trainings.accumulated, "gradsurgeon:fingerprint@1"),
    "changed model": (trainings.changed, "gradsurgeon:debug-everything@1"),
    "heads": (trainings.two_heads, "gradsurgeon:multi-task@1"),
}
# What a script calls is one of these rooms, or is called by one of them: no guard is around the doors themselves.
PASS_ON = {str(PACKAGE / name) for name in ("common/_patching.py", "tensors/_backward_calls.py")}
DOORS = {
    "Guard.__enter__",
    "Guard.__exit__",
    "Guard.__init__",
    "RunningPass.begin",
    "RunningPass.unlist",
    "RunningPass.refuse_other_threads",
    "Patch.__init__.<locals>.patched",
    "_Meeting.give",
    "_backward_watches",
    "_controllers",
    "_listed",
    "_numbered",
    "_on_scale",
    "_on_step",
    "_show_begin",
    "_show_end",
    "_show_failure",
    "_spared.<locals>.run",
    "_train",
    "around_passes.<locals>.around",
    "watched.<locals>.scale",
}
INSIDE = f"{PACKAGE}/"
INJECTED = "an error that the test has put there"


def is_inner(frame: FrameType) -> bool:
    """Tell whether a function of the package was called by another one, which stands between it and the script."""
    code, outer = frame.f_code, frame.f_back
    if outer is None or not code.co_filename.startswith(INSIDE):
        return False
    # Python closes a generator without its caller; its other errors are those of the caller.
    if code.co_flags & CO_GENERATOR or code.co_qualname.partition(".<locals>.<")[0] in DOORS:
        return False
    caller = outer.f_code.co_filename
    return caller.startswith(INSIDE) and caller not in PASS_ON


@contextmanager
def watching(called: Callable[[FrameType], None], code: CodeType | None = None) -> Iterator[None]:
    """Call a function at each call of an inner function of the package; what it raises, that function raises.

    Calls of one ``code`` are told from others at once: tracing is most of what these tests take.
    """

    def trace(frame: FrameType, event: str, _: object) -> None:
        if (code is None or frame.f_code is code) and is_inner(frame):
            called(frame)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def reached(train: Train, pack: str) -> list[CodeType]:
    """Return the functions of the package that a training runs through, in this order."""
    codes: dict[CodeType, None] = {}
    launched(train, pack, watch=lambda: watching(lambda frame: codes.setdefault(frame.f_code)))
    return list(codes)


def with_a_fault(train: Train, pack: str, code: CodeType) -> trainings.Launched:
    """Run a training in which the first call of a function fails."""
    calls: list[FrameType] = []

    def fail(frame: FrameType) -> None:
        if not calls:
            calls.append(frame)
            raise RuntimeError(INJECTED)

    return launched(train, pack, watch=lambda: watching(fail, code))


def check(name: str, codes: list[CodeType]) -> None:
    train, pack = TRAIN[name]
    wanted = [param.detach().clone() for param in train()]
    launched_well = launched(train, pack).weights
    # Each training looks for models among all live objects: what has been imported by now is left out.
    gc.collect()
    gc.freeze()
    for code in codes:
        where = f"{code.co_filename}:{code.co_qualname}"
        try:
            done = with_a_fault(train, pack, code)
        except Exception as error:  # the failure names the function
            raise AssertionError(f"{where} ends the script: {error!r}") from error
        # A pack may skip a step, as long as it acts.
        assert same(done.weights, wanted) or same(done.weights, launched_well), where
        assert sum(INJECTED in line for line in done.lines) <= 1, (where, done.lines)


def test_a_fault_ends_no_script_and_changes_no_weight() -> None:
    codes = reached(*TRAIN["plain"])
    assert len(codes) > 300
    check("plain", codes[::20])


@pytest.mark.slow
@pytest.mark.no_cover  # tracing takes the place of coverage
@pytest.mark.parametrize("name", TRAIN)
def test_no_function_can_end_a_script(name: str) -> None:
    known: set[CodeType] = set()
    for other, how in TRAIN.items():
        if other == name:
            break
        known.update(reached(*how))
    codes = [code for code in reached(*TRAIN[name]) if code not in known]
    check(name, codes)


def test_a_fault_of_the_records_is_a_line_and_the_summary_stays(tmp_path: Any) -> None:
    codes = [c for c in reached(trainings.plain, DEBUG) if c.co_qualname == "Recorder.end_step"]
    done = launched(
        trainings.plain,
        record=str(tmp_path / "run"),
        watch=lambda: watching(lambda frame: fail_in(frame, codes[0])),
    )
    assert sum(INJECTED in line for line in done.lines) == 1


def fail_in(frame: FrameType, code: CodeType) -> None:
    if frame.f_code is code:
        raise RuntimeError(INJECTED)
