"""Pictures of captured tensors on the page of a run, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from page_views import HOSTILE, open_page
from torch import Tensor, nn

import gradsurgeon

pytestmark = pytest.mark.slow

# The ends of the ramp of the map, and its middle, which lies between two of its samples.
DARK, MIDDLE, BRIGHT = [68, 1, 84, 255], [35, 144, 139, 255], [253, 231, 37, 255]


class _Tagging(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gradsurgeon.tag(torch.tensor([7.0, 7.0]), HOSTILE)
        return x


def _record(path: Path) -> Path:
    """A convolution that hands its input on, of 2 x 3 pixels with one that is not finite."""
    conv = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.ones_(conv.weight)
    model = nn.Sequential(conv, _Tagging())
    image = torch.tensor([[-1.0, 1.0, 0.0], [torch.nan, 1.0, -1.0]])
    rules = [
        {"id": "maps", "action": "capture", "modules": "0", "tensor": "output"},
        {"id": "slopes", "action": "capture", "modules": "0", "tensor": "output.grad"},
        {"id": "tags", "action": "capture", "tensors": "*", "tensor": "value"},
    ]
    with gradsurgeon.apply(model, {"version": 1, "rules": rules}, optimizer=[], record=path):
        model(image.expand(2, 1, 2, 3)).sum().backward()
    return path


def _pixels(page: Any, place: int) -> list[list[int]]:
    """Return red, green, blue and opacity of each pixel of a map."""
    found: list[int] = page.evaluate(
        """(place) => {
          const canvas = document.querySelectorAll(".maps canvas")[place];
          return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
        }""",
        place,
    )
    return [found[at : at + 4] for at in range(0, len(found), 4)]


def _section(page: Any) -> Any:
    return page.locator("section").filter(has=page.get_by_role("heading", name="Captures"))


def test_maps_have_the_colours_of_their_numbers(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, _record(tmp_path / "run"))
    headings = page.locator("h2").all_inner_texts()
    assert headings == ["What happened", "Captures", "Rules"]
    # One channel of the first sample, of the output and of its gradient.
    assert page.locator(".maps canvas").count() == 2
    pixels = _pixels(page, 0)
    assert [*pixels[:3], *pixels[4:]] == [DARK, BRIGHT, MIDDLE, BRIGHT, DARK]
    assert pixels[3][3] == 0
    text = _section(page).inner_text()
    assert "maps [0, 0:1], -1 (dark) to 1 (bright)" in text
    assert "step 0 · 2 x 1 x 2 x 3 · float32 · -1 to 1 · mean 0 · 2 of 12 not finite" in text


@pytest.mark.parametrize(
    ("scheme", "colour"), [("light", (255, 31, 143)), ("dark", (255, 77, 166))]
)
def test_what_is_not_finite_is_seen(
    page: Any, tmp_path: Path, scheme: str, colour: tuple[int, int, int]
) -> None:
    image = pytest.importorskip("PIL.Image")
    page.emulate_media(color_scheme=scheme)
    open_page(page, tmp_path, _record(tmp_path / "run"))
    canvas = page.locator(".maps canvas").first
    box = canvas.bounding_box()
    assert (box["width"], box["height"]) == (72, 48)
    canvas.screenshot(path=tmp_path / "map.png")
    with image.open(tmp_path / "map.png") as shot:
        assert shot.convert("RGB").getpixel((12, 36)) == colour
        # Enlarged without smoothing, up to the edge of a pixel.
        assert shot.convert("RGB").getpixel((21, 10)) == tuple(DARK[:3])
        assert shot.convert("RGB").getpixel((26, 10)) == tuple(BRIGHT[:3])


def test_names_are_text_and_equal_elements_one_bar(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, _record(tmp_path / "run"))
    assert page.locator(".capture h4").nth(1).inner_text() == HOSTILE
    assert page.locator("img").count() == 0
    second = page.locator(".capture").nth(1)
    assert "all are 7" in second.inner_text()
    assert second.locator("path").get_attribute("d") == "M0 1V0h1V1z"
    bars = page.locator(".capture path").first.get_attribute("d")
    # Four, two and four elements, by the logarithm of one more.
    assert [bar.partition(" ")[0] for bar in bars.split("M")[1:]] == ["0", "30", "59"]
