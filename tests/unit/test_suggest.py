"""From records to rules: groups, patterns, thresholds, and the file that comes of them."""

from __future__ import annotations

import math
import pathlib
import random
import re
from collections.abc import Sequence

import pytest
import yaml
from runs import meta, values, write

from gradsurgeon import Event, RecordError
from gradsurgeon.actions import ACTIONS
from gradsurgeon.match import compile_pattern, select
from gradsurgeon.review import lint
from gradsurgeon.store import Key
from gradsurgeon.store.run import open_run
from gradsurgeon.store.writer import RunWriter
from gradsurgeon.suggestion import Suggestion, suggest
from gradsurgeon.suggestion.groups import groups_of, patterns_of
from gradsurgeon.suggestion.recorded import Behaviour, group_norms, skipped_steps, sources
from gradsurgeon.suggestion.rule_text import rule_id
from gradsurgeon.suggestion.thresholds import let_through, threshold

STEPS = 2000


def calm(seed: int, level: float = 1.0, steps: int = STEPS) -> list[float]:
    rng = random.Random(seed)
    return [level * rng.lognormvariate(0, 0.2) for _ in range(steps)]


def falling(seed: int, level: float = 1.0) -> list[float]:
    return [norm * (2 - step / STEPS) for step, norm in enumerate(calm(seed, level))]


def suggestion(path: pathlib.Path, share: float = 0.02) -> Suggestion:
    with open_run(path) as run:
        return suggest(run, share)


def recorded(path: pathlib.Path, **histories: Sequence[float | None]) -> pathlib.Path:
    named = {name.replace("__", "."): history for name, history in histories.items()}
    write(path, named, point="step").close()
    return path


def rules_of(text: str) -> list[dict[str, object]]:
    return list(yaml.safe_load(text)["rules"])


class TestThreshold:
    @pytest.mark.parametrize("share", [0.01, 0.02, 0.1, 0.5])
    def test_it_bites_in_the_share_of_steps_that_was_asked(self, share: float) -> None:
        norms = calm(0, steps=5000)
        found = threshold(norms, share)
        assert found.drift is None
        assert found.value is not None
        bites = sum(norm + 1e-6 > found.value for norm in norms)
        assert bites == found.bites == pytest.approx(share * 5000, rel=0.1)
        assert len(repr(found.value).replace(".", "").lstrip("0")) <= 4

    def test_norms_as_small_as_what_the_clip_adds_to_them(self) -> None:
        norms = calm(0, 1e-7)
        found = threshold(norms, 0.02)
        assert found.value is not None
        assert sum(found.value / (norm + 1e-6) < 1 for norm in norms) == found.bites
        assert found.bites == pytest.approx(40, rel=0.1)

    def test_halves_that_agree_by_chance_alone_are_stationary(self) -> None:
        assert sum(threshold(calm(seed), 0.01).drift is not None for seed in range(40)) <= 4
        assert (
            sum(threshold(calm(seed, steps=300), 0.01).drift is not None for seed in range(40)) <= 4
        )

    @pytest.mark.parametrize("seed", range(5))
    def test_norms_that_fall_are_not_stationary_and_the_threshold_follows(self, seed: int) -> None:
        norms = falling(seed)
        found = threshold(norms, 0.02)
        assert found.drift is not None
        assert found.value is not None
        assert found.drift.first > 1.2 * found.drift.second
        allowed = list(let_through(norms, found.value))
        bites = sum(a < norm for a, norm in zip(allowed, norms, strict=True))
        assert bites == found.bites == pytest.approx(0.02 * found.steps, rel=0.1)
        assert found.steps == STEPS - 25

    def test_a_drift_that_the_few_largest_norms_do_not_show(self) -> None:
        norms = [norm * (1 + 0.2 * step / STEPS) for step, norm in enumerate(calm(1))]
        drift = threshold(norms, 0.005).drift
        assert drift is not None
        assert drift.share == 0.2

    def test_norms_that_rise_are_not_stationary(self) -> None:
        assert threshold(falling(0)[::-1], 0.02).drift is not None


def behaviour(norm: float, spread: float = 0.2, drift: float = 1.0) -> Behaviour:
    return math.log(norm), math.log(spread), math.log(drift)


class TestGroups:
    def test_layers_that_behave_alike_are_one_group(self) -> None:
        layers = {f"h.{n}.w": behaviour(1 + n / 10) for n in range(12)}
        assert groups_of(layers, 24) == [[*layers]]

    @pytest.mark.parametrize("odd", [{"norm": 20.0}, {"spread": 2.0}, {"drift": 0.5}])
    def test_a_layer_that_does_not_is_another_one(self, odd: dict[str, float]) -> None:
        layers = {f"h.{n}.w": behaviour(1.0) for n in range(4)}
        layers["h.2.w"] = behaviour(**{"norm": 1.0, **odd})
        assert groups_of(layers, 24) == [["h.0.w", "h.1.w", "h.3.w"], ["h.2.w"]]

    def test_what_behaves_alike_is_joined(self) -> None:
        model = {"a.w": behaviour(1.0), "a.b": behaviour(0.01), "c.w": behaviour(1.5)}
        assert groups_of(model, 24) == [["a.w", "c.w"], ["a.b"]]

    def test_of_too_many_groups_wider_ones_are_made(self) -> None:
        model = {f"{chr(97 + n)}.w": behaviour(10.0**n) for n in range(24)}
        assert len(groups_of(model, 24)) == 24
        groups = groups_of(model, 5)
        assert len(groups) <= 5
        assert sorted(name for group in groups for name in group) == sorted(model)


NAMES = [
    *(f"h.{n}.{part}.{kind}" for n in range(12) for part in "qk" for kind in ("weight", "bias")),
    *(f"moe.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(4)),
    *(
        "embed.weight",
        "head.weight",
        "head.weight_v",
        "head",
        "h.12.q.weight.more",
        "a+b.w",
        "w[0]",
    ),
]


class TestPatterns:
    @pytest.mark.parametrize(
        ("names", "patterns"),
        [
            (NAMES, ["*"]),
            ([n for n in NAMES if n.endswith("bias")], ["*.bias"]),
            ([n for n in NAMES if n.endswith("q.weight")], ["h.*.q.weight"]),
            ([f"h.{n}.q.weight" for n in range(4)], ["h.{0..3}.q.weight"]),
            ([f"h.{n}.k.bias" for n in (0, 1, 2, 7, 8, 9)], ["h.{0,1,2,7,8,9}.k.bias"]),
            (
                [f"moe.{a}.experts.{b}.w" for a in (0, 1) for b in (1, 2)],
                ["moe.{0..1}.experts.{1..2}.w"],
            ),
            (["embed.weight"], ["embed.weight"]),
            (["a+b.w", "w[0]"], [r"re:a\+b\.w", r"re:w\[0\]"]),
        ],
    )
    def test_what_is_written(self, names: list[str], patterns: list[str]) -> None:
        assert patterns_of(names, dict(zip(NAMES, NAMES, strict=True))) == patterns

    @pytest.mark.parametrize("seed", range(50))
    def test_they_select_the_names_and_no_other_one(self, seed: int) -> None:
        rng = random.Random(seed)
        names = rng.sample(NAMES, rng.randrange(1, len(NAMES)))
        patterns = patterns_of(names, dict(zip(NAMES, NAMES, strict=True)))
        selected = select([compile_pattern(text) for text in patterns], NAMES)
        assert {NAMES[place] for place in selected} == set(names)
        assert len(patterns) <= len(names)

    def test_another_name_of_a_tied_parameter_counts_as_its_name(self) -> None:
        known = {"in.w": "in.w", "out.w": "in.w", "mid.w": "mid.w"}
        assert patterns_of(["in.w", "mid.w"], known) == ["*"]
        assert patterns_of(["mid.w"], known) == ["mid.w"]
        assert patterns_of(["mid.w"], {**known, "mid.w.x": "in.w"}) == ["mid.w"]

    def test_a_name_that_no_pattern_can_hold(self) -> None:
        name = "x" * 600
        with pytest.raises(RecordError, match="no pattern can hold this name"):
            patterns_of([name], {name: name, "y": "y"})

    def test_ids(self) -> None:
        ids: list[str] = []
        for patterns in (["*"], ["h.*.q.weight"], ["h.*.q.weight"], ["h.*.w", "H.*.W"], ["a", "b"]):
            ids.append(rule_id("clip", patterns, ids))
        assert ids == [
            "clip-all",
            "clip-h-q-weight",
            "clip-h-q-weight-2",
            "clip-h-w",
            "clip-a",
        ]
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule_id("clip", ["é.Ü", "_" * 300], ids))


class TestWhatIsUsed:
    def test_norms_at_step_before_others_and_each_parameter_of_its_lowest_rank(
        self, tmp_path: pathlib.Path
    ) -> None:
        writers = [RunWriter(tmp_path, rank=rank, meta=meta(("w", "b", "c"))) for rank in (0, 1)]
        for writer, names in zip(writers, (("w", "b"), ("b", "c")), strict=True):
            for step in range(4 + writer.rank):
                writer.add(Key("norms", "l2", "accumulated", names), step, values(1.0, 2.0))
                writer.add(Key("norms", "linf", "step", names), step, values(1.0, 2.0))
                if writer.rank == 0 and step < 2:
                    writer.add(Key("late", "l2", "step", ("w",)), step, values(3.0))
            writer.close()
        with open_run(tmp_path) as run:
            used = {(s.rank, s.key.rule, s.key.point): names for s, names in sources(run).items()}
        assert used == {
            (0, "late", "step"): ["w"],
            (0, "norms", "accumulated"): ["b"],
            (1, "norms", "accumulated"): ["c"],
        }

    def test_the_norm_of_a_group_and_what_is_left_out(self, tmp_path: pathlib.Path) -> None:
        nan = float("nan")
        histories = {"a": [3.0, nan, 3.0, None, None, 6.0], "b": [4.0, 4.0, 4.0, 5.0, None, 8.0]}
        writer = write(tmp_path, histories, point="step")
        for kind, step in (("skipped-step", 2), ("notice", 0)):
            writer.event(Event(kind, "trap", step, 0, "", ""))  # type: ignore[arg-type]
        writer.close()
        with open_run(tmp_path) as run:
            (series,) = sources(run)
            both, alone = group_norms(series, (("a", "b"), ("b",)), skipped_steps(run))
        assert list(both.norms) == [5.0, 5.0, 10.0]
        assert list(alone.norms) == [4.0, 4.0, 5.0, 8.0]
        assert list(both.steps) == [0, 3, 5]
        assert (both.nonfinite, both.skipped) == (1, 1)

    def test_parameters_of_two_optimizers_are_never_one_group(self, tmp_path: pathlib.Path) -> None:
        writer = RunWriter(tmp_path, meta=meta(("g.w", "d.w")))
        for step, norm in enumerate(calm(0)):
            for name in ("g.w", "d.w"):
                writer.add(Key("norms", "l2", "step", (name,)), step, values(norm))
        writer.close()
        rules = rules_of(suggestion(tmp_path).text)
        assert [rule["params"] for rule in rules] == ["g.w", "d.w"]

    def test_more_optimizers_than_anybody_reads_rules_for(self, tmp_path: pathlib.Path) -> None:
        names = [f"h.{number}.w" for number in range(25)]
        writer = RunWriter(tmp_path, meta=meta(names))
        for name in names:
            writer.add(Key("norms", "l2", "step", (name,)), 0, values(1.0))
        writer.close()
        with pytest.raises(RecordError, match="25 optimizers share the parameters"):
            suggestion(tmp_path)

    def test_a_run_without_norms(self, tmp_path: pathlib.Path) -> None:
        write(tmp_path, {"w": [1.0] * 9}, point="backward").close()
        with pytest.raises(
            RecordError, match="no l2 norms of parameters: record them with a `norm-"
        ):
            suggestion(tmp_path)


class TestFile:
    def test_a_clip_with_what_it_was_taken_from(self, tmp_path: pathlib.Path) -> None:
        norms = calm(0)
        text, summary, findings = suggestion(recorded(tmp_path, fc1__w=norms, fc2__w=norms))
        (rule,) = rules_of(text)
        bound = rule.pop("max_norm")
        assert isinstance(bound, float)
        assert rule == {
            "id": "clip-all",
            "action": "clip-norm",
            "params": "*",
            "at": "step",
            "per": "rule",
        }
        bites = sum(2**0.5 * norm + 1e-6 > bound for norm in norms)
        assert bites == pytest.approx(40, rel=0.1)
        comments = [line.strip("# ") for line in text.splitlines() if line.startswith("  #")]
        assert comments[0] == "2 parameters, by `norms` at step: 2,000 steps from 0 to 1999"
        assert re.fullmatch(r"98% quantile of their norm: \S+", comments[1])
        assert comments[2].startswith(f"would have bitten in {bites} of 2,000 steps: ")
        assert (summary, findings) == ("1 rule for 2 parameters", [])

    def test_norms_before_the_clip_of_the_script_are_told_of(self, tmp_path: pathlib.Path) -> None:
        write(tmp_path, {"w": calm(0)}, point="accumulated").close()
        text = suggestion(tmp_path).text
        assert "at accumulated, before any clip of the script's own: 2,000 steps" in text

    def test_not_stationary(self, tmp_path: pathlib.Path) -> None:
        text, _, findings = suggestion(recorded(tmp_path, calm=calm(0), falling=falling(1)))
        clip, spikes = rules_of(text)
        assert (clip["id"], spikes["id"]) == ("clip-calm", "spikes-falling")
        above = spikes.pop("above")
        assert isinstance(above, dict)
        assert above == {"sigmas": pytest.approx(2.5, abs=1), "beta": 0.97, "warmup": 25}
        assert spikes == {
            "id": "spikes-falling",
            "action": "spike-trap",
            "params": "falling",
            "per": "rule",
            "then": "clip",
        }
        assert "\n  # not stationary: the 98% quantile is " in text
        assert [re.match("spikes-falling: not stationary: ", text) for text in findings] != [None]
        assert len(findings) == 1

    @pytest.mark.parametrize("every", [2, 50])
    def test_norms_of_one_step_in_many(self, tmp_path: pathlib.Path, every: int) -> None:
        names = {"w": calm(1), "v": falling(0, 100.0)}
        writer = RunWriter(tmp_path, meta=meta(tuple(names)))
        for number, norms in enumerate(zip(*names.values(), strict=True)):
            writer.add(Key("norms", "l2", "step", tuple(names)), every * number, values(*norms))
        writer.close()
        text, _, (finding,) = suggestion(tmp_path)
        # A quantile is that of all steps, whichever were recorded.
        assert [(rule["params"], rule["action"]) for rule in rules_of(text)] == [("w", "clip-norm")]
        assert finding.startswith(
            "no rule for v: not stationary, and the statistic of a `spike-trap` "
        )
        assert finding.endswith(f": record again without `every: {every}` in `norms`")

    def test_steps_without_a_gradient_or_a_record_leave_no_gap(
        self, tmp_path: pathlib.Path
    ) -> None:
        norms: list[float | None] = []
        for norm in falling(0):
            norms += [norm, None]
        writer = RunWriter(tmp_path, meta=meta(("w",)))
        for step, found in enumerate(norms):
            if step % 100 != 7:  # a scaler has skipped it
                gone = frozenset({0}) if found is None else frozenset[int]()
                writer.add(Key("norms", "l2", "step", ("w",)), step, values(found or 0.0), gone)
        writer.close()
        assert [rule["action"] for rule in rules_of(suggestion(tmp_path).text)] == ["spike-trap"]

    @pytest.mark.parametrize(
        ("norms", "share", "most"),
        [
            ([2.0 - step / STEPS for step in range(STEPS)], 0.02, "0%"),
            ([10 * norm * 0.1 ** (step / 500) for step, norm in enumerate(calm(3))], 0.9, ""),
        ],
    )
    def test_norms_that_no_spike_trap_fits(
        self, tmp_path: pathlib.Path, norms: list[float], share: float, most: str
    ) -> None:
        recorded(tmp_path, w=norms, calm=[100 * norm for norm in calm(0)])
        text, _, findings = suggestion(tmp_path, share)
        assert [rule["params"] for rule in rules_of(text)] == ["calm"]
        (finding,) = findings
        assert finding.startswith(
            f"no rule for w: no threshold bites in {100 * share:g}% of the steps"
        )
        assert f"(closest: {most}" in finding
        assert finding.endswith("%): try another --bites")

    def test_norms_that_are_hardly_ever_above_0(self, tmp_path: pathlib.Path) -> None:
        norms = [0.0] * 930 + [0.0, 1.0] * 35
        recorded(tmp_path, w=norms, calm=calm(0, 100.0, 1000))
        _, _, findings = suggestion(tmp_path)
        assert findings == [
            "no rule for w: not stationary, and the norm is above 0 in only 35 steps: record more"
        ]

    def test_shares_are_told_as_a_person_would(self, tmp_path: pathlib.Path) -> None:
        norms = [norm * (1 + 0.2 * step / STEPS) for step, norm in enumerate(calm(1))]
        finding, _ = suggestion(recorded(tmp_path, w=norms), 0.005).findings
        assert re.fullmatch(
            r"spikes-all: not stationary: the 80% quantile is 1\.\d+ in the first half and 1\.\d+ in the second half",
            finding,
        ), finding

    def test_a_norm_that_no_float32_holds_is_not_finite(self, tmp_path: pathlib.Path) -> None:
        recorded(tmp_path, a=calm(0, 3e38, 1000), b=calm(1, 3e38, 1000))
        with open_run(tmp_path) as run:
            (series,) = sources(run)
            (both,) = group_norms(series, (("a", "b"),), frozenset())
        assert both.nonfinite > 0
        assert max(both.norms) < math.inf

    def test_few_steps_are_told_of_and_too_few_are_refused(self, tmp_path: pathlib.Path) -> None:
        recorded(tmp_path / "few", w=calm(0, steps=300))
        text, _, findings = suggestion(tmp_path / "few")
        assert "\n  # too few steps: " in text
        assert findings == [
            "clip-all: too few steps: by chance alone it may bite half as often or twice as often; 500 steps would do"
        ]
        recorded(tmp_path / "fewer", w=calm(0, steps=49))
        problem = re.escape(
            "49 steps are too few for a share of 2%: it takes 50, and 500 for a threshold to count on"
        )
        with pytest.raises(RecordError, match=problem):
            suggestion(tmp_path / "fewer")

    def test_what_has_no_threshold_is_named(self, tmp_path: pathlib.Path) -> None:
        rare: list[float | None] = [None] * (STEPS - 9)
        recorded(tmp_path, w=calm(0), dead=[0.0] * STEPS, rare=[*rare, *[1.0] * 9])
        text, _, findings = suggestion(tmp_path)
        assert [rule["params"] for rule in rules_of(text)] == ["w"]
        assert findings[0] == "no rule for dead: the norm is hardly ever above 0"
        assert findings[1].startswith("no rule for rare: 9 steps are too few for a share of 2%")
        assert all(f"# {finding}\n" in text for finding in findings)

    def test_without_a_rule_each_reason_is_told(self, tmp_path: pathlib.Path) -> None:
        twins = {f"h.{number}.w": [0.0] * STEPS for number in range(2)}
        recorded(tmp_path, **twins, tail=[0.0, *[None] * (STEPS - 1)])
        with pytest.raises(RecordError) as caught:
            suggestion(tmp_path)
        head, *rows = str(caught.value).splitlines()
        assert head.endswith(": no parameter gets a rule")
        row = "  no rule for h.*.w (2 parameters, such as h.0.w): the norm is hardly ever above 0"
        assert row in rows

    def test_a_bias_of_rounding_noise_gets_no_rule(self, tmp_path: pathlib.Path) -> None:
        noise = {f"h__{layer}__key__bias": calm(layer, 1e-9) for layer in range(2)}
        weights = {f"h__{layer}__key__weight": calm(layer, 0.1) for layer in range(2)}
        # Small, but not beside the rest of its module.
        recorded(tmp_path, **noise, **weights, small__bias=calm(9, 1e-6))
        text, summary, findings = suggestion(tmp_path)
        expected = "\n# no rule for h.*.key.bias: rounding noise, for the gradient is zero by mathematics\n"
        assert expected in text
        assert [rule["params"] for rule in rules_of(text)] == ["h.*.key.weight", "small.bias"]
        assert (summary, findings) == ("2 rules for 3 parameters", [])

    def test_parameters_without_a_gradient_are_a_note(self, tmp_path: pathlib.Path) -> None:
        none: list[float | None] = [None] * STEPS
        recorded(tmp_path / "some", h__0__w=none, h__1__w=none, head=calm(0))
        text, summary, findings = suggestion(tmp_path / "some")
        assert "# no gradient: h.*.w\n" in text
        assert (summary, findings) == ("1 rule for 1 parameter", [])
        recorded(tmp_path / "all", w=none)
        with pytest.raises(RecordError, match="no parameter has finite norms of two steps"):
            suggestion(tmp_path / "all")

    def test_several_ranks(self, tmp_path: pathlib.Path) -> None:
        writers = [write(tmp_path, {"w": calm(rank)}, rank=rank, point="step") for rank in (0, 1)]
        for writer in writers:
            writer.close()
        assert suggestion(tmp_path).summary == "1 rule for 1 parameter"

    def test_a_plan_that_is_damaged(self, tmp_path: pathlib.Path) -> None:
        more = {"roles": {"norms": 1}, "plan": {"chains": {"w": [{}, "norms"]}}}
        model = {"params": [{"name": "w", "aliases": 1}]}
        writer = RunWriter(tmp_path, meta={**meta(("w",), **more), "model": model})
        for step, norm in enumerate(calm(0)):
            writer.add(Key("norms", "l2", "step", ("w",)), step, values(norm))
        writer.close()
        assert suggestion(tmp_path).findings == []

    @pytest.mark.parametrize("rounding", [0.0, 1e-7])
    def test_norms_that_were_clipped_already(self, tmp_path: pathlib.Path, rounding: float) -> None:
        norms = [min(norm, 1.0 + norm * rounding) for norm in calm(0)]
        text, _, findings = suggestion(recorded(tmp_path, w=norms, calm=calm(1, 100.0)))
        assert [rule["params"] for rule in rules_of(text)] == ["calm"]
        (finding,) = findings
        assert finding.startswith("no rule for w: no threshold bites in 2% of the steps (closest: ")
        assert finding.endswith("%): probably the norms were clipped already")

    @pytest.mark.parametrize("mode", ["act", "observe"])
    @pytest.mark.parametrize("point", ["accumulated", "step"])
    def test_gradients_that_the_run_edited(
        self, tmp_path: pathlib.Path, mode: str, point: str
    ) -> None:
        points = {"hook": "backward", "first": "step", "norms": point, "last": "step"}
        chain = [one for one in points if one != "first" or point == "step"]
        more = {
            "mode": mode,
            "roles": {one: {"role": "observe" if one == "norms" else "edit"} for one in chain},
            "plan": {
                "rules": [
                    {"id": one, "action": "x", "point": points[one], "params": ["w"]}
                    for one in chain
                ],
                "chains": {"w": chain},
            },
        }
        writer = RunWriter(tmp_path, meta=meta(("w",), **more))
        for step, norm in enumerate(calm(0)):
            writer.add(Key("norms", "l2", point, ("w",)), step, values(norm))
        writer.close()
        told = "clip-all: the gradient was edited before it was measured, by "
        edits = ["`first`"] * (point == "step") + ["`hook`"] * (mode == "act")
        remedy = "record again with `norms` above them in the file, and with `--observe`"
        wanted = [f"{told}{', '.join(edits)}: {remedy}"] if edits else []
        assert suggestion(tmp_path).findings == wanted

    def test_lint_finds_nothing_whatever_the_names(self, tmp_path: pathlib.Path) -> None:
        odd = [
            "a b",
            'q"uote',
            "back\\slash",
            "\x1b[2J",
            "é\U0001f600",
            "\u202e",
            "*",
            "re:x",
            "x.0",
        ]
        levels = {f"{name}.{n}": calm(n, 10.0**n) for n, name in enumerate(odd)}
        write(tmp_path / "run", {**levels, "* {}": calm(99, 1e-5)}, point="step").close()
        text = suggestion(tmp_path / "run").text
        assert "\x1b" not in text
        (tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
        assert lint(str(tmp_path / "rules.yaml")) == []
        assert len(rules_of(text)) == len(odd) + 1

    @pytest.mark.skipif("spike-trap" not in ACTIONS, reason="needs the action `spike-trap`")
    def test_lint_finds_nothing_where_the_threshold_follows(self, tmp_path: pathlib.Path) -> None:
        text = suggestion(recorded(tmp_path / "run", w=falling(0))).text
        (tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
        assert lint(str(tmp_path / "rules.yaml")) == []

    def test_what_a_comment_quotes_stays_in_it(self, tmp_path: pathlib.Path) -> None:
        write(tmp_path / "rule", {"w": calm(0)}, point="step", rule="x\x1b[2J\x85- id: y").close()
        assert r"by `x\x1b[2J\x85- id: y` at step" in suggestion(tmp_path / "rule").text
        dead = {f"{'n' * 90} {number}\n  - id: evil": [0.0] * STEPS for number in range(3)}
        write(tmp_path / "names", {"w": calm(0), **dead}, point="step").close()
        text = suggestion(tmp_path / "names").text
        assert [rule["params"] for rule in rules_of(text)] == ["w"]
        assert "evil" in text.splitlines()[1]
