"""The wheel as a user has it: installed in an environment of its own, away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from bounds import TIMEOUT
from commands import CLEAN, ROOT, environment

pytestmark = pytest.mark.slow

# All public names.
PUBLIC = """
import pathlib, sys
import gradsurgeon
assert "torch" not in sys.modules
assert pathlib.Path(gradsurgeon.__file__).is_relative_to(sys.prefix), gradsurgeon.__file__
for name in gradsurgeon.__all__:
    getattr(gradsurgeon, name)
print(gradsurgeon.__version__)
"""
PACKS = """
from gradsurgeon.language import packs
for pack in sorted(packs.published().values(), key=lambda pack: pack.name):
    print(pack.path)
"""
TRAINING = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**environment(), "PYTHONPATH": ""},  # no checkout
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and install it beside the libraries of this environment; return the folder of its Python."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("gradsurgeon-*.whl")
    venv.create(folder / "env", with_pip=False)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    # Paths in a file of paths come after the folder itself, and files of paths in them are not read: no checkout is found.
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "shared.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    python = folder / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", wheel, cwd=folder)
    return python.parent


def test_every_file_of_the_package_is_in_it(scripts: Path) -> None:
    (installed,) = scripts.parent.glob("lib/python*/site-packages/gradsurgeon")
    assert files(ROOT / "gradsurgeon") - files(installed) == set()


def files(folder: Path) -> set[Path]:
    """Return the paths of all files in a folder, but for what Python keeps compiled."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder) for path in found}


def test_its_commands_and_all_public_names_are_there(scripts: Path, tmp_path: Path) -> None:
    version = run(scripts / "python", "-c", PUBLIC, cwd=tmp_path).strip()
    said = f"gradsurgeon {version}\n"
    assert run(scripts / "gradsurgeon", "--version", cwd=tmp_path) == said
    assert run(scripts / "python", "-m", "gradsurgeon", "--version", cwd=tmp_path) == said


def test_packs_are_in_it_and_clean(scripts: Path, tmp_path: Path) -> None:
    packs = run(scripts / "python", "-c", PACKS, cwd=tmp_path).splitlines()
    assert len(packs) > 5
    assert all(Path(pack).is_relative_to(scripts.parent) for pack in packs)
    run(scripts / "gradsurgeon", "lint", *packs, cwd=tmp_path)
    rules = tmp_path / "rules.yaml"
    rules.write_text('version: 1\ninclude: ["gradsurgeon:nan-trap@1"]\n', encoding="utf-8")
    run(scripts / "gradsurgeon", "lint", rules, cwd=tmp_path)


def test_a_launched_script_gets_its_rules_and_a_page(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(CLEAN, encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    options = ("--rules", "rules.yaml", "--record", "seen")
    run(scripts / "gradsurgeon", "run", *options, "train.py", cwd=tmp_path)
    assert "norm-log" in run(scripts / "gradsurgeon", "report", "seen", cwd=tmp_path)
    run(scripts / "gradsurgeon", "report", "seen", "--html", "page.html", cwd=tmp_path)
    assert "</html>" in (tmp_path / "page.html").read_text(encoding="utf-8")
