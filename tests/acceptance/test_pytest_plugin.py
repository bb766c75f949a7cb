"""The plugin for pytest, in processes of pytest that run test files as people write them."""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
import tomllib

import forks
import pytest
from bounds import TIMEOUT
from commands import ROOT

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.slow, pytest.mark.cover_children]

PLUGIN = "gradsurgeon.integrations.pytest_plugin"
HEAD = """
import pytest, torch
from torch import nn
from torch.optim import SGD

class Root(nn.Module):
    def forward(self, x):
        return torch.sqrt(x)  # the gradient at 0 is infinite

def build():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Root(), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    return model, SGD(model.parameters(), 1e-3)

def train(model, optimizer, steps=3, bad=None):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1, 2), 0.0 if step == bad else 1.0)).sum().backward()
        optimizer.step()
"""
# What is global in torch and is changed while something is trained under rules.
CONFTEST = """
import torch
from torch import nn
from torch.nn.modules import module
from torch.optim import Optimizer, optimizer

def state():
    return (
        Optimizer.__init__, torch.autograd.backward, torch.autograd.graph.log,
        torch.autograd.graph._register_logging_hooks_on_whole_graph,
        torch.utils.swap_tensors, torch.amp.GradScaler.scale, torch.amp.GradScaler.step,
        torch.distributed.Reducer.prepare_for_backward,
        *map(len, (
            optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks,
            module._global_module_registration_hooks, module._global_parameter_registration_hooks,
            module._global_forward_pre_hooks, module._global_forward_hooks,
            module._global_backward_hooks, module._global_backward_pre_hooks,
        )),
    )

def hooks(model, optimizer):
    return [
        *(len(hooks) for part in model.modules() for name, hooks in vars(part).items() if name.endswith("_hooks")),
        *(len(param._backward_hooks or ()) for param in model.parameters()),
        *(len(getattr(param, "_post_accumulate_grad_hooks", None) or ()) for param in model.parameters()),
        len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks),
    ]

before = state()
"""


@pytest.fixture
def runner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Whether the entry point is installed or not.
    pytester.plugins = []
    pytester.makeini(
        f"[pytest]\naddopts = -p no:gradsurgeon -p {PLUGIN} -p no:cacheprovider\n"
        "filterwarnings = error\npythonpath = .\n"
    )
    return pytester


def run(runner: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    runner.makepyfile(test_it=HEAD + text)
    return forked(runner, "--strict-markers", *options)


def forked(runner: pytest.Pytester, *options: str) -> pytest.RunResult:
    """Run pytest in a fork of a Python that has imported torch."""
    start, words = time.perf_counter(), ["-m", "pytest", *options]
    done = forks.start(words, cwd=runner.path, env=os.environ).wait(TIMEOUT)
    out, err = (text.decode().splitlines() for text in (done.stdout, done.stderr))
    return pytest.RunResult(done.returncode, out, err, time.perf_counter() - start)


def part(done: pytest.RunResult, test: str) -> str:
    """Return what pytest prints of a test that did not pass."""
    text = done.stdout.str()
    found = re.search(
        rf"(?sm)^_+ (ERROR at setup of )?{test} _+$(.*?)^(___+ \S.* ___+|===+.*)$", text
    )
    assert found, text
    return found[2]


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (name,) = project["entry-points"]["pytest11"].values()
    assert name == PLUGIN
    assert importlib.import_module(name).gradsurgeon_sessions


def test_a_trap_fails_the_test_with_its_diagnosis(runner: pytest.Pytester) -> None:
    done = run(
        runner,
        """
@pytest.mark.gradsurgeon
def test_trapped():
    train(*build(), bad=1)

@pytest.mark.gradsurgeon
def test_swallowed():
    try:
        train(*build(), bad=2)
    except Exception:
        pass

@pytest.mark.gradsurgeon
def test_other_error():
    try:
        train(*build(), bad=2)
    except Exception:
        assert 1 == 2

def test_without_marker():
    train(*build(), bad=1)

@pytest.mark.gradsurgeon
@pytest.mark.parametrize("bad", [None, 0])
def test_cases(bad):
    train(*build(), bad=bad)

@pytest.mark.gradsurgeon
class TestClass:
    def test_method(self):
        train(*build(), bad=2)

@pytest.mark.gradsurgeon(mode="observe")
def test_observed(gradsurgeon_sessions):
    train(*build(), bad=0)
    (session,) = gradsurgeon_sessions
    assert session.step == 3
    assert [(e.kind, e.step) for e in session.events if e.kind == "trap"][0] == ("trap", 0)
""",
    )
    done.assert_outcomes(failed=5, passed=3)
    trapped = part(done, "test_trapped")
    assert "NonFiniteGradientError: step 1, rule nan-trap: 1 of 3 gradients" in trapped
    # The module in which it was born, and the line of the test's file, which is the last one shown.
    assert re.search(r"diagnosis \(reproduced\):.* 1 \(Root\)", trapped), trapped
    assert "test_it.py:7, in forward: return torch.sqrt(x)" in trapped
    assert "site-packages" not in trapped
    assert "gradsurgeon/runtime" not in trapped
    swallowed = part(done, "test_swallowed")
    assert "a gradient was non-finite, and the body of the test caught the error" in swallowed
    assert "Captured gradsurgeon call" in swallowed
    assert "step 2, rule nan-trap: 1 of 3 gradients" in swallowed
    other = part(done, "test_other_error")
    assert "assert 1 == 2" in other
    assert "gradsurgeon/runtime" not in other
    assert "step 2, rule nan-trap: 1 of 3 gradients" in other.partition("Captured gradsurgeon")[2]
    assert "step 0, rule nan-trap" in part(done, r"test_cases\[0\]")
    assert "step 2, rule nan-trap" in part(done, "TestClass.test_method")


def test_what_cannot_act_fails_the_test_and_says_why(runner: pytest.Pytester) -> None:
    runner.path.joinpath("wrong.yaml").write_text(
        'version: 1\nrules:\n  - {id: t, action: nan-trp, params: "*"}\n'
    )
    done = run(
        runner,
        """
RULES = {"version": 1, "rules": [{"id": "head", "action": "norm-log", "params": "head.*"}]}

@pytest.mark.gradsurgeon("wrong.yaml")
def test_invalid(): ...

@pytest.mark.gradsurgeon("absent.yaml")
def test_absent(): ...

@pytest.mark.gradsurgeon(rules=1)
def test_type(): ...

@pytest.mark.gradsurgeon(mode="look")
def test_mode(): ...

@pytest.mark.gradsurgeon(strict=True)
def test_option(): ...

def test_no_marker(gradsurgeon_sessions): ...

@pytest.mark.gradsurgeon(RULES)
def test_matches_nothing():
    train(*build())

@pytest.mark.gradsurgeon
def test_trains_nothing():
    model, optimizer = build()
    model(torch.ones(1, 2)).sum().backward()

@pytest.mark.gradsurgeon
def test_skipped():
    pytest.skip("no data")
""",
    )
    done.assert_outcomes(errors=6, failed=2, skipped=1)
    invalid = part(done, "test_invalid")
    assert f"{runner.path}/wrong.yaml:3:21: error: unknown action `nan-trp`" in invalid
    assert f"does not exist at {runner.path}/absent.yaml" in part(done, "test_absent")
    assert "not int" in part(done, "test_type")
    assert "mode=\"observe\", not 'look'" in part(done, "test_mode")
    assert "unexpected keyword argument 'strict'" in part(done, "test_option")
    assert "add `@pytest.mark.gradsurgeon`" in part(done, "test_no_marker")
    nothing = part(done, "test_matches_nothing")
    assert 'rule head: no parameter of the model matches "head.*"' in nothing
    assert "trained no model" in part(done, "test_trains_nothing")
    assert "Traceback" not in done.stdout.str()


def test_a_rule_file_leaves_the_decision_to_the_test(runner: pytest.Pytester) -> None:
    folder = runner.mkdir("rules")
    rules = 'version: 1\nrules:\n  - {id: own, action: nan-trap, params: "*", then: %s}\n'
    for then in ("raise", "skip-step"):
        (folder / f"{then}.yaml").write_text(rules % then)
    runner.mkdir("inner")
    # One file is found from the root directory, one from that of the test.
    (runner.path / "inner" / "skip-step.yaml").write_text(rules % "skip-step")
    runner.makeconftest(CONFTEST)
    text = """
import gradsurgeon
pytestmark = pytest.mark.gradsurgeon("rules/raise.yaml")

def test_expected():
    with pytest.raises(gradsurgeon.NonFiniteGradientError) as caught:
        train(*build(), bad=1)
    assert (caught.value.rule, caught.value.step) == ("own", 1)

def test_raised():
    train(*build(), bad=1)

@pytest.mark.gradsurgeon("skip-step.yaml")
def test_skipped_step(gradsurgeon_sessions):
    model, optimizer = build()
    train(model, optimizer, bad=1)
    assert [e.step for e in gradsurgeon_sessions[0].events if e.kind == "skipped-step"] == [1]
    assert all(param.isfinite().all() for param in model.parameters())
"""
    (runner.path / "inner" / "test_it.py").write_text(HEAD + text)
    done = forked(runner, "inner")
    done.assert_outcomes(passed=2, failed=1)
    assert "step 1, rule own" in part(done, "test_raised")


def test_models_of_fixtures_and_own_sessions_leave_no_trace(runner: pytest.Pytester) -> None:
    runner.makeconftest(CONFTEST)
    done = run(
        runner,
        """
import conftest, copy, gradsurgeon
NORMS = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
kept = {}

@pytest.fixture(scope="module")
def shared():
    return build()

@pytest.fixture(scope="session")
def idle():
    return build()

@pytest.fixture(autouse=True)
def traceless(shared, idle):
    clean = conftest.hooks(*shared)
    yield
    assert conftest.state() == conftest.before
    assert sum(conftest.hooks(*shared)) == sum(conftest.hooks(*idle)) == 0 == sum(clean)

@pytest.mark.gradsurgeon(NORMS)
def test_first(shared, gradsurgeon_sessions):
    assert list(gradsurgeon_sessions) == []
    train(*shared, steps=2)
    (session,) = gradsurgeon_sessions
    assert session is gradsurgeon_sessions[0]
    assert [row[0] for row in session.history("0.weight")] == [0, 1]
    assert session.status()["norms"].fired == 6
    kept["first"] = session

@pytest.mark.gradsurgeon(NORMS)
def test_second(shared, gradsurgeon_sessions):
    train(*shared, steps=3)
    assert [session.step for session in gradsurgeon_sessions] == [3]
    assert kept["first"].step == 2 and kept["first"] is not gradsurgeon_sessions[0]

def test_unmarked(shared):
    train(*shared)
    assert kept["first"].step == 2

@pytest.mark.gradsurgeon(NORMS)
def test_two_models(gradsurgeon_sessions):
    first, second = build(), build()
    train(*first)
    assert [session.step for session in gradsurgeon_sessions] == [3]
    train(*second, steps=2)
    assert [session.step for session in gradsurgeon_sessions] == [3, 2]

@pytest.mark.gradsurgeon
def test_own_session(gradsurgeon_sessions):
    model, optimizer = build()
    with gradsurgeon.apply(model, NORMS) as session:
        train(model, optimizer)
        assert (session.step, gradsurgeon_sessions[0].step) == (3, 3)

@pytest.mark.gradsurgeon
def test_copied_optimizer(shared, gradsurgeon_sessions):
    train(*copy.deepcopy(shared))
    assert [session.step for session in gradsurgeon_sessions] == [3]
""",
    )
    done.assert_outcomes(passed=6)


def test_a_session_that_outlives_the_test_goes_on(runner: pytest.Pytester) -> None:
    runner.makeconftest(CONFTEST)
    done = run(
        runner,
        """
import conftest, gradsurgeon
NORMS = {"version": 1, "rules": [{"id": "norms", "action": "norm-log", "params": "*"}]}
kept = {}

@pytest.mark.gradsurgeon
def test_apply():
    kept["pair"] = build()
    kept["session"] = gradsurgeon.apply(kept["pair"][0], NORMS)
    train(*kept["pair"])

def test_goes_on():
    train(*kept["pair"], steps=2)
    assert kept["session"].step == 5

@pytest.mark.gradsurgeon
def test_marked_again(gradsurgeon_sessions):
    train(*kept["pair"], steps=2)
    assert (kept["session"].step, gradsurgeon_sessions[0].step) == (7, 2)
    kept["session"].remove()

def test_trace():
    assert conftest.state() == conftest.before
    assert sum(conftest.hooks(*kept["pair"])) == 0
""",
    )
    done.assert_outcomes(passed=4)


def test_rules_of_the_launcher_act_beside_those_of_the_marker(runner: pytest.Pytester) -> None:
    rules = 'version: 1\nrules:\n  - {id: zero, action: zero, params: "2.*"}\n'
    (runner.path / "zero.yaml").write_text(rules)
    runner.makepyfile(
        test_it=HEAD
        + """
def weights(model):
    return [param.detach().clone() for param in model[2].parameters()]

@pytest.mark.gradsurgeon
def test_marked(gradsurgeon_sessions):
    model, optimizer = build()
    before = weights(model)
    train(model, optimizer)
    assert all(map(torch.equal, weights(model), before))
    assert [session.step for session in gradsurgeon_sessions] == [3]

@pytest.mark.gradsurgeon
def test_trapped():
    train(*build(), bad=1)

@pytest.fixture(scope="module")
def shared():
    return build()

@pytest.mark.gradsurgeon
def test_first(shared):
    train(*shared)

def test_unmarked(shared):
    before = weights(shared[0])
    train(*shared)
    assert all(map(torch.equal, weights(shared[0]), before))
"""
    )
    ours = [sys.executable, "-m", "gradsurgeon", "run", "--rules", "zero.yaml"]
    done = runner.run(*ours, "-m", "pytest")
    done.assert_outcomes(passed=3, failed=1)
    assert "step 1, rule nan-trap: 1 of 3 gradients" in part(done, "test_trapped")


def test_workers_of_xdist_report_it_too(runner: pytest.Pytester) -> None:
    text = """
@pytest.mark.gradsurgeon
@pytest.mark.parametrize("bad", [None, 1])
def test_cases(bad):
    train(*build(), bad=bad)
"""
    done = run(runner, text, "-n", "2")
    done.assert_outcomes(passed=1, failed=1)
    assert "step 1, rule nan-trap: 1 of 3 gradients" in part(done, r"test_cases\[1\]")


def test_a_finding_of_a_check_fails_the_test(runner: pytest.Pytester) -> None:
    runner.makefile(
        ".yaml",
        checks="version: 1\nrules:\n  - {id: learns, action: check-update, params: '*'}\n",
        raising="version: 1\nrules:\n  - {id: learns, action: check-update, params: '*', then: raise}\n",
    )
    done = run(
        runner,
        """
import gradsurgeon

def forgotten():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Root(), nn.Linear(2, 1))
    nn.init.ones_(model[0].weight)
    return model, SGD(model[2].parameters(), 1e-3)

@pytest.mark.gradsurgeon("gradsurgeon:debug@1")
def test_pack():
    train(*forgotten(), steps=20)

@pytest.mark.gradsurgeon("checks.yaml")
def test_file():
    train(*forgotten(), steps=20)

@pytest.mark.gradsurgeon("raising.yaml")
def test_expected():
    with pytest.raises(gradsurgeon.CheckError):
        train(*forgotten(), steps=20)

@pytest.mark.gradsurgeon("checks.yaml", mode="observe")
def test_observed():
    train(*forgotten(), steps=20)

@pytest.mark.gradsurgeon("gradsurgeon:debug@1")
def test_healthy():
    train(*build(), steps=20)
""",
    )
    done.assert_outcomes(passed=3, failed=2)
    for test, rule in (("test_pack", "debug-updates"), ("test_file", "learns")):
        said = part(done, test)
        assert "checks found a fault" in said
        assert f"step 11, rule {rule}: 0.weight did not move in 10 updates" in said


def test_without_torch_only_marked_tests_miss_it(runner: pytest.Pytester) -> None:
    runner.makeconftest(
        """
import sys
for name in sys.modules:
    # What has been imported by now is what each run of pytest pays for.
    assert name.partition(".")[0] not in ("torch", "yaml", "pydantic"), name
assert sorted(name for name in sys.modules if name.startswith("gradsurgeon.")) == [
    "gradsurgeon.integrations", "gradsurgeon.integrations.pytest_plugin"
]
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Refuse())
"""
    )
    runner.makepyfile(
        """
import pytest
def test_plain(): ...
@pytest.mark.gradsurgeon
def test_marked(): ...
@pytest.mark.skipif(True, reason="no torch")
@pytest.mark.gradsurgeon
def test_skipped(): ...
"""
    )
    done = runner.runpytest_subprocess("--strict-markers")
    done.assert_outcomes(passed=1, errors=1, skipped=1)
    assert "needs PyTorch, which is not installed: pip install" in part(done, "test_marked")
