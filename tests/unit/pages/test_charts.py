"""Charts and tables of a page in a browser: numbers of axes, long names, narrow screens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chromium import PROGRAM, Chromium
from trtpipe.pipeline.pages import plots, render
from trtpipe.pipeline.pages.parts import Cell, Page, Row, Section, Table

LONG = "1 x h100 fp8-kv with a host cache of 64 GiB and of each answer the first draft " * 2
# Text that is painted on canvases.
RECORD = """window.painted = []; const paint = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
  window.painted.push(text); return paint.call(this, text, ...more); };"""
LAID_OUT = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"


def _page(sections: list[Section], file: Path) -> Path:
    file.write_text(render.render(Page(kind="Test", title="A page", sections=sections)), encoding="utf-8")
    return file


def _curve(name: str, style: int, *xs: float) -> plots.Curve:
    points = [plots.Point(x=x, y=x / 3, label="", title=f"{x}") for x in xs]
    return plots.Curve(name=name, style=style, points=points)


def test_lines_of_a_panel_are_named_in_one_legend() -> None:
    gpus = [plots.Line(name=f"GPU {at}", style=at, values=[1.0, 2.0]) for at in range(8)]
    alone = plots.Panel(label="Requests waiting", lines=[plots.Line(name="waiting", style=0, values=[1.0, 2.0])])
    panels = [alone, *(plots.Panel(label=label, lines=gpus) for label in ("GPU busy, %", "GPU power, W"))]
    drawn = plots.timeline("x", [0.0, 1.0], panels)
    assert list(drawn.legend) == [(f"GPU {at}", at) for at in range(8)]
    assert "GPU 7</" not in drawn.drawing


@pytest.mark.process
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_an_axis_of_large_values_has_numbers(tmp_path: Path) -> None:
    chart = plots.curves("x", [_curve("", 0, 1240, 5310, 8875)], x="tokens/s", y="ms")
    page = _page([Section(title="x", figures=[chart])], tmp_path / "page.html")
    with Chromium(tmp_path / "profile") as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=RECORD)
        for width in (390, 1280):
            browser.open(page, width=width)
            browser.wait(LAID_OUT)
            # The y axis ends at 3000.
            assert {"5000", "10k"} <= set(browser.value("window.painted"))


@pytest.mark.process
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_long_names_leave_room_on_a_narrow_screen(tmp_path: Path) -> None:
    chart = plots.curves("x", [_curve(LONG, 0, 1, 2), _curve("b", 1, 2, 3)], x="tokens/s", y="ms")
    table = Table(head="What", columns=["tokens/s"] * 6, rows=[Row(name=LONG, cells=[Cell(text="12,345")] * 6)])
    page = _page([Section(title="x", figures=[chart], tables=[table])], tmp_path / "page.html")
    with Chromium(tmp_path / "profile") as browser:
        browser.open(page, width=390)
        browser.wait(LAID_OUT)
        assert browser.value("document.documentElement.scrollWidth") <= 390
        name = browser.value("document.querySelector('tbody th').getBoundingClientRect().width")
        assert 100 <= name <= 0.45 * 390 + 20
