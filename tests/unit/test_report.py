from __future__ import annotations

import math
import re
from array import array
from collections.abc import Mapping, Sequence

import pytest
from runs import shown
from small import sgd

from gradsurgeon.common.events import Event, EventKind, RuleStatus
from gradsurgeon.records.store import Key, Records
from gradsurgeon.records.store.memory import NOTHING_RECORDED
from gradsurgeon.report import Report, RuleInfo
from gradsurgeon.report.json_form import to_dict
from gradsurgeon.report.sheets import NO_NORM
from gradsurgeon.report.tables import BLOCKS, NONFINITE, sparkline

NAN, INF = math.nan, math.inf


def records(
    histories: Mapping[str, Sequence[float | None]],
    *,
    rule: str = "norms",
    stat: str = "l2",
    point: str = "accumulated",
    into: Records | None = None,
) -> Records:
    """Return records of one series with one column per name and one row per step."""
    found = Records() if into is None else into
    key = Key(rule, stat, point, tuple(histories))
    for step, values in enumerate(zip(*histories.values(), strict=True)):
        row = array("f", [0.0 if value is None else value for value in values])
        absent = frozenset(i for i, value in enumerate(values) if value is None)
        found.add(key, step, row.tobytes(), absent)
    return found


def report(
    measured: Records | None = None,
    *,
    params: Sequence[str] = (),
    events: Sequence[Event] = (),
    logged: Sequence[str] = (),
    rules: Mapping[str, RuleInfo] | None = None,
    statuses: Mapping[str, RuleStatus] | None = None,
) -> Report:
    found = Records() if measured is None else measured
    names = dict.fromkeys(name for series in found for name in series.key.names)
    return Report(
        title="rules.yaml on Net",
        params=tuple(params) or tuple(names),
        rules=rules or {"norms": RuleInfo("norm-log", "observe", tuple(logged))},
        statuses=statuses if statuses is not None else {"norms": RuleStatus(1, 5, 0, 4)},
        events=events,
        **shown(found),
    )


def row(text: str, name: str) -> list[str]:
    """Return the cells of the first line that begins with a name."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def event(step: int, **given: str) -> Event:
    kind: EventKind = "notice"
    if given.get("kind") == "trap":
        kind = "trap"
    name, rule = given.get("name", ""), given.get("rule", "")
    return Event(kind, rule, step, 0, name, given.get("message", f"step {step} went by"))


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([10.0**i for i in range(8)], BLOCKS),
        ([0.3, 0.3, 0.3], "▅▅▅"),
        ([1.0, 1.02, 0.98], "▅▅▄"),
        # Half a decade spans half of the levels.
        ([1.0, 10**0.5], "▃▇"),
        # Without a limit on the decades, 1 and 1000 would share the highest level.
        ([1e-30, 1.0, 1000.0], "▁▆█"),
        ([1.0, NAN, INF, 0.0, None, 1.0], f"▅{NONFINITE}{NONFINITE}_ ▅"),
        ([], ""),
        ([None, None], "  "),
        ([NAN], NONFINITE),
    ],
)
def test_a_sparkline_has_a_level_per_decade_and_marks_for_what_is_no_norm(
    values: list[float | None], drawn: str
) -> None:
    history = [NO_NORM if value is None else value for value in values]
    assert sparkline(history, 32) == drawn


@pytest.mark.parametrize(
    ("value", "mark", "rest"), [(1000.0, "█", "▁"), (NAN, NONFINITE, "▅")], ids=["spike", "nan"]
)
@pytest.mark.parametrize("at", [0, 4_999, 9_999])
def test_one_step_in_ten_thousand_survives(value: float, mark: str, rest: str, at: int) -> None:
    values = [1.0] * 10_000
    values[at] = value
    cell = at * 20 // 10_000
    assert sparkline(values, 20) == rest * cell + mark + rest * (19 - cell)


def test_the_numbers_stand_at_their_parameter() -> None:
    text = report(
        records(
            {
                "a.weight": [1.0, 2.0, 64.0, 3.0, 4.0],
                "a.bias": [0.5, NAN, 0.25, INF, 0.125],
                "broken": [NAN, INF, NAN, NAN, NAN],
            }
        )
    ).text(width=100)
    assert row(text, "a.weight")[2:6] == ["1", "3", "64", "4"]
    assert row(text, "a.weight")[6:] == ["-"]
    assert row(text, "a.bias")[1:] == ["▇✗▅✗▂", "0.5", "0.25", "0.5", "0.125", "2"]
    assert row(text, "broken")[1:] == ["✗✗✗✗✗", "nan", "nan", "nan", "nan", "5"]
    assert "non-finite: 2 parameters, 1 of them first at step 0: broken" in text


def test_zero_and_silent_parameters_are_called_out() -> None:
    measured = records({"w": [1.0, 1.0], "dead": [0.0, 0.0], "unused": [None, None]})
    text = report(
        measured, logged=("w", "dead", "unused", "unseen"), params=("w", "dead", "unused", "unseen")
    ).text()
    assert "norm always exactly 0: dead\n" in text
    assert "never got a gradient: unused, unseen\n" in text
    with pytest.raises(StopIteration):
        row(text, "unused")


def test_a_layer_that_dies_in_the_course_of_the_run_is_called_out() -> None:
    alive, dead = [1.0] * 12, [0.0] * 18
    measured = {
        "w": [1.0] * 30,
        "fc1.weight": alive + dead,
        "fc1.bias": alive + dead,
        "fc2.weight": [*alive, 1.0, *dead[1:]],
        "back": [*alive, *dead[:-1], 2.0],
        "resting": [1.0] * 28 + [0.0] * 2,
        # On its way to 0 a layer may pass through what is left of a sum.
        "abrupt": [*[1.0] * 13, 1e-34, *[0.0] * 16],
        # A training that converges.
        "shrinking": [*[1e-2**step for step in range(12)], *[0.0] * 18],
        "converged": [1.0] * 2 + [1e-9] * 16 + [0.0] * 12,
    }
    lines = [line.strip() for line in report(records(measured)).text(width=110).splitlines()]
    assert [line for line in lines if line.startswith("norm exactly 0")] == [
        "norm exactly 0 since step 12 or later, and until the end: fc1.weight, fc1.bias, fc2.weight, abrupt",
    ]


def test_of_many_deaths_the_first_are_named() -> None:
    measured = {f"p{n}": [1.0] * (5 + n) + [0.0] * (25 - n) for n in range(6)}
    text = report(records(measured)).text(width=110)
    assert (
        "norm exactly 0 since step 5 or later, and until the end: p0, p1, p2, p3, and 2 more\n"
        in text
    )


def test_a_parameter_with_one_nonzero_step_is_not_called_zero() -> None:
    zero = [0.0] * 10
    text = report(records({"w": [*zero, 1e-20, *zero], "nan": [*zero, NAN, *zero]})).text()
    assert "always" not in text
    # Zeros have no spread, so nothing can stand out from it.
    assert "spike" not in text


def test_a_rule_that_never_fired_accuses_no_parameter() -> None:
    text = report(
        logged=("w",), params=("w",), statuses={"norms": RuleStatus(1, 0, 0, None)}
    ).text()
    assert "never got" not in text
    assert "no l2 recorded; recorded: nothing" in text
    assert row(text, "norms")[-2:] == ["NEVER", "FIRED"]


def test_accumulated_is_preferred_and_the_rest_is_named() -> None:
    measured = records({"w": [5.0]}, rule="raw", point="backward")
    records({"w": [7.0], "v": [8.0]}, rule="norms", into=measured)
    records({"w": [9.0]}, rule="final", point="step", into=measured)
    records({"x": [2.0]}, rule="others", into=measured)
    text = report(measured, params=("w", "v", "x")).text()
    assert "not shown: final (at step), raw (at backward)\n" in text
    assert row(text, "w")[2] == "7"
    # Where several rules are shown, each row names its own.
    assert row(text, "v")[-1] == "norms"
    assert row(text, "x")[-1] == "others"


def test_other_statistics_are_mentioned_where_l2_is_missing() -> None:
    text = report(records({"w": [1.0]}, stat="linf")).text()
    assert "no l2 recorded; recorded: linf" in text


def test_a_thousand_parameters_are_abridged_and_the_worst_still_shown() -> None:
    histories: dict[str, list[float | None]] = {f"layer{i}.weight": [1.0] * 21 for i in range(1000)}
    histories["layer900.weight"] = [1.0, NAN, *[1.0] * 19]
    histories["layer800.weight"] = [*[1.0] * 18, 50.0, 1.0, 1.0]
    text = report(records(histories)).text()
    lines = [line for line in text.splitlines() if line.startswith("  layer")]
    assert len(lines) == 40
    assert (
        "and 960 more; those that are not finite, then spikes, then the largest are shown" in text
    )
    assert row(text, "layer0.weight")
    assert row(text, "layer900.weight")[6] == "1"
    assert row(text, "layer800.weight")[4] == "50"
    shown = [int(line.split(".")[0].removeprefix("  layer")) for line in lines]
    assert shown == sorted(shown)


def test_the_spike_of_all_together_is_told() -> None:
    long: list[float | None] = [1.0] * 20
    histories = {f"n{i}": [*long, 30.0, NAN] for i in range(100)}
    histories["last"] = [*long, 1.0, 64.0]
    text = report(records(histories)).text()
    # The norm of all together comes before that of one.
    whole = "the norm of all 101 parameters, 300 at step 20, 29.9x the steps before it"
    assert f"largest spike: {whole}; most in n0, n1, n2, n3, and 96 more\n" in text
    assert "first at step 21: n0, n1, n2, n3, and 96 more\n" in text


def test_the_sparkline_shrinks_with_the_terminal_and_the_names_do_not() -> None:
    name = "transformer.h.10.attn.c_proj.weight"
    measured = records({name: [1.0] * 500})
    for width, expected in ((200, 32), (60, 8)):
        assert row(report(measured).text(width=width), name)[1] == "▅" * expected
    medium = report(measured).text(width=105)
    assert 8 < len(row(medium, name)[1]) < 32
    assert max(map(len, medium.splitlines())) <= 105


def test_control_characters_are_escaped_everywhere() -> None:
    evil = "w\x1b[2J\u202e"
    text = str(
        Report(
            title=f"{evil}.yaml on {evil}",
            params=(evil,),
            rules={"norms": RuleInfo("norm-log", "observe", (evil,))},
            statuses={"norms": RuleStatus(1, 1, 0, 0)},
            events=[event(0, name=evil, message=f"{evil}\nsecond {evil}\r")],
            **shown(records({evil: [0.0]})),
        )
    )
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\r" not in text
    assert text.count("w\\x1b[2J\\u202e") == 7


def test_the_rules_say_what_they_did() -> None:
    rules = {
        "clip": RuleInfo("clamp"),
        "idle": RuleInfo("scale"),
        "watch": RuleInfo("nan-trap", "trap"),
        "quiet": RuleInfo("nan-trap", "trap"),
        "blind": RuleInfo("nan-trap", "trap"),
        "norms": RuleInfo("norm-log", "observe"),
    }
    statuses = {
        "clip": RuleStatus(2, 1000, 125, 499),
        "idle": RuleStatus(3, 7, 0, 6),
        "watch": RuleStatus(8, 500, 2, 499),
        "quiet": RuleStatus(8, 1, 0, 499),
        "blind": RuleStatus(8, 0, 0, None),
        "norms": RuleStatus(8, 0, 0, None),
    }
    text = report(rules=rules, statuses=statuses).text()
    assert row(text, "clip") == ["clip", "clamp", "2", "1,000", "12.5%", "499"]
    assert row(text, "idle")[4:] == ["0%", "6", "changed", "nothing"]
    assert row(text, "watch")[2:6] == ["8", "-", "-", "499"]
    assert next(line for line in text.splitlines() if "watch" in line).endswith(
        "499  checked 500 updates, tripped 2 times"
    )
    assert row(text, "quiet")[3:] == [
        "-",
        "-",
        "499",
        *["checked", "1", "of", "494", "updates,", "never", "tripped"],
    ]
    assert row(text, "blind")[3:] == ["-", "-", "-", "NEVER", "CHECKED"]
    assert row(text, "norms")[2:] == ["8", "0", "-", "-", "NEVER", "FIRED"]


LEVEL = [1.0 + 0.1 * (step % 3) for step in range(60)]
FALLING = [0.9**step for step in range(300)]


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([*LEVEL, 10.0, *LEVEL], None),
        ([*LEVEL, 50.0, *LEVEL], 60),
        ([*LEVEL, 5.0, 50.0, 20.0, 5.0, *LEVEL], 61),
        ([*LEVEL, 50.0], 60),
        ([*LEVEL, NAN, 50.0, INF, *LEVEL], 61),
        # Of the beginning nobody knows whether it is one, and a new level is none.
        ([50.0, *LEVEL], None),
        ([*LEVEL, *(100 * value for value in LEVEL)], None),
        # A whole training: what is far above the median is its beginning, what stands out is late.
        (FALLING, None),
        (FALLING[::-1], None),
        # The first steps are not judged.
        ([*LEVEL[:3], 500.0, *LEVEL, 6.0, *LEVEL], None),
        # A warm-up rises from next to nothing, and stays.
        ([1e-6, 1e-4, 1e-2, *LEVEL], None),
        # Few steps have no usual norm.
        ([*LEVEL[:15], 50.0], None),
        ([*LEVEL[:16], 50.0], 16),
    ],
)
def test_a_norm_that_stands_out_from_its_own_past_is_a_spike(
    values: list[float], step: int | None
) -> None:
    text = report(records({"w": values})).text()
    told = re.search(r"largest spike: w, 50 at step (\d+), ", text)
    assert (int(told[1]) if told else None) == step
    assert ("largest spike" in text) is (step is not None)


NOISE = [1.0, 1.4, 0.8, 1.2, 0.7, 1.1]
# Twice as large every other step, by leaps at last.
EXPLODES = [NOISE[step % 6] * 1.4**step for step in range(40)] + [3e8, 5e9, 2e11]


def test_norms_that_only_grow_are_no_spikes() -> None:
    histories = {f"p{number}": EXPLODES for number in range(8)}
    found = report(records({**histories, "calm": [*LEVEL[:30], 50.0, *LEVEL[:12]]}))
    assert [track.name for track in found.history.tracks if track.spike] == ["calm"]
    text = found.text(width=110)
    assert (
        "exploding: p0, p1, p2, p3, and 4 more; p0 grew from 1 to 2e+11 at step 42 (last 2e+11)\n"
        in text
    )


def test_a_module_that_is_seldom_called_explodes_in_few_records() -> None:
    """It has two norms before it is non-finite, in many steps without any."""
    seldom = [2.0 if step == 0 else 8e25 if step == 20 else None for step in range(40)]
    seldom[30:] = [NAN if step % 10 == 0 else None for step in range(30, 40)]
    calm = {f"p{number}": [1.0 + 0.1 * (step % 3) for step in range(40)] for number in range(5)}
    remarks = report(records({**calm, "seldom": seldom})).remarks
    assert [one for one in remarks if one.startswith("exploding")] == [
        "exploding: seldom; seldom grew from 2 to 8e+25 at step 20, before it was non-finite at step 30"
    ]
    assert not [one for one in remarks if one.startswith(("noisy", "vanishing"))]
    # A single high norm among few is no growth.
    back = {"back": [1.0, 5e5, 1.0, 1.0, *[None] * 36]}
    assert not [one for one in report(records({**calm, **back})).remarks if "exploding" in one]


def test_where_no_parameter_got_a_gradient_they_are_named() -> None:
    waited = "was due in 3 steps and has not fired yet: no gradient reached any parameter"
    given = {"logged": ("w", "v"), "params": ("w", "v")}
    starved = report(**given, statuses={"norms": RuleStatus(2, 0, 0, None, (waited,))})  # type: ignore[arg-type]
    assert "never got a gradient: w, v" in starved.remarks
    never_due = report(**given, statuses={"norms": RuleStatus(2, 0, 0, None, ("odd",))})  # type: ignore[arg-type]
    assert never_due.remarks == ()


def test_a_trap_that_several_ranks_note_is_one() -> None:
    seen = [(0, 3), (1, 3), (0, 5), (1, 5)]
    events = [Event("trap", "watch", step, rank, "w", f"step {step}: bad") for rank, step in seen]
    # A notice of one rank alone, twice in a step, and the same of another.
    events += [
        Event("notice", "", 3, rank, "", text) for rank, text in ((0, "a"), (0, "b"), (1, "a"))
    ]
    text = report(
        events=events,
        rules={"watch": RuleInfo("nan-trap", "trap")},
        statuses={"watch": RuleStatus(8, 20, 4, 9)},
    ).text()
    assert "4 events (2 trap, 2 notice)" in text.splitlines()[1]
    assert "  checked 20 updates, tripped 4 times on 2 ranks, last at 5\n" in text
    assert "events (4)" in text
    assert "  step 3  trap  watch  w  rank 0, 1  x2, steps 3..5\n" in text
    # The same step on both: no repetition.
    assert "  step 3  notice  rank 0, 1\n      a" in text


def test_many_events_keep_the_first_and_the_last() -> None:
    events = [event(i, name=f"p{i}") for i in range(100)]
    text = report(events=events).text()
    assert "... and 80 more" in text
    assert re.findall(r"p\d+$", text, re.MULTILINE) == [
        f"p{i}" for i in (*range(10), *range(90, 100))
    ]


def test_nothing_at_all_still_reads() -> None:
    empty = Report(title="t", params=(), rules={}, statuses={})
    assert to_dict(empty)["ended"] is None
    text = empty.text()
    assert (
        text
        == "summary: t: no step seen, 0 events\n\nnorms: no l2 recorded; recorded: "
        + NOTHING_RECORDED
    )


@pytest.mark.parametrize("limit", [2**20, 16 * 164])
def test_that_no_gradient_came_is_said_if_no_row_was_dropped(limit: int) -> None:
    measured = Records(limit_bytes=limit)
    key = Key("norms", "l2", "step", ("w", "early"))
    for step in range(40):
        measured.add(key, step, array("f", [1.0, 0.0]).tobytes(), frozenset({1}))
    text = report(measured, logged=["w", "early"]).text()
    assert (" rows dropped, the oldest" in text.splitlines()[0]) is (limit < 2**20)
    assert ("never got a gradient: early" in text) is (limit == 2**20)


def test_repeated_events_are_folded_and_lines_indented() -> None:
    events = [
        event(step, kind="trap", rule="nans", name="w", message=f"step {step}: {step} bad\nskipped")
        for step in range(3, 15)
    ]
    other = event(15, kind="trap", rule="nans", name="w", message="step 15: 15 bad\ngiving up")
    text = report(events=[event(0, message="first of all"), *events, other]).text()
    assert "  step 3  trap  nans  w  x12, steps 3..14\n      step 3: 3 bad\n      skipped" in text
    assert "  step 15  trap  nans  w\n      step 15: 15 bad\n      giving up" in text
    assert text.count("bad") == 3  # the band has one
    assert text.index("first of all") < text.index("x12")


@pytest.mark.parametrize("start", [0, 100])
def test_the_summary_of_a_session_holds_its_numbers(start: int) -> None:
    import torch
    from torch import nn

    import gradsurgeon
    from gradsurgeon.report import summary

    last = nn.Linear(1, 1, bias=False)
    nn.init.ones_(last.weight.requires_grad_(False))
    model = nn.Sequential(nn.Linear(2, 1, bias=False), last)
    optimizer = sgd(model)
    steps = {"to": start + 2}
    rules = [
        {"id": "norms", "action": "norm-log", "params": "*", "steps": steps},
        {"id": "double", "action": "scale", "params": "0.*", "factor": 2.0, "steps": steps},
    ]
    with gradsurgeon.apply(
        model, {"version": 1, "rules": rules}, optimizer=optimizer, start_step=start
    ) as session:
        assert " on Sequential: no step seen, 0 events" in str(summary(session))
        # Nothing is recorded in the third step.
        for size in (1.0, 2.0, 3.0):
            optimizer.zero_grad()
            model(torch.tensor([[3.0 * size, 4.0 * size]])).sum().backward()
            optimizer.step()
    found = summary(session)
    text = found.text(width=100)
    assert found.params == ("0.weight", "1.weight")
    assert found.rules["norms"] == RuleInfo("norm-log", "observe", ("0.weight", "1.weight"))
    assert found.rules["double"] == RuleInfo("scale", "edit", ())
    assert f"on Sequential: steps {start}..{start + 2}, 0 events" in text
    assert row(text, "0.weight")[2:6] == ["10", "15", "20", "20"]
    assert "; requires_grad off: 1 parameter, largest 1.weight\n" in text
    assert "never got a gradient" not in text
    assert row(text, "double") == ["double", "scale", "1", "2", "-", f"{start + 1}"]
