"""What the README and the guide show is what a reader gets: commands run and print that, pages are short, links resolve.

A block of a page that is marked `console` has commands after `$ `, and below each the lines that it prints, in their
order; `...` stands for others, and numbers are masked, since they differ between machines. The text `# exit code 1`
says how the command ends. A page's blocks that begin with the name of a file are files beside it.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import forks
import guide
import pytest
from bounds import TIMEOUT
from commands import call_here, environment, git

import gradsurgeon

TEXTS = {"README": guide.ROOT / "README.md", **guide.PAGES}
MAX_WORDS, MAX_WIDTH, README_LINES = 1500, 180, 170
# Their commands are run by other tests: stories, CI, launchers, and the run with all kinds of events.
LISTED = ("nan", "review", "rules")


class Command(NamedTuple):
    line: str
    shown: list[str]
    code: int


def commands(page: str) -> list[Command]:
    found: list[Command] = []
    for block in guide.blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *shown = part.rstrip().splitlines()
            code = 1 if "# exit code 1" in shown else 0
            found.append(Command(line, [one for one in shown if not one.startswith("# ")], code))
    return found


def masked(line: str) -> str:
    """Return a line without its numbers, and with single blanks."""
    return " ".join(re.sub(r"(?<![\w.])-?\d[\d.,]*(e[-+]?\d+)?", "#", line).split())


def first_missing(shown: list[str], printed: str) -> str | None:
    """Return the first line shown that is not printed after the lines shown before it."""
    lines = iter(map(masked, printed.splitlines()))
    for line in map(masked, shown):
        start, cut, _ = line.partition(" ...")
        if line != "..." and not any(
            one.startswith(start) if cut else one == line for one in lines
        ):
            return line
    return None


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """Return a checkout with a script, its model, rules, a run of them, and the names of the model."""
    folder = tmp_path / "reader"
    folder.mkdir()
    script = guide.RULES / "stories" / "went_nan.py"
    shutil.copy(script, folder / "train.py")
    for file in (guide.ROOT / "tests" / "cases" / "review").glob("*.*"):
        shutil.copy(file, folder)
    guide.write_files(guide.text("start"), folder)
    (folder / "wrong.yaml").write_text(
        'version: 1\nrules:\n  - id: a\n    action: zero\n    parms: "fc*.bias"\n'
    )
    (rule,) = re.findall(r"`(\{id: sizes[^`]*)`", guide.text("extending"))
    (folder / "sizes.yaml").write_text(f"version: 1\nrules:\n  - {rule}\n")
    return folder


def run(line: str, cwd: Path) -> tuple[int, str]:
    """Run a line of a page; return its exit code, and what it prints on both streams."""
    tool, *arguments = shlex.split(line, comments=True)
    if tool == "gradsurgeon" and arguments[0] != "run" and "--import" not in arguments:
        here = call_here(*arguments, cwd=cwd)
        code, printed = here.returncode, here.stderr + here.stdout
    else:
        start = {"gradsurgeon": ["-m", "gradsurgeon"], "pytest": ["-m", "pytest"], "python": []}
        # Pytest is to load no plugins of this environment.
        env = {**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        fork = forks.start([*start[tool], *arguments], cwd=cwd, env=env).wait(TIMEOUT)
        code, printed = fork.returncode, (fork.stderr + fork.stdout).decode()
    return code, printed.replace(f"{cwd}/", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [name for name, path in TEXTS.items() if "```console" in path.read_text()]
)
def test_commands_print_what_is_shown(page: str, reader: Path) -> None:
    text = TEXTS[page].read_text(encoding="utf-8")
    guide.write_files(text, reader)
    if page == "nan":  # the run that the page has made by then
        assert run("python train.py", reader)[0] == 1
    for command in commands(text):
        code, printed = run(command.line, reader)
        assert code == command.code, (command.line, printed)
        assert (first_missing(command.shown, printed), printed) == (None, printed)


@pytest.mark.slow
@pytest.mark.parametrize("page", LISTED)
def test_listed_commands_run(page: str, reader: Path) -> None:
    package = reader / "train"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))\n"
    )
    (reader / "rules.yaml").write_text(
        'version: 1\nrules: [{id: norms, action: norm-log, params: "*"}]\n'
    )
    assert run("gradsurgeon params --model train.net:build -o params.json", reader)[0] == 0
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        git(reader, *words)
    git(reader, "update-ref", "refs/remotes/origin/main", "HEAD")
    record_a_step(reader)
    listed = "".join(guide.blocks(guide.text(page), ""))
    lines = re.findall(r"^gradsurgeon .*$", listed, re.MULTILINE)
    assert lines
    for line in lines:
        if " | " not in line:  # `test_guide_ci` runs it
            code, printed = run(line, reader)
            assert code == 0, (line, printed)


def record_a_step(reader: Path) -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    with gradsurgeon.apply(model, reader / "rules.yaml", record=reader / "runs" / "1"):
        model(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_losses_go_to_backward_as_shown() -> None:
    import torch
    from torch import nn

    trunk, x = nn.Linear(3, 4), torch.ones(2, 3)
    model = nn.ModuleDict({"trunk": trunk, "seg": nn.Linear(4, 1), "depth": nn.Linear(4, 1)})
    rules, _ = guide.blocks(guide.text("losses"), "yaml")
    (code,) = guide.blocks(guide.text("losses"), "python")
    seg_loss, depth_loss = (model[name](trunk(x)).square().sum() for name in ("seg", "depth"))
    with gradsurgeon.apply(model, rules, optimizer=[]) as session:
        exec(code, {"gradsurgeon": gradsurgeon, "seg_loss": seg_loss, "depth_loss": depth_loss})
        assert session.latest("trunk:seg/depth", rule="tasks", stat="cosine") is not None
    assert trunk.weight.grad is not None


@pytest.mark.slow
def test_callbacks_are_made_as_shown(reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch
    import transformers
    from torch import nn

    monkeypatch.chdir(reader)
    made, trained, *_ = guide.blocks(guide.text("integrations"), "python")
    exec(made, {"lightning": lightning.pytorch})
    args = transformers.TrainingArguments("out", report_to="none", use_cpu=True)
    known = {"Trainer": transformers.Trainer, "model": nn.Linear(1, 1), "args": args, "data": [1]}
    exec(trained, known)


def test_a_tracker_is_given_as_in_the_script_that_is_run() -> None:
    _, _, code, _ = guide.blocks(guide.text("integrations"), "python")
    script = (guide.RULES / "integrations" / "train_with_trackers.py").read_text(encoding="utf-8")
    for line in re.findall(
        r"^from .*|^import .*|    sinks\.\w+\(|sinks=trackers", code, re.MULTILINE
    ):
        assert line in script, line


@pytest.mark.slow
@pytest.mark.parametrize("page", TEXTS)
def test_every_option_named_exists(page: str, tmp_path: Path) -> None:
    text = TEXTS[page].read_text(encoding="utf-8")
    text = re.sub(r" -- .*| train\.py.*", "", text)  # what follows is for the script
    for command, rest in re.findall(r"\bgradsurgeon ([a-z]+) ([^`\n#&]*)", text):
        options = re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)
        if options:
            _, told = run(f"gradsurgeon {command} --help", tmp_path)
            assert [one for one in options if one not in told] == [], (command, rest)


@pytest.mark.parametrize("page", guide.PAGES)
def test_pages_are_short(page: str) -> None:
    text = guide.text(page)
    assert len(text.split()) <= MAX_WORDS
    generated = re.sub(r"<!-- example: the .*?<!-- example: end -->", "", text, flags=re.DOTALL)
    wide = [
        one for one in generated.splitlines() if len(one) > MAX_WIDTH and not one.startswith("|")
    ]
    assert wide == []
    _, _, begin, *_ = text.splitlines()
    assert begin.startswith("After this page ")


def test_the_readme_is_read_to_the_end() -> None:
    lines = (guide.ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    first = "\n".join(lines[:30])
    assert "NaN" in lines[2]
    assert "$ gradsurgeon run " in first
    assert "NaN born in the forward pass" in first
    assert "to try: " in first
    assert "](rules/page.png)" in first


def test_the_index_has_every_page() -> None:
    index = (guide.RULES / "README.md").read_text(encoding="utf-8")
    assert sorted(
        re.findall(r"^\* \[.*?\]\(guide/(.*?)\.md\): .+\.$", index, re.MULTILINE)
    ) == list(guide.PAGES)


def documents() -> list[Path]:
    """Return the pages of this repository that people read."""
    found = [
        *guide.ROOT.glob("*.md"),
        *(guide.ROOT / ".github").glob("*.md"),
        *guide.RULES.rglob("*.md"),
    ]
    return [
        *found,
        *(guide.ROOT / folder / "README.md" for folder in ("benchmarks", "gradsurgeon", "tests")),
    ]


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(guide.ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", unfenced(page)):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), (target, anchor)


def test_links_in_the_code_lead_somewhere() -> None:
    named = r"rules/(?:README|reference|python-api|guide/[\w-]+)\.md(?:#[\w-]+)?"
    for folder in ("gradsurgeon", "benchmarks", "tests", "rules"):
        for file in (guide.ROOT / folder).rglob("*.py"):
            for link in re.findall(named, file.read_text(encoding="utf-8")):
                target, _, anchor = link.partition("#")
                assert (guide.ROOT / target).exists(), (file, link)
                assert not anchor or anchor in anchors(guide.ROOT / target), (file, link)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", unfenced(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def unfenced(page: Path) -> str:
    """Return a page without its blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
