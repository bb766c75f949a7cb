"""What has nothing to do with training: commands as whole processes, reading rules, binding them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import gradsurgeon
from benchmarks import nets
from benchmarks.machine import ROOT
from benchmarks.measure import spread
from benchmarks.overhead import Row
from gradsurgeon.common.match import compile_pattern
from gradsurgeon.language import planning
from gradsurgeon.language.planning import manifest_file

GROUP = "startup"
HELP = "gradsurgeon --help"
LINT = "gradsurgeon lint, 100 rules"
DIFF = "gradsurgeon diff, 10,000 parameters"
PLAN = "gradsurgeon plan, 10,000 parameters"
LINT_FLOOR = "import pydantic and yaml, build one model"
IMPORT = "import gradsurgeon, beyond Python itself"
LAUNCH = "gradsurgeon run on a script without torch, beyond the script"
LAUNCH_TORCH = "gradsurgeon run on a script that imports torch, beyond the script"
PARSE = "read 1,000 rules"
BIND = "bind 20 rules to a model of 10,000 parameters"
BIND_FILE = "bind 20 rules to params.json of the same"
_LAYERS = 5_000
# No command that reads rules can do without this.
_LEAST = """
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError
import yaml

class Model(BaseModel):
    number: int = 1

Model()
"""
_KINDS = (
    '    action: clamp\n    params: "h.{}.attn.*"\n    at: step\n    min: -1.0\n    max: 1.0\n',
    '    action: norm-log\n    params: "h.{}.*.weight"\n    stats: [l2, linf]\n',
    '    action: scale\n    params: ["h.{}.mlp.*", "g.{}.mlp.*"]\n    exclude: "*.bias"\n    factor: 0.5\n',
)  # fmt: skip


def rule_file(count: int) -> str:
    """Return the text of a rule file as people write them, with so many rules."""
    rules = (f"  - id: rule-{number}\n{_KINDS[number % 3]}" for number in range(count))
    return "version: 1\nrules:\n" + "".join(
        text.replace("{}", str(number)) for number, text in enumerate(rules)
    )


def twenty(factor: float) -> str:
    """Return twenty rules that share the layers of an MLP of 5,000 between them."""
    width = _LAYERS // 20
    rules = (
        f"  - id: rule-{number}\n    action: scale\n"
        f'    params: "layers.{{{number * width}..{(number + 1) * width - 1}}}.*"\n'
        f"    factor: {factor}\n"
        for number in range(20)
    )
    return "version: 1\nrules:\n" + "".join(rules)


def measured(device: str, *, quick: bool) -> Iterator[Row]:
    """Yield one row per command or call; these run on the host, whatever the device."""
    del device
    rounds = 5 if quick else 15
    with tempfile.TemporaryDirectory(prefix="gradsurgeon-benchmark-") as folder:
        yield from _calls(Path(folder), rounds)
        yield from _commands(Path(folder), rounds)


def _calls(folder: Path, rounds: int) -> Iterator[Row]:
    text = rule_file(1_000)
    # Before the model: the more objects there are, the longer Python's collector takes now and then.
    plain = partial(yaml.load, text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    yield _beside(plain, PARSE, lambda: gradsurgeon.load(text), rounds)
    model = nets.DeepMlp(_LAYERS, width=4)
    manifest = planning.from_model(model)
    (folder / "params.json").write_text(manifest_file.dumps(manifest), encoding="utf-8")
    rules = gradsurgeon.load(twenty(0.5))
    expressions = [compile_pattern(text).regex for rule in rules.rules for text in rule.patterns]

    def least() -> None:
        """Take down what a plan has of parameters and modules, and match each pattern with each name."""
        params = {n: (p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()}
        _ = [(name, type(module).__mro__) for name, module in model.named_modules()]
        for expression in expressions:
            _ = list(map(expression.fullmatch, params))

    yield _beside(least, BIND, lambda: gradsurgeon.plan(model, rules), rounds)
    times = [timed(lambda: gradsurgeon.plan(manifest, rules)) for _ in range(rounds)]
    yield {"group": GROUP, "what": BIND_FILE} | _row(times)


def _beside(floor: Callable[[], object], what: str, call: Callable[[], object], rounds: int) -> Row:
    both = [(timed(floor), timed(call)) for _ in range(rounds)]
    shares = spread([ours[0] / least[0] for least, ours in both]).to_dict()
    return {"group": GROUP, "what": what, "beside_floor": shares} | _row([ours for _, ours in both])


def _commands(folder: Path, rounds: int) -> Iterator[Row]:
    texts = {
        "rules.yaml": rule_file(100),
        "old.yaml": twenty(0.5),
        "new.yaml": twenty(0.25),
        "script.py": "print(1)\n",
        "script_with_torch.py": "import torch\n",
        "quiet.yaml": 'version: 1\nrules:\n  - {id: norms, action: norm-log, params: "*"}\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    own = [sys.executable, "-m", "gradsurgeon"]
    commands = {
        HELP: [*own, "--help"],
        LINT: [*own, "lint", "rules.yaml"],
        LINT_FLOOR: [sys.executable, "-c", _LEAST],
        PLAN: [*own, "plan", "old.yaml", "--params", "params.json"],
        DIFF: [*own, "diff", "old.yaml", "new.yaml", "--params", "params.json"],
    }
    for what, command in commands.items():
        process(command, folder)  # compiles what it imports, as an installation does
        times = [process(command, folder) for _ in range(rounds)]
        yield {"group": GROUP, "what": what} | _row(times)
    run = [*own, "run", "--rules", "quiet.yaml"]
    pairs = {
        IMPORT: (["-c", "pass"], [sys.executable, "-c", "import gradsurgeon"]),
        LAUNCH: (["script.py"], [*run, "script.py"]),
        LAUNCH_TORCH: (["script_with_torch.py"], [*run, "script_with_torch.py"]),
    }
    for what, (plain, command) in pairs.items():
        process(command, folder)
        both = [
            (process([sys.executable, *plain], folder), process(command, folder))
            for _ in range(rounds)
        ]
        yield {"group": GROUP, "what": what} | _row([_beyond(*pair) for pair in both])


Times = tuple[float, float]


def _row(times: Sequence[Times]) -> dict[str, Any]:
    computed, passed = zip(*times, strict=True)
    return {"seconds": spread(computed).to_dict(), "wall": spread(passed).to_dict()}


def _beyond(base: Times, case: Times) -> Times:
    return case[0] - base[0], case[1] - base[1]


def timed(call: Callable[[], object]) -> Times:
    """Return the seconds that a call computes, and the seconds that pass."""
    computed, passed = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - computed, time.perf_counter() - passed


def process(command: Sequence[str], folder: Path) -> Times:
    """Run a process that ends well; return the seconds that it and its children compute, and that pass."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Compiled modules are kept for the next process, whatever the environment says.
    env = {**os.environ, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    before, begin = _children(), time.perf_counter()
    subprocess.run(command, cwd=folder, env=env, capture_output=True, check=True)
    passed = time.perf_counter() - begin
    return _children() - before if os.name == "posix" else passed, passed


def _children() -> float:
    """Return what the processes that this one has waited for computed, and those that they waited for."""
    if os.name != "posix":
        return 0.0  # Windows does not tell
    import resource  # noqa: PLC0415 # not on every system

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
