"""The page of a run in a real browser: it draws, answers mouse and keys, and asks for nothing from elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from page_views import (
    HOSTILE,
    eventful_run,
    heights,
    label,
    open_page,
    place,
    plots,
    show_all,
    steps_in_view,
)
from runs import KEY, add, meta, values, write

from gradsurgeon.common.diagnosis import Cause, Diagnosis, Line, TensorFacts
from gradsurgeon.common.events import Event, RuleStatus
from gradsurgeon.common.rows import Rows
from gradsurgeon.records.store import Key
from gradsurgeon.records.store.writer import RunWriter
from gradsurgeon.tensors.statistics import HISTOGRAM

pytestmark = pytest.mark.slow

MESSAGE = """
step 3, rule no-nan: 1 of 1 gradients are not finite after backward
step skipped
diagnosis (reproduced): NaN born in the forward pass of head (Linear): aten.sqrt
in the order in which backward produced them:
  > NaN  a  1 element
"""
DIAGNOSIS = Diagnosis(
    "reproduced",
    (),
    step=3,
    rank=0,
    what="NaN",
    where="forward",
    module="head",
    module_type="Linear",
    operation="aten.sqrt",
    lines=(Line("net.py", 34, "forward", "return hidden.sqrt()"),),
    inputs=(TensorFacts("self", (2, 1), "float32", -1.0, 4.0, 0, 0, 2),),
    output=TensorFacts("", (2, 1), "float32", 2.0, 2.0, 1, 0, 2),
    history=(("one: aten.addmm", 4.0), ("two: aten.mul", 1e23)),
    cause=Cause("mathematics", ("in float64 it is NaN as well",), "clamp with `clamp(min=0)`"),
    rows=Rows((1,), 2, input_rows=(7,)),
    bundle="trap-step3-rank0",
)


def _pixel(page: Any, row: int, step: int) -> list[int]:
    found: list[int] = page.evaluate(
        """([row, share]) => {
          const canvas = document.querySelector(".map canvas");
          const y = Math.floor((row + 0.4) * 18 * canvas.height / canvas.clientHeight);
          return [...canvas.getContext("2d").getImageData(Math.floor(share * canvas.width), y, 1, 1).data];
        }""",
        [row, place(page, step)],
    )
    return found


def test_it_draws_curves_traps_and_the_map(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    headings = page.locator("h2").all_inner_texts()
    assert headings == ["What happened", "What stands out", "Gradients", "Rules"]
    assert plots(page) == 2
    show_all(page)
    band = page.locator(".band")
    assert [line for line in band.inner_text().split("\n") if line][1:] == [
        "step 120, rule no-nan",
        "ended, traps tripped in 1 step",
    ]
    assert "warning" in band.get_attribute("class")
    assert page.locator("details[open] pre").first.inner_text() == "NaN born"
    assert (
        "at step 50, 116x the steps before it; most in block.1.weight"
        in page.locator(".remarks").inner_text()
    )
    ranking = page.locator("h3", has_text="9 of 9: not finite first, then spikes, then the largest")
    assert ranking.count() == 1
    largest = page.locator(".scroll").first.locator("td:first-child").all_inner_texts()
    assert largest[:2] == ["block.2.bias", "block.1.weight"]
    # What is not finite has a colour of its own, a spike one of red, and no gradient none.
    bias, weight = label(page, "▾ 2 (2)") + 2, label(page, "▾ 1 (2)") + 1
    assert _pixel(page, bias, 120) == [255, 31, 143, 255]
    assert _pixel(page, bias, 121) == _pixel(page, bias, 10)
    red, green, blue, _ = _pixel(page, weight, 50)
    assert (red, green < 50, blue < 50) == (255, True, True)
    assert _pixel(page, label(page, "head.weight"), 10)[3] == 0
    assert _pixel(page, label(page, "head.weight"), 150)[3] == 255


def test_hovering_and_arrow_keys_read_cells(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    row = label(page, "▾ 1 (2)") + 1
    cells = page.locator(".cells")
    box = cells.bounding_box()
    cells.hover(position={"x": box["width"] * place(page, 50), "y": 18 * row + 8})
    assert page.locator(".reading").inner_text() == "block.1.weight, step 50: norm 90"
    cells.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".reading").inner_text() == "block.1.weight, step 51: norm 0.2"
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    assert page.locator(".reading").inner_text() == "block.1 (2), step 199: largest norm 0.2"
    # A key folds the module, whose two tensors are gone then.
    before = page.locator(".rows button").count()
    page.keyboard.press("Enter")
    assert page.locator(".rows button").count() == before - 2


def test_modules_fold_and_names_are_searched(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    page.get_by_role("button", name="fold all").last.click()
    assert page.locator(".rows button").all_inner_texts() == ["▸ block (8)", "head.weight"]
    # A folded module shows the worst that is in it.
    assert _pixel(page, 0, 120) == [255, 31, 143, 255]
    page.locator(".rows button").first.press("Enter")
    assert page.locator(".rows button").count() == 6
    page.get_by_role("searchbox").fill("BIAS")
    names = [f"block.{layer}.bias" for layer in range(4)]
    assert page.locator(".rows button").all_inner_texts() == names


def test_a_tensor_that_is_chosen_is_drawn_as_a_curve(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    legend = page.locator(".curves .legend")
    assert "the 9 in the table" in legend.inner_text()
    page.get_by_role("button", name="weight").first.click()
    assert legend.locator("li").all_inner_texts() == ["norm of all 9 parameters", "block.0.weight"]
    page.get_by_role("button", name="weight").first.click()
    assert "the 9 in the table" in legend.inner_text()


def test_dark_and_light_are_the_reader_s_choice(page: Any, tmp_path: Path) -> None:
    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="dark")
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    assert background() == "rgb(20, 23, 27)"
    page.get_by_role("button", name="light and dark").click()
    assert background() == "rgb(255, 255, 255)"
    page.get_by_role("button", name="light and dark").click()
    page.emulate_media(media="print")
    assert background() == "rgb(255, 255, 255)"


def test_hostile_names_are_shown_and_do_nothing(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "run", {f"{HOSTILE}.weight": [1.0, 2.0]}).close()
    open_page(page, tmp_path, tmp_path / "run")
    assert page.locator("img").count() == 0
    assert page.title() == "run: gradsurgeon report"
    assert HOSTILE in page.locator("td:first-child").first.inner_text()


def test_a_run_that_was_only_observed_says_what_would_have_changed(
    page: Any, tmp_path: Path
) -> None:
    writer = RunWriter(tmp_path / "run", rank=0, meta=meta(mode="observe"))
    add(writer, KEY, 0, values(1.0, 2.0), frozenset())
    writer.statuses({"norms": RuleStatus(2, 2, 1, 0)})
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    assert "would have changed" in page.locator("th").all_inner_texts()
    assert "no other events" in page.locator("section").first.inner_text()


def test_one_of_several_runs_is_shown_whole(page: Any, tmp_path: Path) -> None:
    write(tmp_path / "other", {"other.weight": [1.0] * 30}).close()
    open_page(page, tmp_path, tmp_path / "other", eventful_run(tmp_path / "run"))
    assert page.locator("h2").first.inner_text() == "Runs"
    # It opens on the run that went worst.
    rows = page.locator("section").first.locator("tbody tr")
    assert [row.split("\t")[1:4] for row in rows.all_inner_texts()] == [
        ["ended", "0", "0"],
        ["ended, traps tripped in 1 step", "1", "0"],
    ]
    assert page.locator("h1").inner_text() == "run rules.yaml on Net"
    page.get_by_role("button", name="other").click()
    page.wait_for_function("document.querySelectorAll('.rows button').length == 1")
    assert page.locator("h1").inner_text() == "other rules.yaml on Net"
    assert "other.weight" in page.locator("main").inner_text()


def test_charts_and_maps_share_their_steps(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    assert plots(page) == 2
    show_all(page)
    cells = page.locator(".cells").bounding_box()
    edges = page.evaluate(
        "plots.map((one) => one.over.getBoundingClientRect()).map((box) => [box.left, box.right])"
    )
    assert edges == [pytest.approx([cells["x"], cells["x"] + cells["width"]], abs=1)] * 2
    # A mouse over the map puts the crosshair into every chart, and one over a chart into the map.
    page.locator(".cells").hover(position={"x": cells["width"] * place(page, 50), "y": 8})
    assert page.evaluate("plots.map((one) => one.cursor.idx)") == [50, 50]
    assert "step 50" in page.locator(".legend").first.inner_text()
    over = page.locator(".u-over").first
    over.hover(position={"x": cells["width"] * place(page, 150), "y": 20})
    assert page.locator(".crosshair").bounding_box()["x"] == pytest.approx(
        cells["x"] + cells["width"] * place(page, 150), abs=2
    )
    # What is dragged over is seen in all of them, until a double click.
    box = over.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 20)
    page.mouse.up()
    seen = page.evaluate("plots.map((one) => [one.scales.x.min, one.scales.x.max])")
    assert seen[0] == seen[1] == page.evaluate("[current.axes[0].min, current.axes[0].max]")
    assert 40 < seen[0][1] - seen[0][0] < 60
    page.get_by_role("button", name="show all steps").click()
    assert page.evaluate("plots[1].scales.x.max") > 199
    assert not page.get_by_role("button", name="show all steps").is_visible()


@pytest.mark.parametrize("low", [-44.0, -3.0, 0.0])
def test_every_range_of_norms_has_a_readable_axis(page: Any, tmp_path: Path, low: float) -> None:
    """From the least float32 to the largest, and a curve that hardly moves."""
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    for high in (low + 0.1, low + 0.3, low + 1.2, low + 3, low + 82):
        ticks = page.evaluate("([low, high]) => logTicks(low, high, 6)", [low, high])
        assert all(low <= tick <= high for tick in ticks)
        assert 1 < len(ticks) <= 8
        texts = page.evaluate("(ticks) => tickTexts(ticks, tickText)", ticks)
        assert all(0 < len(text) <= 8 for text in texts)
        assert len(set(texts)) == len(ticks)


def test_ticks_of_a_loss_that_hardly_moves_are_told_apart(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    assert page.evaluate("tickTexts([12.58, 12.59], shown)") == ["12.58", "12.59"]
    assert page.evaluate("tickTexts([1, 2], shown)") == ["1", "2"]


def test_a_chart_that_fails_takes_no_other_with_it(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    page.evaluate(
        """() => {
          const draw = Chart.prototype.draw;
          let first = true;
          Chart.prototype.draw = function () { if (first) { first = false; throw new Error("broken"); } draw.call(this); };
          return show(0);
        }"""
    )
    assert "This chart could not be drawn: broken" in page.locator("main").inner_text()
    assert plots(page) == 1
    assert page.locator(".rows button").count() > 0


def test_the_diagnosis_of_a_trap_is_open(page: Any, tmp_path: Path) -> None:
    writer = write(tmp_path / "run", {"a": [1.0, 2.0, 3.0, math.nan]})
    again = "  to run the step again: gradsurgeon replay trap-step3-rank0 --model net:Net"
    tried = "  tried in the replay: with `clamp(min=0)` the outputs are finite"
    message = f"{MESSAGE.strip()}\n{tried}\n{again}"
    writer.event(Event("trap", "no-nan", 3, 0, "a", message, DIAGNOSIS.to_json()))
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    assert (
        page.locator(".band strong").inner_text()
        == "step 3: NaN born in the forward pass of head (Linear): aten.sqrt, net.py:34"
    )
    card = page.locator("details[open] .diagnosis")
    words = zip(
        card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts(), strict=True
    )
    assert list(words) == [
        ("at", "net.py:34 return hidden.sqrt()"),
        ("rows", "all in row 1 of 2, from row 7 of the input"),
        ("to try", "clamp with `clamp(min=0)`"),
        ("tried in the replay", "with `clamp(min=0)` the outputs are finite"),
        ("cause", "mathematics; in float64 it is NaN as well"),
        ("certainty", "reproduced"),
        ("in", "input [2, 1] float32: -1 to 4"),
        ("out", "[2, 1] float32: 1 of 2 NaN, else 2"),
        ("largest before", "one: aten.addmm 4 → two: aten.mul 1e+23"),
        ("again", "gradsurgeon replay trap-step3-rank0 --model net:Net"),
    ]
    assert not page.get_by_text("> NaN").is_visible()
    page.get_by_text("the message as in the terminal").click()
    assert page.get_by_text("> NaN").is_visible()


def test_of_many_magnitudes_the_last_are_shown_and_each_module_once(
    page: Any, tmp_path: Path
) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    labels = ["a: aten.mm", "a: aten.mul", "a: aten.exp", "b: aten.mm", "aten.sum", "aten.div"]
    history = [[label, place + 1] for place, label in enumerate(labels)]
    told = page.evaluate("magnitudesOf", history)
    assert told == "… → a: aten.mul 2 → aten.exp 3 → b: aten.mm 4 → aten.sum 5 → aten.div 6"
    assert page.evaluate("magnitudesOf", history[:2]) == "a: aten.mm 1 → aten.mul 2"
    assert page.evaluate("magnitudesOf", []) == ""


def test_a_long_name_of_a_run_is_beside_its_colour(page: Any, tmp_path: Path) -> None:
    page.set_viewport_size({"width": 700, "height": 900})
    runs = [tmp_path / f"{name}-{'long-name-' * 8}" for name in "ab"]
    for run in runs:
        write(run, {"a": [1.0, 2.0]}).close()
    open_page(page, tmp_path, *runs)
    cell = page.locator("section").first.locator("tbody td").first
    colour = cell.locator(".swatch").bounding_box()
    name = cell.get_by_role("button").bounding_box()
    assert colour["x"] + colour["width"] <= name["x"]
    assert name["y"] <= colour["y"] <= name["y"] + 20


def test_a_diagnosis_without_some_keys_is_shown(page: Any, tmp_path: Path) -> None:
    writer = write(tmp_path / "run", {"a": [1.0, math.nan]})
    keys = {"headline": "NaN born in head", "where": "forward", "certainty": "partial"}
    writer.event(Event("trap", "no-nan", 1, 0, "a", MESSAGE.strip(), keys))
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    assert page.locator("details[open] .diagnosis").inner_text().split() == ["certainty", "partial"]


def test_histograms_are_bands_that_open(page: Any, tmp_path: Path) -> None:
    names = ("a", "b")
    writer = write(tmp_path / "run", {"a": [1.0, 2.0, 3.0]})
    for step in range(3):
        for column, stat in enumerate(HISTOGRAM):
            # Elements of a few magnitudes, which grow.
            number = float(40 + step <= column < 50 + step)
            add(writer, Key("bins", stat, "accumulated", names), step, values(number, 0.0))
    writer.close()
    open_page(page, tmp_path, tmp_path / "run")
    assert page.locator("h2").all_inner_texts()[-2:] == ["Magnitudes", "Rules"]
    entries = page.locator("section", has=page.get_by_role("heading", name="Magnitudes"))
    charts = entries.locator(".u-over")
    assert charts.count() == 1
    fills = page.evaluate(
        "[...current.axes[0].views].find((view) => view.fills?.length).plot.bands.length"
    )
    assert fills == 2
    assert entries.locator("li").all_inner_texts() == ["95%", "75%", "50%", "25%", "5%"]
    # Of a tensor of zeros there is nothing to draw, and the page stays whole.
    entries.locator("summary").last.click()
    charts.nth(1).wait_for()
    assert charts.count() == 2


def test_of_many_curves_the_worst_stand_out_until_the_mouse_is_at_another(
    page: Any, tmp_path: Path
) -> None:
    def tones() -> list[bool]:
        found: list[str] = page.evaluate(
            """() => {
              const [chart] = [...current.axes[0].views].filter((view) => view.box.closest(".curves"));
              return chart.lines.map((_, index) => chart.plot.series[index + 1].stroke(chart.plot, index + 1));
            }"""
        )
        return [tone.startswith("rgb(") for tone in found]

    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    # The norm of all, and the two worst of nine.
    assert tones() == [True] * 3 + [False] * 7
    page.locator(".curves li").nth(6).hover()
    assert tones() == [True] * 3 + [False] * 3 + [True] + [False] * 3
    page.mouse.move(5, 5)
    assert tones() == [True] * 3 + [False] * 7
    # Of two that the reader has chosen none is quiet.
    for _ in range(2):
        page.locator(".rows button", has_text="weight").and_(
            page.locator("[aria-pressed=false]")
        ).first.click()
    assert tones() == [True] * 3


def exploded_run(path: Path) -> Path:
    """Four hundred steps of two layers, none of which is finite from step 26 on."""
    finite = [0.1 * 1.1**step for step in range(26)]
    names = [f"base_model.layers.{layer}.weight" for layer in range(2)]
    writer = write(path, dict.fromkeys(names, finite + [math.nan] * 374))
    writer.event(Event("check", "updates", 2, 0, names[0], "step 2\nnever moves"))
    for step in range(26, 400):
        writer.event(Event("trap", "no-nan", step, 0, names[0], f"step {step}, rule no-nan\nNaN"))
    writer.close()
    return path


def test_it_opens_on_the_steps_before_the_first_trap(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, exploded_run(tmp_path / "run"))
    first, last = steps_in_view(page)
    assert first == -0.5
    assert 26 < last < 40
    assert page.locator("footer").inner_text().startswith("steps 0 to 29 of 0 to 399 are shown")
    # The finding of a check came before the trap, and says less.
    assert page.locator("details[open] summary").inner_text().startswith("trap x374, steps 26..399")
    # Below the map stand the steps that a chart has.
    ticks = page.locator(".ticks span").all_inner_texts()
    assert ticks[:2] == ["step 0", "5"]
    show_all(page)
    assert steps_in_view(page)[1] > 399
    assert page.locator(".ticks span").all_inner_texts()[:2] == ["step 0", "50"]


def test_a_trap_in_the_first_step_and_one_without_steps_show_all(page: Any, tmp_path: Path) -> None:
    for steps in ([math.nan], []):
        writer = write(tmp_path / f"run{len(steps)}", {"a": steps})
        writer.event(Event("trap", "no-nan", 0, 0, "a", "step 0, rule no-nan: NaN"))
        writer.close()
        open_page(page, tmp_path, tmp_path / f"run{len(steps)}")
        first, last = steps_in_view(page)
        assert first < 0 < last < 3


def test_what_is_not_finite_for_long_is_one_band(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, exploded_run(tmp_path / "run"))
    band = page.locator(".cells .nonfinite")
    assert band.inner_text() == "non-finite from 26 to 399"
    plots(page)
    charts = "[...current.axes[0].views].filter((view) => view.plot)"
    texts = page.evaluate(f"{charts}.map((chart) => chart.bands.map((band) => band.text))")
    assert texts == [["non-finite from 26 to 399"]] * 2
    assert page.evaluate(f"{charts}.flatMap((chart) => chart.bad)") == []
    assert page.evaluate("data.runs[0].marks") == [[2, 2, "check"], [26, 399, "trap"]]
    # Beside a run that is finite the band has a name.
    write(tmp_path / "calm", {"a": [1.0] * 100 + [math.nan] + [1.0] * 299}).close()
    open_page(page, tmp_path, tmp_path / "run", tmp_path / "calm")
    beside = page.evaluate("[...current.axes[1].views][0].bands.map((band) => band.text)")
    assert beside == ["run: norm of all 2 parameters: non-finite from 26 to 399"]


def test_names_lose_what_all_of_them_begin_with(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, exploded_run(tmp_path / "run"))
    rows = page.locator(".scroll").first
    assert rows.locator("th").first.inner_text() == "parameter in base_model.layers"
    assert rows.locator("td:first-child").all_inner_texts() == ["0.weight", "1.weight"]
    assert page.locator(".curves li").all_inner_texts()[1:] == ["0.weight", "1.weight"]
    assert "names in base_model.layers" in page.locator(".curves .scale").inner_text()


@pytest.mark.parametrize("width", [1280, 700])
def test_hovering_moves_nothing(page: Any, tmp_path: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    writer = write(exploded_run(tmp_path / "run") / "losses", {"loss": [1.0, 2.0]}, stat="mean")
    writer.close()
    open_page(page, tmp_path, tmp_path / "run", tmp_path / "run" / "losses")
    before = heights(page)
    for target in page.locator(".u-over, .cells, .curves li").all():
        target.hover()
        assert heights(page) == before


def test_ticks_of_one_axis_have_one_notation(page: Any, tmp_path: Path) -> None:
    open_page(page, tmp_path, eventful_run(tmp_path / "run"))
    texts = page.evaluate("tickTexts([9e-4, 1e-3, 1.1e-3], shown)")
    assert texts == ["0.0009", "0.001", "0.0011"]
    texts = page.evaluate("tickTexts([9e-4, 1e-3, 1.1e-3].map(Math.log10), tickText)")
    assert texts == ["0.0009", "0.001", "0.0011"]
    assert page.evaluate("tickTexts([0, 1e-7, 2e-7], shown)") == ["0", "1e-7", "2e-7"]
    assert page.evaluate("tickTexts([-4, -3], tickText)") == ["10⁻⁴", "0.001"]
