"""What a plan tells of a recorded run is what the same rules count while they observe that run."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip
from torch.optim import SGD

import gradsurgeon
from gradsurgeon import Session
from gradsurgeon.errors import RecordError
from gradsurgeon.language import schema
from gradsurgeon.language.planning import Manifest, MatchedRules, Matcher
from gradsurgeon.report.evidence import norms_file, run_norms, words
from gradsurgeon.report.evidence.run_norms import RunNorms
from gradsurgeon.report.evidence.told import Strongest, Told
from gradsurgeon.report.evidence.trial import Trial
from gradsurgeon.runtime.context import Mode

Entry = dict[str, Any]
STATS = ["l2", "linf"]
EACH = {"id": "each", "action": "norm-log", "params": "*", "at": "backward", "stats": STATS}
AFTER = {"id": "after", "action": "norm-log", "params": "*"}
FINAL = {"id": "final", "action": "norm-log", "params": "*", "at": "step", "stats": STATS}
STEPS = 120
# The update whose batch is not finite.
BAD = 77

AT_UPDATE: list[Entry] = [
    {"action": "nan-trap", "params": "*", "then": "warn"},
    {"action": "spike-trap", "params": "*", "above": {"sigmas": 3}, "then": "warn"},
    {"action": "spike-trap", "params": "2.*", "above": {"times": 1.5, "warmup": 20}},
    {"action": "spike-trap", "params": "*", "above": {"percentile": 95}, "then": "warn"},
    {"action": "spike-trap", "params": "2.*", "above": {"norm": 3}, "per": "parameter"},
    {"action": "clip-norm", "params": "*", "per": "rule", "max_norm": 1.0},
    {"action": "clip-norm", "params": "*", "per": "parameter", "max_norm": 0.5},
    {"action": "clip-norm", "params": "*", "per": "module", "max_norm": 0.3},
    {
        "action": "clip-norm",
        "params": "*",
        "per": "parameter",
        "max_norm": {"from": 0.6, "to": 0.1, "steps": 100},
    },
    {"action": "clip-norm", "params": "*", "per": "rule", "norm_type": "inf", "max_norm": 0.05},
    {"action": "freeze", "params": "0.bias", "steps": {"to": 50}},
    {"action": "zero", "at": "step", "params": "2.bias", "steps": {"every": 3}},
    {"action": "scale", "at": "step", "params": "0.*", "factor": -0.5, "steps": {"from": 10}},
]
AT_BACKWARD: list[Entry] = [
    {"action": "clip-norm", "at": "backward", "params": "*", "per": "parameter", "max_norm": 0.4},
    {"action": "zero", "params": "2.bias", "steps": {"every": 3}},
    {"action": "scale", "params": "0.*", "factor": 0.5},
]
CLAMP: list[Entry] = [
    {"action": "clamp", "at": "step", "params": "0.*", "min": -0.02, "max": 0.02},
    {"action": "clamp", "at": "step", "params": "2.*", "min": -0.3, "max": 0.3},
]


def named(entries: Sequence[Entry]) -> list[Entry]:
    return [{"id": f"rule-{number}", **entry} for number, entry in enumerate(entries)]


def train(
    path: Path,
    rules: Sequence[Entry],
    *,
    bad: int = -1,
    between: Callable[[nn.Module], object] = id,
    mode: Mode = "observe",
) -> Session:
    """Train under rules, which observe unless told otherwise, with two micro-batches for each update."""
    torch.manual_seed(0)
    sizes = (8, 16, 16, 1)
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    optimizer = SGD(model.parameters(), 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = gradsurgeon.apply(
            model, {"version": 1, "rules": [*rules]}, mode=mode, record=path
        )
        for step in range(STEPS):
            inputs = torch.randn(8, 8) * (8 if step % 37 == 5 else 1)
            if step == bad:
                inputs[0, 0] = torch.inf
            optimizer.zero_grad()
            for part in inputs.chunk(2):
                (model(part) - part.sum(1, keepdim=True)).square().mean().backward()
            between(model)
            kept = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            if step == bad:
                with torch.no_grad():
                    for param, value in zip(model.parameters(), kept, strict=True):
                        param.copy_(value)
        session.remove()
    return session


def grad_of(param: nn.Parameter) -> torch.Tensor:
    assert param.grad is not None
    return param.grad


def matched(session: Session, wanted: Container[str]) -> MatchedRules:
    """Return rules of a session by their actions or ids."""
    rules = [
        rule for rule in session.plan.rules.rules if rule.action in wanted or rule.id in wanted
    ]
    return MatchedRules(schema.from_rules(rules), Matcher(session.plan.manifest))


def told_on(session: Session, run: RunNorms) -> dict[str, Told]:
    plan = session.plan
    return Trial(MatchedRules(plan.rules, Matcher(plan.manifest)), run).told()


@pytest.mark.parametrize("start", range(0, len(AT_UPDATE), 4))
def test_rules_at_the_update_are_told_as_they_act(tmp_path: Path, start: int) -> None:
    # Turned round, each rule has others before it.
    rules = named([*AT_UPDATE[start:], *AT_UPDATE[:start]])
    # Without a scale, whose effect on a NaN nobody could count.
    bad = -1 if start else BAD
    if bad == BAD:
        rules = [rule for rule in rules if rule["action"] != "scale"]
    session = train(tmp_path / "run", [AFTER, FINAL, *rules], bad=bad)
    run = run_norms.read(tmp_path / "run")
    live = session.status()
    trips = Counter(event.rule for event in session.events if event.kind in ("trap", "spike"))
    for rule, told in told_on(session, run).items():
        assert not told.missing
        assert told.steps == STEPS
        (entry,) = [entry for entry in rules if entry["id"] == rule]
        if entry.get("then") == "warn":
            assert told.acts == trips[rule] == live[rule].altered
        else:
            assert sum(told.by_name.values()) == live[rule].altered
        assert told.acts or bad == -1


def test_rules_on_contributions_are_told_as_they_act(tmp_path: Path) -> None:
    for number, entry in enumerate(AT_BACKWARD):
        path = tmp_path / str(number)
        session = train(path, [EACH, *named([entry])])
        (told,) = told_on(session, run_norms.read(path)).values()
        assert told.steps == STEPS
        altered = session.status()["rule-0"].altered
        assert altered
        assert sum(told.by_name.values()) == altered


@pytest.mark.parametrize("entry", CLAMP)
def test_a_clamp_is_told_but_where_a_nan_hides_the_rest(tmp_path: Path, entry: Entry) -> None:
    session = train(tmp_path / "run", [FINAL, *named([entry])], bad=BAD)
    (told,) = told_on(session, run_norms.read(tmp_path / "run")).values()
    # Of the other tensors the elements are infinite, which a clamp bounds.
    assert told.steps == STEPS - (entry["params"] == "0.*")
    # Each of the two tensors may be changed in the failed update.
    assert 0 <= (session.status()["rule-0"].altered or 0) - sum(told.by_name.values()) <= 2
    assert told.acts


def test_of_a_nan_nobody_knows_which_elements_a_factor_changes(tmp_path: Path) -> None:
    stop = {"action": "scale", "at": "step", "params": "*", "factor": 0.0}
    clip_after = {"action": "clip-norm", "params": "*", "per": "rule", "max_norm": 0.1}
    trap = {"action": "spike-trap", "params": "*", "above": {"norm": 0.5}, "then": "warn"}
    session = train(tmp_path / "run", [FINAL, *named([stop, clip_after, trap])], bad=BAD)
    scaled, clipped, trapped = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert scaled.steps == scaled.acts == STEPS - 1
    # NaN times 0 is NaN, and no clip acts on it.
    assert clipped.acts == 0
    assert trapped.acts == session.status()["rule-2"].altered


def test_a_bound_that_learns_is_not_told_from_some_of_the_updates(tmp_path: Path) -> None:
    every = {"steps": {"every": 10}}
    learning = {"action": "spike-trap", "params": "*", "above": {"times": 1.5, "warmup": 2}}
    fixed = {"action": "spike-trap", "params": "*", "above": {"norm": 0.5}}
    entries = [{**learning, "then": "warn"}, {**learning, **every, "then": "warn"}, fixed]
    session = train(tmp_path / "run", [{**FINAL, **every}, *named(entries)])
    learnt, alike, bounded = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert "one in 10" in learnt.missing
    assert alike.missing == learnt.missing
    assert bounded.steps == STEPS // 10


def test_a_run_of_nothing_but_nan_does_not_tell_what_edits_change(tmp_path: Path) -> None:
    entry = {"action": "scale", "at": "step", "params": "*", "factor": 0.5}
    failing = {"steps": {"from": BAD, "to": BAD + 1}}
    session = train(tmp_path / "run", [{**FINAL, **failing}, *named([entry])], bad=BAD)
    (told,) = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert told.steps == told.acts == 0


def test_a_spike_of_a_loss_is_told_as_it_acts(tmp_path: Path) -> None:
    above = {"sigmas": 2, "warmup": 20}
    entry = {"action": "spike-trap", "tensors": "loss", "tensor": "value", "above": above}
    session = train(tmp_path / "run", [AFTER, *named([{**entry, "then": "warn"}])])
    (told,) = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert told.acts == session.status()["rule-0"].altered
    assert told.largest is not None
    assert told.largest.name == "loss"


def test_norms_after_backward_stand_for_the_update_unless_the_script_clips(tmp_path: Path) -> None:
    rules = named([entry for entry in AT_UPDATE if entry["action"] != "scale"])
    session = train(tmp_path / "plain", [AFTER, FINAL, *rules])
    whole = told_on(session, run_norms.read(tmp_path / "plain"))
    session = train(tmp_path / "after", [AFTER, *rules])
    for rule, told in told_on(session, run_norms.read(tmp_path / "after")).items():
        # The first needs another statistic, and changes what the second gets.
        assert bool(told.missing) == (rule in ("rule-9", "rule-11"))
        assert told.missing or told.acts == whole[rule].acts
    session = train(
        tmp_path / "clipped", [AFTER, *rules], between=lambda model: clip(model.parameters(), 1.0)
    )
    told_of = told_on(session, run_norms.read(tmp_path / "clipped"))
    for rule, told in told_of.items():
        is_told = rule in ("rule-0", "rule-10")
        assert ("the script changed gradients" in told.missing) != is_told
    (missing,) = {told.missing for told in told_of.values() if told.missing}
    assert missing.endswith("record the gradients with `norm-log` and `at: step`")


@pytest.mark.parametrize("first", [True, False])
def test_a_run_whose_rules_acted_tells_of_them_if_it_recorded_first(
    tmp_path: Path, *, first: bool
) -> None:
    one, each = named([AT_UPDATE[5], AT_UPDATE[6]])
    rules = [FINAL, one, each] if first else [one, FINAL, each]
    session = train(tmp_path / "run", rules, mode="act")
    for rule, told in told_on(session, run_norms.read(tmp_path / "run")).items():
        if first:
            assert sum(told.by_name.values()) == session.status()[rule].altered
        else:
            assert told.missing.endswith(
                "rule rule-0 of the run acted before `norm-log` at `step`: put the `norm-log` above it"
            )


def test_without_a_trap_nobody_saw_whether_the_script_clips(tmp_path: Path) -> None:
    session = train(tmp_path / "run", [AFTER, *named(AT_UPDATE[5:6])])
    (told,) = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert told.missing.startswith("no trap of the run saw")


def test_rules_behind_others_whose_effect_norms_do_not_show(tmp_path: Path) -> None:
    noise = {"action": "noise", "params": "0.weight", "std": 0.1}
    clips = [
        {"action": "clip-norm", "params": params, "per": "parameter", "max_norm": 0.5}
        for params in ("0.*", "2.*")
    ]
    session = train(tmp_path / "run", [FINAL, *named([noise, *clips])])
    drawn, behind, beside = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert drawn.missing == "norms do not show what `noise` does"
    assert behind.missing.startswith("rule rule-0 acts on these gradients before")
    assert not beside.missing
    # What acts on contributions, and is no multiple, is seen in no sum of them.
    early = {"action": "clip-norm", "at": "backward", "params": "2.*", "max_norm": 0.1}
    early["per"] = "parameter"
    session = train(tmp_path / "early", [EACH, FINAL, *named([early, *clips])])
    _, beside, behind = told_on(session, run_norms.read(tmp_path / "early")).values()
    assert not beside.missing
    assert behind.missing.startswith("rule rule-0 acts")


def test_a_clamp_that_never_acts_hides_nothing(tmp_path: Path) -> None:
    wide = {**CLAMP[1], "params": "*", "min": -1e6, "max": 1e6}
    session = train(tmp_path / "run", [FINAL, *named([wide, AT_UPDATE[5], CLAMP[0], AT_UPDATE[6]])])
    _, clip, _, behind = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert sum(clip.by_name.values()) == session.status()["rule-1"].altered
    assert clip.acts
    assert behind.missing.startswith("rule rule-2 acts")


def test_norms_that_were_not_recorded_are_named(tmp_path: Path) -> None:
    only = {**FINAL, "params": "0.*", "stats": ["l2"]}
    clamps = [{**CLAMP[1], "params": "0.*"}, {**CLAMP[1], "min": -0.1}]
    rules = named([{**AT_UPDATE[6], "params": "0.*"}, *clamps, AT_UPDATE[6]])
    session = train(tmp_path / "run", [only, *rules])
    each, clamp, uneven, wide = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert uneven.missing.startswith("records tell of bounds that are alike on both sides")
    assert wide.missing.startswith("no l2 at `step` of 2.bias, 2.weight, 4.bias")
    assert not each.missing
    assert clamp.missing.startswith("no linf at `step` of 0.bias, 0.weight: record `linf`")


def test_a_small_export_tells_the_same_and_a_long_run_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = train(tmp_path / "run", [AFTER, FINAL, *named(AT_UPDATE)])
    run = run_norms.read(tmp_path / "run")
    exact = told_on(session, run)
    assert not norms_file.write(run, tmp_path / "norms.json")
    kept = norms_file.read(tmp_path / "norms.json")
    for rule, told in told_on(session, kept).items():
        assert {**vars(told), "run": ""} == {**vars(exact[rule]), "run": ""}
    size = (tmp_path / "norms.json").stat().st_size
    monkeypatch.setattr(norms_file, "MOST_BYTES", size * 2 // 3)
    assert norms_file.write(run, tmp_path / "norms.json")
    assert (tmp_path / "norms.json").stat().st_size <= size * 2 // 3
    rounded = norms_file.read(tmp_path / "norms.json")
    spikes = told_on(session, rounded)["rule-1"]
    assert "learns from each update" in spikes.missing
    rules = matched(session, ("clip-norm", "freeze", "zero"))
    exact = Trial(rules, run).told()
    for rule, told in Trial(rules, rounded).told().items():
        assert told.is_rounded
        assert told.steps == STEPS
        assert told.acts == pytest.approx(exact[rule].acts, abs=STEPS / 8)
    # The step with the largest norms is one of those kept.
    assert Trial(rules, rounded).told()["rule-5"].largest == exact["rule-5"].largest


@pytest.mark.parametrize("content", ["", "{}", '{"norms":1}', "[" * 10_000])
def test_a_file_that_is_no_export_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "norms.json"
    path.write_text(content)
    with pytest.raises(RecordError, match=r"is no file that `gradsurgeon report RUN --norms FILE`"):
        norms_file.read(path)
    if content and content != '{"norms":1}':
        with pytest.raises(RecordError, match="is there already"):
            norms_file.write(RunNorms("run", Manifest("Net", ()), ()), path)


def test_thresholds_are_quantiles_and_how_often_each_would_act(tmp_path: Path) -> None:
    rules = named([AT_UPDATE[5], {**AT_UPDATE[6], "params": "*.weight"}])
    session = train(tmp_path / "run", [FINAL, *rules])
    # Apart, since the second gets what the first leaves.
    by_rule: dict[str, Told] = {}
    for rule in ("rule-0", "rule-1"):
        run = run_norms.read(tmp_path / "run")
        by_rule |= Trial(matched(session, [rule]), run, frozenset()).told()
    names = [bound.name for bound in session.plan.of("final")]
    history = {name: dict(session.history(name)) for name in names}
    table = np.array([[norms[step] for norms in history.values()] for step in range(STEPS)])
    whole = np.sqrt((table**2).sum(1))
    (joint,) = by_rule["rule-0"].thresholds
    assert joint.values == pytest.approx(
        np.quantile(whole, [0.5, 0.9, 0.99, 0.999, 1], method="inverted_cdf")
    )
    (each,) = by_rule["rule-1"].thresholds
    assert each.group == "{0,2,4}.weight"
    weights = table[:, ::2]
    assert each.values[1] == pytest.approx(np.quantile(weights, 0.9, method="inverted_cdf"))


BOUNDED: list[Callable[[float], Entry]] = [
    lambda bound: {**AT_UPDATE[5], "max_norm": bound},
    lambda bound: {**AT_UPDATE[6], "params": "0.weight", "max_norm": bound},
    lambda bound: {**AT_UPDATE[9], "max_norm": bound},
    lambda bound: {"action": "spike-trap", "params": "*", "above": {"norm": bound}},
    lambda bound: {**AT_UPDATE[1], "above": {"norm": bound}},
    lambda bound: {**CLAMP[1], "params": "2.bias", "min": -bound, "max": bound},
]


@pytest.mark.parametrize("bounded", BOUNDED)
def test_a_threshold_acts_as_often_as_a_rule_with_that_bound(
    tmp_path: Path, bounded: Callable[[float], Entry]
) -> None:
    session = train(tmp_path / "run", [FINAL, *named([bounded(1.0)])], bad=BAD)
    run = run_norms.read(tmp_path / "run")
    (told,) = Trial(matched(session, ["rule-0"]), run, frozenset()).told().values()
    (thresholds,) = told.thresholds
    matcher = Matcher(session.plan.manifest)
    for bound, acts in zip(thresholds.values, thresholds.acts, strict=True):
        rules = gradsurgeon.load({"version": 1, "rules": named([bounded(bound)])})
        (alike,) = Trial(MatchedRules(rules, matcher), run).told().values()
        assert alike.acts == acts


def test_beside_a_nan_other_tensors_tell_that_a_rule_acts(tmp_path: Path) -> None:
    half = {"action": "scale", "at": "step", "params": "*", "factor": 0.5}
    wide = {"action": "clamp", "at": "step", "params": "*", "min": -1e-9, "max": 1e-9}
    for entry in named([half, wide]):
        updates = iter(range(STEPS))

        def spoil(model: nn.Module, updates: Iterator[int] = updates) -> None:
            if next(updates) == STEPS - 1:
                grad_of(model.get_parameter("0.weight"))[0, 0] = torch.nan

        path = tmp_path / entry["id"]
        session = train(path, [FINAL, entry], between=spoil)
        (told,) = told_on(session, run_norms.read(path)).values()
        assert told.steps == told.acts == STEPS
        assert told.by_name["0.weight"] == told.by_name["2.weight"] - 1


def test_a_trap_is_told_as_it_decides_at_the_update(tmp_path: Path) -> None:
    def repair(model: nn.Module) -> None:
        for param in model.parameters():
            torch.nan_to_num_(grad_of(param), 0.0, 0.0, 0.0)

    trap = named(AT_UPDATE[:1])
    session = train(tmp_path / "final", [AFTER, FINAL, *trap], bad=BAD, between=repair)
    (told,) = told_on(session, run_norms.read(tmp_path / "final")).values()
    assert not told.missing
    assert told.acts == session.status()["rule-0"].altered == 0
    session = train(tmp_path / "only", [FINAL, *trap], bad=BAD)
    (told,) = told_on(session, run_norms.read(tmp_path / "only")).values()
    assert told.acts == session.status()["rule-0"].altered == 1
    session = train(tmp_path / "after", [AFTER, *trap], bad=BAD, between=repair)
    (told,) = told_on(session, run_norms.read(tmp_path / "after")).values()
    assert told.missing.startswith("the script changed gradients")


def test_what_learns_is_not_told_from_records_that_begin_late(tmp_path: Path) -> None:
    learning = {"action": "spike-trap", "params": "*", "above": {"times": 1.5, "warmup": 2}}
    late = {"steps": {"from": 30}}
    entries = named([{**learning, "then": "warn"}, {**learning, **late, "then": "warn"}])
    session = train(tmp_path / "run", [{**FINAL, **late}, *entries])
    early, alike = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert early.missing.endswith("the run recorded none before 30: record all")
    assert alike.acts == session.status()["rule-1"].altered


def test_passes_whose_update_never_came_are_not_counted(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), 0.01)
    scale = {"id": "half", "action": "scale", "params": "*", "factor": 0.5}
    rules = {"version": 1, "rules": [EACH, scale]}
    with gradsurgeon.apply(model, rules, mode="observe", record=tmp_path / "run") as session:
        for step in range(4):
            model(torch.ones(2)).sum().backward()
            if step < 3:
                optimizer.step()
    (told,) = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert told.steps == told.acts == 3


def test_a_generator_leaves_its_critic_a_pass_without_an_update_at_the_end(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    generator, critic = (SGD(part.parameters(), 0.01) for part in model)
    scale = {"id": "half", "action": "scale", "params": "*", "factor": 0.5}
    rules = {"version": 1, "rules": [EACH, scale]}
    with gradsurgeon.apply(model, rules, mode="observe", record=tmp_path / "run") as session:
        for _ in range(5):
            critic.zero_grad()
            model[1](torch.ones(2)).sum().backward()
            critic.step()
            generator.zero_grad()
            model(torch.ones(2)).sum().backward()
            generator.step()
    (told,) = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert told.steps == told.acts == 10
    # All passes are counted but the last of the generator through the critic.
    assert dict(told.by_name) == {"0.weight": 5, "0.bias": 5, "1.weight": 9, "1.bias": 9}
    assert session.status()["half"].altered == told.by_name.total() + 2


def test_no_number_of_the_json_is_infinite(tmp_path: Path) -> None:
    session = train(tmp_path / "run", [FINAL, *named(CLAMP[1:])], bad=BAD)
    (told,) = told_on(session, run_norms.read(tmp_path / "run")).values()
    assert told.strength == np.inf
    assert told.to_dict()["largest"] == {"name": "2.weight", "step": BAD, "factor": None}


def test_of_a_trap_no_diff_says_that_it_divides_a_gradient() -> None:
    told = Told("run", steps=4, acts=1, largest=Strongest("weight", 2, 3.0))
    assert words.change(told, None) == "on run: acts in 25 % of 4 recorded steps"
    told.bites = True
    assert words.change(told, None).endswith("the largest gradient is divided by 3")


def test_both_bounds_of_a_clamp_may_be_open(tmp_path: Path) -> None:
    # As `min: ?` and `max: ?` are read.
    entry = {**CLAMP[1], "params": "2.bias", "min": 1.0, "max": 1.0}
    session = train(tmp_path / "run", [FINAL, *named([entry])])
    run = run_norms.read(tmp_path / "run")
    rules = matched(session, ["rule-0"])
    (told,) = Trial(rules, run, frozenset({"rule-0"})).told().values()
    assert told.missing == "its bound is `?`"
    (thresholds,) = told.thresholds
    assert thresholds.values[-1] == max(value for _, value in session.history("2.bias", "linf"))
    (told,) = Trial(rules, run).told().values()
    assert told.missing.startswith("records tell of bounds that are alike")
