"""Pictures of captured tensors, by the data that they are drawn from, and Grad-CAM by hand."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from models import data
from ranks import Json
from small import attach, rule_file
from torch import Tensor, nn

import gradsurgeon
from gradsurgeon import RecordError, Session

pytestmark = pytest.mark.slow

MAPS = {"id": "maps", "action": "capture", "modules": "conv2", "tensor": "output"}
GRADIENTS = {**MAPS, "id": "map-gradients", "tensor": "output.grad"}
WEIGHTS = {"id": "weights", "action": "capture", "params": "conv*.weight"}
NORMS = {"id": "norms", "action": "norm-log", "params": "*"}


class Net(nn.Module):
    """A small convolutional classifier."""

    def __init__(self, channels: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 3, 3, padding=1)
        self.conv2 = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.head = nn.Linear(channels, 4)

    def features(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x).relu())  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).relu().mean(dim=(2, 3)))  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def session(model: Net) -> Iterator[Session]:
    rules = [MAPS, GRADIENTS, WEIGHTS, NORMS]
    with gradsurgeon.apply(model, {"version": 1, "rules": rules}, optimizer=[]) as one:
        yield one


IMAGES = data(1, 2, 1, 8, 6)


def by_hand(model: Net, category: int) -> Tensor:
    """Return the Grad-CAM of each image as the paper has it, without gradsurgeon."""
    model = copy.deepcopy(model)  # has no rules that would keep these tensors, too
    maps = model.features(IMAGES).detach().requires_grad_()
    scores = model.head(maps.relu().mean(dim=(2, 3)))
    (gradient,) = torch.autograd.grad(scores[:, category].sum(), maps)
    cams = []
    for sample in range(len(IMAGES)):
        cam = torch.zeros(maps.shape[2:])
        for channel in range(maps.shape[1]):
            cam += gradient[sample, channel].mean() * maps[sample, channel].detach()
        cams.append(cam.relu())
    return torch.stack(cams)


def image(figure: Figure, axes: int = 0, number: int = -1) -> Any:
    found = [one for one in figure.axes[axes].get_children() if isinstance(one, AxesImage)]
    return found[number].get_array()


def title(figure: Figure) -> str:
    return figure.get_suptitle()


@pytest.mark.parametrize("category", [0, 3])
def test_grad_cam_is_that_of_the_paper(model: Net, session: Session, category: int) -> None:
    model(IMAGES)[:, category].sum().backward()
    expected = by_hand(model, category)
    maps, gradients = (session.captured(rule)["conv2", 0, 0] for rule in ("maps", "map-gradients"))
    cam = gradsurgeon.report.grad_cam(maps, gradients)
    assert cam.dtype == torch.float64
    assert (cam >= 0).all()
    torch.testing.assert_close(cam.float(), expected)
    assert expected.any() or category  # at least one map is none of zeros
    with pytest.raises(ValueError, match=r"found \[2, 3\] and \[2, 3\]"):
        gradsurgeon.report.grad_cam(torch.zeros(2, 3), torch.zeros(2, 3))


def test_the_guide_computes_a_grad_cam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).parents[2] / "rules" / "guide" / "runs.md"
    pictures = guide.read_text(encoding="utf-8").partition("\n## Pictures\n")[2]
    rules, code = (
        pictures.split(f"```{language}\n")[1].split("```")[0] for language in ("yaml", "python")
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cam.yaml").write_text(rules.replace("layer4", "conv2"), encoding="utf-8")
    model = Net()
    known: Json = {
        "gradsurgeon": gradsurgeon,
        "model": model,
        "image": IMAGES[:1],
        "category": 1,
    }
    exec(code.replace("layer4", "conv2"), known)
    torch.testing.assert_close(known["heat"].float(), by_hand(model, 1)[0])


def test_features_are_one_image_per_channel(model: Net, session: Session) -> None:
    model(IMAGES).sum().backward()
    figure = session.plot("features", rule="maps", sample=1)
    maps = model.features(IMAGES)[1].detach()
    assert len(figure.axes) == 5
    assert [axes.get_title() for axes in figure.axes] == ["0", "1", "2", "3", "4"]
    for channel, shown in enumerate(maps):
        np.testing.assert_allclose(image(figure, channel), shown, rtol=1e-4, atol=1e-6)
        # Black is the least element of this channel, and white its largest.
        (drawn,) = figure.axes[channel].images
        assert drawn.get_clim() == pytest.approx((float(shown.min()), float(shown.max())))
    assert title(figure) == "conv2, step 0, sample 1: 5 channels of 4 x 3"
    figure = session.plot("features", rule="weights", name="conv2.*")
    assert title(figure) == "conv2.weight, step 0, sample 0: 3 channels of 3 x 3"


def test_of_many_channels_the_first_are_drawn_and_the_last_call() -> None:
    model = Net(channels=70)
    with attach(model, MAPS, optimizer=[]) as session:
        model(IMAGES)
        model(IMAGES + math.nan)
        figure = session.plot("features")
        assert len(figure.axes) == 64
        assert title(figure) == "conv2, step 0, call 1, sample 0: 64 of 70 channels of 4 x 3"
        # What is not finite has a colour of its own.
        assert image(figure, 63).mask.all()
        figure.savefig(io.BytesIO(), format="png")
        figure = session.plot("features", call=0)
        assert title(figure) == "conv2, step 0, sample 0: 64 of 70 channels of 4 x 3"
        assert not image(figure, 63).mask.any()


def test_features_say_what_they_lack(model: Net, session: Session) -> None:
    wrong: Any = session
    with pytest.raises(RecordError, match="rule maps has kept nothing yet"):
        session.plot("features", rule="maps")
    model(IMAGES).sum().backward()
    with pytest.raises(ValueError, match="pass rule= one of maps, map-gradients, weights"):
        session.plot("features")
    with pytest.raises(ValueError, match=r"kept 2 tensors: pass name=, such as conv1\.weight"):
        session.plot("features", rule="weights")
    with pytest.raises(KeyError, match="did you mean `maps`"):
        session.plot("features", rule="map")
    with pytest.raises(ValueError, match="sample 2 of conv2 is not there: there are 2, from 0"):
        session.plot("features", rule="maps", sample=2)
    with pytest.raises(ValueError, match="'norms' takes only name= and rule="):
        session.plot(step=3)
    with pytest.raises(ValueError, match="there are norms, features"):
        wrong.plot("lines")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool])
def test_features_of_any_dtype_are_drawn(dtype: torch.dtype) -> None:
    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(dtype)

    model = nn.Sequential(Made())
    rules = rule_file({**MAPS, "modules": "0"})
    with gradsurgeon.apply(model, rules, optimizer=[]) as session:
        model(torch.tensor([0.0, 1.0]).view(1, 1, 1, 2))
        shown = image(session.plot("features", rule="maps"))
    assert shown.tolist() == [[0.0, 1.0]]


def test_tensors_of_another_shape_are_refused(model: Net) -> None:
    rules = rule_file({**MAPS, "modules": "head"})
    with gradsurgeon.apply(model, rules, optimizer=[]) as session:
        model(IMAGES)
        with pytest.raises(ValueError, match=r"head has the shape \[2, 4\]"):
            session.plot("features")
