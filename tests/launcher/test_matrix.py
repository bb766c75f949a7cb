"""Scripts that nobody edits: watched they do the same to the last bit, and rules act in all of them.

Each script of `tests/scripts` runs plain and under `gradsurgeon run`, in forks where that is the same; a run serves
several tests.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from launching import (
    OBSERVE,
    Case,
    Outcome,
    Runs,
    Trained,
    events_of,
    states,
    trained,
)
from matrix import CASES, scripts
from ranks import torchrun


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    pool = ThreadPoolExecutor(os.cpu_count())
    yield Runs(tmp_path_factory.mktemp("runs"), pool)
    pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module", autouse=True)
def _ahead(request: pytest.FixtureRequest, runs: Runs) -> None:
    # What the selected tests will ask for, so that no core is idle while one of them waits.
    for item in request.session.items:
        name = str(getattr(getattr(item, "callspec", None), "params", {}).get("name"))
        if item.path == request.path and name in CASES:
            runs.plain(CASES[name])
            runs.launched(CASES[name])


def both(runs: Runs, name: str) -> tuple[Outcome, Outcome]:
    before, after = runs.plain(CASES[name]), runs.launched(CASES[name])
    return before.result(), after.result()


def shown(outcome: Outcome) -> str:
    return f"exit {outcome.code}\n{outcome.stdout.decode()}\n{outcome.stderr}"


@pytest.mark.parametrize("name", scripts(CASES))
def test_a_watched_script_does_the_same(name: str, runs: Runs) -> None:
    case = CASES[name]
    before, after = both(runs, name)
    assert before.code == case.code, shown(before)
    assert b"weights" in before.stdout
    assert after.code == case.code, shown(after)
    assert after.stdout == before.stdout, shown(after)
    if not case.noisy:
        assert before.stderr in after.stderr, shown(after)
        rest = after.stderr.replace(before.stderr, "", 1) if before.stderr else after.stderr
        assert "Traceback" not in rest, shown(after)
        assert "Warning" not in rest, shown(after)


@pytest.mark.parametrize("name", scripts(CASES))
def test_every_step_of_every_model_has_a_record(name: str, runs: Runs) -> None:
    case = CASES[name]
    _, after = both(runs, name)
    found = trained(after.record, merged=name == "FSDP2")
    if case.killed:
        # What the last second brought is lost with the process.
        assert [(one.origin, one.first) for one in found] == [
            (one.origin, one.first) for one in case.models
        ]
        assert states(after.record) == {"stopped"}
        return
    assert found == sorted(case.models), shown(after)
    assert states(after.record) == {"finished"}


@pytest.mark.parametrize("name", scripts(name for name in CASES if not CASES[name].killed))
def test_each_model_has_one_header_and_one_summary_of_its_last_step(name: str, runs: Runs) -> None:
    case = CASES[name]
    _, after = both(runs, name)
    lines = [
        line for line in after.stderr.replace("\r", "\n").split("\n") if "gradsurgeon: " in line
    ]
    # A further model of the same name and parameters is like the one before.
    headers = [line for line in lines if " parameters, " in line or ", like " in line]
    steps = [line for line in lines if re.search(r", \d+ steps?(, from step \d+)?$", line)]
    assert len(headers) == len(case.models), shown(after)
    assert len(steps) == len(case.models), shown(after)
    if "endings.py" in case.words:
        assert steps == ["gradsurgeon: Sequential, 3 steps"], shown(after)
    events = events_of(after.record)
    if name == "scaler":
        assert [text.partition(":")[0] for text in events] == ["scaler-skip"]
    elif name != "phases":
        # A checkpoint that is resumed without `--resume` has a notice.
        assert [text for text in events if "has made N updates already" not in text] == []


@pytest.mark.slow
def test_what_is_said_beside_a_progress_bar_is_on_lines_of_its_own(runs: Runs) -> None:
    _, after = both(runs, "progress bar")
    lines = [line for line in after.stderr.split("\n") if "gradsurgeon: " in line]
    assert len(lines) == 2, "the header and the summary"
    for line in lines:
        *drawn, said = line.split("\r")
        assert said.startswith("gradsurgeon: "), "right behind the bar"
        # What was there before has been wiped off.
        assert not drawn or not drawn[-1].strip(), drawn[-1]
    bars = [line for line in after.stderr.split("\r") if "5/5 |" in line]
    assert bars, "the bar is drawn again"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exception", "progress bar"])
def test_quiet_leaves_stderr_alone_too(name: str, runs: Runs) -> None:
    before = runs.plain(CASES[name]).result()
    after = runs.launched(CASES[name], OBSERVE, "--quiet").result()
    assert (after.code, after.stdout) == (before.code, before.stdout)
    assert after.stderr == before.stderr
    assert trained(after.record) == sorted(CASES[name].models)


EVERYTHING = 'version: 1\ninclude: ["gradsurgeon:debug-everything@1"]\n'


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adjoint method", "distillation", "package"])
def test_the_pack_that_looks_at_everything_changes_nothing(name: str, runs: Runs) -> None:
    case = CASES[name]
    before, after = runs.plain(case).result(), runs.launched(case, EVERYTHING).result()
    assert (after.code, after.stdout) == (0, before.stdout), shown(after)
    assert "Traceback" not in after.stderr
    assert "debug-everything-output-gradients" in after.stderr


@pytest.mark.slow
def test_an_error_in_forward_still_shows_the_lines_of_the_script(runs: Runs) -> None:
    def own(stderr: str) -> list[str]:
        lines = stderr.splitlines()
        places = [i for i, line in enumerate(lines) if "endings.py" in line]
        last = [line for line in lines if line.startswith("RuntimeError")]
        return [lines[i + more] for i in places for more in (0, 1)] + last

    before, after = both(runs, "exception in forward")
    assert len(own(before.stderr)) == 5
    assert own(after.stderr) == own(before.stderr)
    assert "/gradsurgeon/integrations/launcher/" not in after.stderr


@pytest.mark.slow
def test_the_switch_turns_everything_off(runs: Runs) -> None:
    case = CASES["exception"]
    before = runs.plain(case).result()
    off = (("GRADSURGEON_DISABLE", "1"),)
    after = runs.launched(case, OBSERVE, env=off).result()
    assert (after.code, after.stdout, after.stderr) == (before.code, before.stdout, before.stderr)
    assert not after.record.exists()


@pytest.mark.slow
def test_warnings_as_errors_stay_those_of_the_script(runs: Runs) -> None:
    strict = (("PYTHONWARNINGS", "error"),)
    # A parameter that joins gets a notice of ours. Python reads the variable when it starts.
    case = CASES["phases"]
    before = runs.plain(case).result()
    after = runs.launched(replace(case, process=True), OBSERVE, env=strict).result()
    assert (after.code, after.stdout) == (0, before.stdout), shown(after)


UNMATCHED = """\
version: 1
rules:
  - {id: norms, action: norm-log, params: "*"}
  - {id: nowhere, action: zero, params: "decoder.*"}
"""


@pytest.mark.slow
def test_a_rule_that_matches_nothing_stops_the_first_step(runs: Runs) -> None:
    after = runs.launched(CASES["LBFGS"], UNMATCHED).result()
    assert after.code == 1, shown(after)
    # Before any weight moves.
    assert after.stdout == b""
    assert "nowhere" in after.stderr
    assert "decoder.*" in after.stderr
    assert "BindError" in after.stderr
    assert "rule norms" not in after.stderr


ONE_OF_TWO = """\
version: 1
rules:
  - {id: norms, action: norm-log, params: "logits.*"}
"""


@pytest.mark.slow
def test_a_rule_may_match_in_one_of_two_models(runs: Runs) -> None:
    case = CASES["actor and critic"]
    before = runs.plain(case).result()
    after = runs.launched(case, ONE_OF_TWO).result()
    assert (after.code, after.stdout) == (0, before.stdout), shown(after)
    assert Trained("Actor", "body.weight", 5) in trained(after.record)


NO_TORCH = "no_torch.py"


@pytest.mark.slow
def test_a_script_without_torch_pays_for_no_import(runs: Runs, tmp_path: Path) -> None:
    cases = [
        Case((NO_TORCH, str(tmp_path / how)), forked=False, process=True)
        for how in ("plain", "launched")
    ]
    before, after = runs.plain(cases[0]), runs.launched(cases[1])
    assert after.result().code == 0
    assert after.result().stdout == before.result().stdout
    assert after.result().stderr == ""
    plain, launched = (
        set(json.loads((tmp_path / how).read_text())) for how in ("plain", "launched")
    )
    added = launched - plain
    heavy = {"torch", "numpy", "pydantic", "yaml", "sqlite3", "argparse", "random", "tempfile"}
    assert not added & heavy
    assert not after.result().record.exists()


@pytest.mark.slow
def test_flags_of_the_interpreter_are_passed_on(runs: Runs, tmp_path: Path) -> None:
    case = Case((NO_TORCH, str(tmp_path / "modules")))
    (tmp_path / "rules.yaml").write_text(OBSERVE)
    command = ("-O", "-m", "gradsurgeon", "run", "--rules", str(tmp_path / "rules.yaml"))
    after = runs.plain(Case((*command, *case.words), forked=False)).result()
    assert after.code == 0, shown(after)
    assert b"optimised 1 assertions False arguments 2" in after.stdout


@pytest.mark.slow
def test_a_sitecustomize_of_the_user_still_runs(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('customised')\n")
    case = Case((NO_TORCH, str(tmp_path / "modules")), process=True)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    after = runs.launched(case, OBSERVE, env=(("PYTHONPATH", path),)).result()
    # Once in the launcher itself, once in the script.
    assert after.stdout.count(b"customised") == 2, shown(after)
    assert after.stdout.count(b"optimised 0") == 1


CLIP = 'id: clip, action: clip-norm, params: "*", max_norm: 0.05, at: step, per: rule'
EDIT = f"version: 1\nrules:\n  - {{{CLIP}}}\n"
SHRINK = f"""\
version: 1
rules:
  - {{{CLIP}}}
  - {{id: slow-generator, action: scale, params: "*", at: step, factor: 0.5, model: Generator}}
"""


def attach(model: str, rules: str = EDIT) -> str:
    return f"import gradsurgeon\ngradsurgeon.apply({model}, {rules!r})"


EDITED = {
    "gan": (
        SHRINK,
        "ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)",
        f"{attach('generator', SHRINK)}\n{attach('discriminator')}",
    ),
    "LBFGS": (EDIT, "evaluations = 0", attach("model")),
    "scaler": (
        EDIT,
        'scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)',
        attach("model"),
    ),
    "Lightning": (EDIT, "model = Regression()", attach("model")),
}


@pytest.mark.slow
@pytest.mark.parametrize("edited", EDITED)
def test_rules_put_on_from_outside_do_what_they_do_from_inside(edited: str, runs: Runs) -> None:
    case = CASES[edited]
    rules, anchor, code = EDITED[edited]
    futures = runs.launched(case, rules), runs.written(case, anchor, code), runs.plain(case)
    outside, inside, without = (future.result() for future in futures)
    assert inside.code == 0, shown(inside)
    assert outside.code == 0, shown(outside)
    assert outside.stdout == inside.stdout, shown(outside)
    assert outside.stdout.splitlines()[-1] != without.stdout.splitlines()[-1], (
        "the rule did nothing"
    )


@pytest.mark.slow
def test_a_command_of_its_own_carries_the_rules_to_its_ranks(runs: Runs) -> None:
    case = CASES["DDP"]
    # `gradsurgeon run -- python -m torch.distributed.run ...`: the ranks are grandchildren.
    whole = Case(("--", sys.executable, *torchrun(), *case.words))
    inside = "    " + attach("model").replace("\n", "\n    ")
    futures = (
        runs.launched(whole, EDIT),
        runs.written(case, "    model = DistributedDataParallel(Net())", inside),
        runs.plain(case),
    )
    outside, within, without = (future.result() for future in futures)
    assert (outside.code, outside.stdout) == (0, within.stdout), shown(outside)
    assert outside.stdout.splitlines()[-1] != without.stdout.splitlines()[-1]
    assert trained(outside.record) == [Trained("Net", "body.0.weight", steps=0, ranks=2)]
