"""A headless Chromium for tests: loads a file, gives its DOM and what the console said."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass
class Page:
    """What was loaded: the DOM after scripts ran, console lines, wall seconds."""

    dom: str
    console: list[str]
    seconds: float


def chromium() -> str:
    """The browser's path; skips the test with the reason where there is none."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("no Chromium found (apt-get install chromium, or set CHROMIUM=/path)")
    return found


def load(path: Path, *, script: str = "", dark: bool = False, screenshot: Path | None = None,
         budget_ms: int = 15000) -> Page:  # fmt: skip
    """Loads a page without network. `script` runs when the page says it is ready.

    The script may `await`; what it returns is stored as JSON in <html data-result>.
    """
    browser = chromium()
    text = path.read_text(encoding="utf-8")
    probe = (
        "<script>addEventListener('load', async () => {"
        "for (let i = 0; i < 400 && !document.documentElement.dataset.ready; i++)"
        " await new Promise((done) => setTimeout(done, 25));"
        "try { const result = await (async () => {" + script + "})();"
        "document.documentElement.dataset.result = JSON.stringify(result ?? null); }"
        "catch (error) { console.error('probe: ' + error); } });</script>"
    )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}/profile",
            "--enable-logging=stderr", "--log-level=0", "--window-size=1200,2600",
            f"--virtual-time-budget={budget_ms}",
        ]  # fmt: skip
        if dark:
            command.append("--blink-settings=preferredColorScheme=0")
        else:
            command.append("--blink-settings=preferredColorScheme=1")
        command += [f"--screenshot={screenshot}"] if screenshot else ["--dump-dom"]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, copy.as_uri()], capture_output=True, text=True, timeout=120, check=False
        )
        seconds = time.perf_counter() - started
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Page(done.stdout, console, seconds)


def result(page: Page) -> str:
    """The JSON that the script returned."""
    import html

    found = re.search(r'<html[^>]* data-result="([^"]*)"', page.dom)
    assert found, f"the script did not finish: {page.console}"
    return html.unescape(found[1])
