"""The pages in Chromium: curves are there, nothing is fetched, nothing overflows, and large runs open at once."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.run_folders import RECIPE, end_line, start_line, step_line, times_line, write_run

from hoploom.report.page import as_html
from hoploom.report.reading import RunReader
from hoploom.report.runs import run_page
from hoploom.report.watch import LivePage

CHROMIUM = shutil.which("chromium")
FLAGS = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; scripts/browser.sh installs it"),
]
INK = """canvas => {
  const all = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0;
  for (let at = 3; at < all.length; at += 4) inked += all[at] > 0;
  return inked;
}"""
MIDDLE = """canvas => {
  const all = canvas.getContext("2d").getImageData(Math.round(canvas.width * 0.4), 0, 200, canvas.height).data;
  let coloured = 0;
  for (let at = 0; at < all.length; at += 4) {
    const rgb = all.slice(at, at + 3);
    coloured += all[at + 3] > 200 && Math.max(...rgb) - Math.min(...rgb) > 60;
  }
  return Math.min(coloured, 1);
}"""  # whether a curve is drawn in the middle
WRITTEN = """
  const write = CanvasRenderingContext2D.prototype.fillText;
  window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    window.written.push(text);
    write.call(this, text, ...place);
  };
"""
DRAWN = "() => new Promise(requestAnimationFrame)"  # what was begun is on the screen
MILLION = 1_000_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        flags = [f"--{flag}" for flag in [*FLAGS.split(), "disable-sync"]]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def page_of(folder: Path, *runs: Path) -> str:
    path = folder / "report.html"
    path.write_text(as_html(run_page([RunReader(run) for run in runs])))
    return path.as_uri()


def opened(browser: Any, url: str, width: int = 1440, scheme: str = "light") -> tuple[Any, list[str]]:
    """The page once its charts are drawn, and what went wrong or over the network."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, found = context.new_page(), []
    page.on("console", lambda said: "getImageData" in said.text or found.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: found.append(f"error: {error}"))
    page.on("request", lambda request: request.url == url or found.append(f"request: {request.url}"))
    page.goto(url)
    page.wait_for_selector("body[data-drawn]")
    return page, found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_curves_are_drawn_and_nothing_overflows_or_is_fetched(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    long = "a_run_whose_name_is_long_and_has_no_place_to_break_at_all_so_that_it_would_overflow"
    url = page_of(tmp_path, write_run(tmp_path / long), write_run(tmp_path / "other", recipe=RECIPE + "seed = 3\n"))
    page, found = opened(browser, url, width, scheme)
    assert page.locator("figure canvas").count() == 4
    for canvas in page.locator("figure canvas").all():
        assert canvas.evaluate(INK) > 500
    assert page.evaluate("document.documentElement.scrollWidth") == width
    light = sum(map(int, page.evaluate("getComputedStyle(document.body).backgroundColor").strip("rgb()").split(",")))
    assert (light > 600) == (scheme == "light")
    assert found == []
    page.context.close()


def test_a_curve_is_hidden_by_its_name_and_zoomed_by_dragging(browser: Any, tmp_path: Path) -> None:
    page, found = opened(browser, page_of(tmp_path, write_run(tmp_path / "run", 200)))
    loss = page.locator("figure[data-chart=loss]")
    before = loss.locator("canvas").evaluate(INK)
    assert "training 0.005" in loss.locator("button").first.inner_text()
    loss.locator("button").first.press("Enter")  # by keyboard
    assert loss.locator("button").first.get_attribute("aria-pressed") == "false"
    page.evaluate(DRAWN)
    assert loss.locator("canvas").evaluate(INK) < before
    picture = "document.querySelector('figure[data-chart=speed] canvas').toDataURL()"
    whole = page.evaluate(picture)
    box = loss.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 60, steps=4)
    page.mouse.up()
    page.evaluate(DRAWN)
    assert page.evaluate(picture) != whole  # another chart follows
    assert found == []
    page.context.close()


def test_smoothing_and_an_axis_of_epochs_redraw_the_charts_and_files_are_copied(browser: Any, tmp_path: Path) -> None:
    noisy = [step_line(step, loss=float(step % 7)) for step in range(1, 201)]
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.add_init_script(WRITTEN)
    page.goto(page_of(tmp_path, write_run(tmp_path / "my run", 200, steps=noisy)))
    page.wait_for_selector("body[data-drawn]")
    last = page.locator("figure[data-chart=loss] button").first
    measured = "slider => { slider.value = %s; slider.dispatchEvent(new Event('input')); }"
    page.locator(".tools input").evaluate(measured % 0)
    assert last.inner_text() == "training 4"  # 200 % 7
    page.locator(".tools input").evaluate(measured % 0.98)
    assert 2.5 < float(last.inner_text().split()[1]) < 3.5  # the mean of 0 to 6
    assert "epoch" not in page.evaluate("written")
    page.get_by_role("button", name="epochs").click()
    page.evaluate(DRAWN)
    assert {"epoch", "20"} <= set(page.evaluate("written"))  # 200 steps of 10
    page.locator("summary").click()
    page.locator(".copy").first.click()
    page.wait_for_selector("button:text('copied')")
    assert page.evaluate("navigator.clipboard.readText()") == RECIPE
    context.close()


def test_a_loss_that_is_not_finite_is_a_gap_and_another_run_is_not(browser: Any, tmp_path: Path) -> None:
    bad = [step_line(step, loss=None if 40 <= step <= 160 else 1.0) for step in range(1, 201)]
    odd = [step_line(step, loss=1.0) for step in range(1, 201, 2)]
    even = [step_line(step, loss=1.0) for step in range(2, 201, 2)]
    inked = []
    for name, steps in (("bad", [bad]), ("joined", [odd, even]), ("one", [odd])):
        runs = [write_run(tmp_path / f"{name}{at}", 200, steps=lines, epochs=[]) for at, lines in enumerate(steps)]
        page, _ = opened(browser, page_of(tmp_path, *runs))
        page.evaluate(DRAWN)
        inked.append(page.locator("figure[data-chart=loss] canvas").evaluate(MIDDLE))
        page.context.close()
    assert inked[0] == 0
    assert inked[1] == inked[2] > 0


def test_the_axis_of_steps_says_so_and_a_wide_table_has_a_shadow_up_to_its_end(browser: Any, tmp_path: Path) -> None:
    url = page_of(tmp_path, write_run(tmp_path / "run"))
    context = browser.new_context(viewport={"width": 390, "height": 900})
    page = context.new_page()
    page.add_init_script(WRITTEN)
    page.goto(url)
    page.wait_for_selector("body[data-drawn]")
    assert "step" in page.evaluate("written")
    page.add_style_tag(content="th, td { color: transparent !important }")  # what is left at the edge is the shadow
    wide = page.locator(".scroll").filter(has_text="Some CPU")
    box, pictures = wide.bounding_box(), []
    for place in ("0", "one.scrollWidth", "0"):
        wide.evaluate(f"one => {{ one.scrollLeft = {place}; }}")
        page.evaluate(DRAWN)
        edge = {"x": box["x"] + box["width"] - 6, "y": box["y"] + 4, "width": 6, "height": 12}
        pictures.append(page.screenshot(full_page=True, clip=edge))
    assert pictures[0] == pictures[2] != pictures[1]
    context.close()


def test_a_live_page_follows_and_says_when_its_address_is_out_of_date(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", result=None, events=[start_line()])
    with LivePage([RunReader(run)]) as live:
        port = urlsplit(live.url).port
        page, found = opened(browser, live.url)
        page.wait_for_selector("body[data-version]")
        assert page.locator(".pill").inner_text() == "running"
        page.locator("figure[data-chart=speed] button").first.click()  # hidden, and stays so
        with (run / "steps-rank0.jsonl").open("a") as file:
            file.write(json.dumps(step_line(31)) + "\n")
        page.wait_for_selector("dd:text('31')")
        assert page.locator("figure[data-chart=speed] button").first.get_attribute("aria-pressed") == "false"
        assert page.locator("figure[data-chart=loss] canvas").evaluate(INK) > 500
        with (run / "events.jsonl").open("a") as file:
            file.write(json.dumps(end_line(stopped="asked")) + "\n")
        page.wait_for_selector(".pill:text('interrupted')")
        assert [entry for entry in found if "/content?token=" not in entry] == []
    page.wait_for_selector("#gone:text('hoploom watch has stopped')")
    with LivePage([RunReader(run)], f"127.0.0.1:{port}"):  # again, with a new token
        page.wait_for_selector("#gone:text('this address is out of date')")
    page.context.close()


def test_markup_in_a_run_stays_text(browser: Any, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)> '\"&"
    recipe = RECIPE + "# </script><script>alert(2)</script>\n"
    page, found = opened(browser, page_of(tmp_path, write_run(tmp_path / name, recipe=recipe)))
    assert page.locator("img").count() == 0
    assert page.title() == name
    page.locator("summary").click()
    assert "</script><script>alert(2)</script>" in page.locator("pre").first.inner_text()
    assert found == []
    page.context.close()


def test_a_million_steps_open_in_two_seconds_of_work(browser: Any, tmp_path: Path) -> None:
    """Not by the clock, which others share: by what the browser's main thread worked."""
    run = write_run(tmp_path / "run", times=[times_line(step) for step in range(1000, MILLION + 1, 1000)])
    with (run / "steps-rank0.jsonl").open("w") as file:
        for step in range(1, MILLION + 1):
            line = f'{{"step": {step}, "loss": {2 + step % 7}, "seeds": 9, "seconds": 0.1, "learning_rate": 0.1}}\n'
            file.write(line if step != 654_321 else json.dumps(step_line(step, loss=99.0)) + "\n")
    url = page_of(tmp_path, run)
    assert (tmp_path / "report.html").stat().st_size < 300_000
    context = browser.new_context()
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(url)
    page.wait_for_selector("body[data-drawn]")
    metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < metrics["TaskDuration"] < 2
    curve = page.evaluate("JSON.parse(document.getElementById('figures').textContent).charts[0].curves[0].data")
    assert max(curve[3]) == 99.0  # the one spike of a million is on the page
    context.close()
