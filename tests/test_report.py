"""The report in a real browser: it renders, says nothing on the console, and tells the truth."""

import json
import re

import pytest

from stage2_train import report, verdict
from stage2_train.compare import analyse
from tests import browser
from tests.run_tools import learning, write_run
from tests.test_compare import MUON, config, pair

EVIL = "<img src=x onerror=alert(1)>\"'&$$\\evil$$"


@pytest.fixture
def written(tmp_path):
    paths = pair(tmp_path, seeds=(0, 1, 2))
    summary, arms = analyse(config(paths, tmp_path))
    report.write_report(tmp_path / "report.html", summary, arms)
    return tmp_path / "report.html", summary


@pytest.mark.slow
def test_renders_without_a_word_on_the_console_and_numbers_equal(written):
    path, summary = written
    script = """
      const canvases = (node) => [...node.querySelectorAll('*')].reduce((sum, child) => sum
        + (child.tagName === 'CANVAS') + (child.shadowRoot ? canvases(child.shadowRoot) : 0), 0);
      const cells = [...document.querySelectorAll('[data-key]')];
      const plots = [...document.querySelectorAll('.plot')];
      return {
        ready: document.documentElement.dataset.ready,
        numbers: cells.map((cell) => [cell.dataset.key, cell.dataset.value, cell.textContent]),
        plots: plots.map((plot) => [plot.id, plot.getBoundingClientRect().height,
          canvases(plot)]),
      };"""
    page = browser.load(path, script=script)
    assert page.console == []
    found = json.loads(browser.result(page))
    assert found["ready"] == "yes"
    shown = {key: (value, text) for key, value, text in found["numbers"]}
    checked = 0
    for name, values in summary["arms"].items():
        for _, key in report.COLUMNS:
            value, text = shown[f"{name}.{key}"]
            assert text == verdict.number(values[key])
            if values[key] is not None:
                assert float(value) == pytest.approx(values[key], rel=1e-12)
                checked += 1
    difference = summary["pairs"]["muon"]["heldout_loss"]["across"].mean
    assert float(shown["muon.heldout_loss.difference"][0]) == pytest.approx(difference, rel=1e-12)
    assert checked >= 16
    assert {plot[0] for plot in found["plots"]} == {"plot-loss", "plot-difference", "plot-slots"}
    assert all(height > 200 and canvases > 0 for _, height, canvases in found["plots"])


@pytest.mark.slow
def test_keyboard_sorts_zooms_and_hides(written):
    path, _ = written
    script = """
      const press = (key, place) => place.dispatchEvent(
        new KeyboardEvent('keydown', { key, bubbles: true }));
      const place = document.getElementById('plot-difference');
      const figure = Bokeh.documents[1].roots()[0];
      const range = () => [figure.x_range.start, figure.x_range.end];
      const home = range();
      press('+', place); const near = range();
      press('0', place); press('ArrowRight', place); const right = range();
      press('0', place); const back = range();
      const table = document.getElementById('table-arms');
      const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
      const button = table.tHead.rows[0].cells[2].querySelector('button');
      button.click(); const up = names(); const aria = button.parentElement.ariaSort;
      button.click(); const down = names();
      const box = document.querySelector('input[data-arm="1"]');
      box.click();
      const lines = figure.renderers.filter((r) => r.tags.includes('arm-1'));
      const focusable = document.querySelectorAll('.plot[tabindex="0"], button, input').length;
      return { home, near, right, back, up, down, aria, focusable,
        hidden: lines.every((line) => !line.visible), lines: lines.length };"""
    page = browser.load(path, script=script)
    assert page.console == []
    found = json.loads(browser.result(page))
    home, near, right = found["home"], found["near"], found["right"]
    assert near[0] > home[0]
    assert near[1] < home[1]
    assert right[0] > home[0]
    assert right[1] > home[1]
    assert found["back"] == home
    assert found["up"] == list(reversed(found["down"])) == ["muon", "adamw"]
    assert found["aria"] == "ascending"
    assert found["hidden"]
    assert found["lines"] >= 1


@pytest.mark.slow
def test_light_and_dark(written):
    path, _ = written
    script = """
      const figure = Bokeh.documents[0].roots()[0].children[0];
      return [getComputedStyle(document.body).backgroundColor, figure.background_fill_color];"""
    light = json.loads(browser.result(browser.load(path, script=script)))
    dark = json.loads(browser.result(browser.load(path, script=script, dark=True)))
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(20, 23, 27)"
    assert light[1] != dark[1]


@pytest.mark.slow
def test_untrusted_names_stay_text(tmp_path):
    paths = pair(tmp_path / "a")
    (tmp_path / "b").mkdir()
    evil = tmp_path / "b" / EVIL.replace("/", "")
    write_run(evil, loss=learning(80), optimizer=MUON)
    summary, arms = analyse(config([paths[0], str(evil)], tmp_path))
    report.write_report(tmp_path / "report.html", summary, arms)
    text = (tmp_path / "report.html").read_text()
    assert "<img src=x" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    data = re.search(r'id="plots">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in data
    assert "evil" not in data


@pytest.mark.slow
def test_untrusted_names_in_the_browser(tmp_path):
    paths = pair(tmp_path / "a")
    evil = tmp_path / "b" / EVIL
    write_run(evil, loss=learning(80), optimizer=MUON)
    summary, arms = analyse(config([paths[0], str(evil)], tmp_path))
    report.write_report(tmp_path / "report.html", summary, arms)
    page = browser.load(
        tmp_path / "report.html",
        script="return [document.images.length, document.scripts.length,"
        " document.querySelector('#table-arms tbody tr:last-child th').textContent];",
    )
    images, scripts, name = json.loads(browser.result(page))
    assert (images, scripts) == (0, 4)  # the page's three and the test's own
    assert name == EVIL
    assert page.console == []


def test_page_asks_for_nothing(written):
    path, _ = written
    text = path.read_text()
    outside = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert "http" not in outside.replace("http-equiv", "")
    assert "default-src 'none'" in outside
    assert path.stat().st_size < 2e6
