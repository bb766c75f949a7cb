"""A notebook that is really run: what its cells show of a session, a plan, a diagnosis, a report, and pictures."""

from __future__ import annotations

import base64
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from bounds import TIMEOUT
from commands import environment
from html_views import Page
from ranks import Json

nbformat: Any = pytest.importorskip("nbformat", reason="comes with nbclient, of the extra `dev`")
nbclient: Any = pytest.importorskip("nbclient", reason="of the extra `dev`")

BEGIN = """
import torch, gradsurgeon
from torch import nn
class Root(nn.Linear):
    def forward(self, x):
        return super().forward(x).sqrt()
model = Root(2, 1, bias=False)
nn.init.constant_(model.weight, 1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = gradsurgeon.apply(model, {"version": 1, "rules": [
    {"id": "norms", "action": "norm-log", "params": "*"},
    {"id": "trap", "action": "nan-trap", "params": "*"},
]})
"""
TRAIN = """
for value in (3.0, 6.0, -1.0):
    optimizer.zero_grad()
    model(torch.tensor([[value, 0.0]])).sum().backward()
    try:
        optimizer.step()
    except gradsurgeon.NonFiniteGradientError as error:
        diagnosis = error.diagnosis
"""
CELLS = (
    *(BEGIN, TRAIN, "session", "session.plan", "diagnosis", "gradsurgeon.report.summary(session)"),
    "session.plot()",
    "import sys; print('matplotlib.pyplot' in sys.modules)",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """Return what each cell shows, by media type."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    homes = {name: str(folder) for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute(env={**environment(), **homes})
    return [_shown(cell) for cell in notebook.cells]


def _shown(cell: Any) -> Json:
    data: Json = {}
    for output in cell.outputs:
        assert output.output_type in ("execute_result", "stream"), output
        data |= output.get("data", {"stdout": output.get("text")})
    return data


def page(outputs: list[Json], cell: str) -> Page:
    html = outputs[CELLS.index(cell)]["text/html"]
    return Page(SimpleNamespace(_repr_html_=lambda: html))


def gradients() -> tuple[float, float]:
    """Return those of the first two steps: the root of a weight times 3, and times 6."""
    first = 3 / (2 * math.sqrt(3))
    return first, 6 / (2 * math.sqrt(6 * (1 - 0.1 * first)))


@pytest.mark.slow
def test_tables_show_the_numbers_of_the_training(outputs: list[Json]) -> None:
    first, second = gradients()
    session = page(outputs, "session")
    assert "  step 3; the last trap tripped at step 2: rule trap on weight" in session.texts
    plan = page(outputs, "session.plan")
    assert any("norm-log  accumulated  end of backward" in text for text in plan.texts)
    report = page(outputs, "gradsurgeon.report.summary(session)")
    middle = (first + second) / 2
    numbers = [f"{number:.3g}" for number in (first, middle, second)]
    (row,) = (line.split() for line in report.texts if line.startswith("  weight "))
    assert row == ["weight", row[1], *numbers, "nan", "1"]
    assert row[1][-1] == "✗"


@pytest.mark.slow
def test_a_diagnosis_shows_where_it_was_born(outputs: list[Json]) -> None:
    diagnosis = page(outputs, "diagnosis")
    text = "".join(diagnosis.texts)
    # All outputs are NaN: nothing finite proves that the replay made the same output.
    assert text.startswith(
        "step 2, rank 0: diagnosis (partial): NaN born in the forward pass of the root (Root): aten.sqrt"
    )
    least = -(1 - 0.1 * sum(gradients()))
    (given,) = re.findall(r"input \[1, 1\] float32: (-[0-9.]+)", text)
    assert float(given) == pytest.approx(least, rel=1e-3)
    assert "out  [1, 1] float32: NaN" in text
    assert "return super().forward(x).sqrt()" in text


@pytest.mark.slow
def test_a_picture_is_shown_without_pyplot(outputs: list[Json]) -> None:
    picture = base64.b64decode(outputs[CELLS.index("session.plot()")]["image/png"])
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") >= 1000  # its width
    assert outputs[-1]["stdout"] == "False\n"
