"""The built site in a real browser: it fits a desk and a phone, and its search finds pages."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = Path("/usr/bin/chromium")
QUIET = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
WIDTHS = (1440, 390)
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
QUESTIONS = {
    "train on two hosts with slurm": "slurm",
    "resume after crash": "resuming",
    "larger than memory": "larger-than-memory",
    "how many fanouts": "fanouts",
    "parquet tables": "tables",
    "multiple gpus": "several-gpus",
    "server died": "troubleshooting",
    "custom sampler": "sampling",
    "tls token": "security",
    "lightning": "lightning",
    "W&B": "lightning",
    "machine crashed": "troubleshooting",
    "if a machine crashes": "troubleshooting",
    "HGT": "models",
    "HGTLoader": "sampling",
    "edge features": "models",
    "nodes without features": "models",
    "edge weights": "models",
    "best checkpoint": "models",
}

# What is wider than the window, and by what; wrapped code is cut where its box is and no bar says so.
TOO_WIDE = """() => {
  const room = document.documentElement.clientWidth
  if (document.documentElement.scrollWidth > room) return ["the page", document.documentElement.scrollWidth]
  for (const seen of document.querySelectorAll(".md-content td, .md-content p, .md-content li")) {
    const box = seen.getBoundingClientRect()
    if (box.width && (box.right > room + 1 || box.left < -1)) return [seen.textContent.slice(0, 60), box.right]
  }
  return null
}"""
BROKEN_KEYS = """() => [...document.querySelectorAll(".md-content td code")]
  .filter(code => !/[\\s,]/.test(code.textContent) && code.textContent.length < 40 && code.getClientRects().length > 1)
  .map(code => code.textContent)"""
CUT_OFF = """() => [...document.querySelectorAll(".md-content pre code")]
  .filter(code => code.scrollWidth > code.clientWidth)
  .map(code => code.textContent.split("\\n").reduce((a, b) => a.length > b.length ? a : b))"""

NUM_FOUND = "/[0-9]/.test(document.querySelector('.md-search-result__meta').textContent)"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made with --strict: a link that leads to no page or heading is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(built: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(built))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip("there is no /usr/bin/chromium; scripts/browser.sh installs it")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=QUIET.split())
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_says_no_error(site: str, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if not request.url.startswith(site) else None)
    wrong = {}
    for name in PAGES:
        page.goto(f"{site}/{name}.html")
        found = {"too wide": page.evaluate(TOO_WIDE), "said": [*said]}
        if width == max(WIDTHS):
            found |= {"broken keys": page.evaluate(BROKEN_KEYS), "cut off": page.evaluate(CUT_OFF)}
        if any(found.values()):
            wrong[name] = {what: value for what, value in found.items() if value}
        said.clear()
    page.close()
    assert not wrong


@pytest.mark.parametrize("is_served", [True, False], ids=["served", "opened from disk"])
def test_the_search_finds_the_page_of_each_question(built: Path, site: str, browser: Any, is_served: bool) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{site if is_served else built.as_uri()}/index.html")
    found = {}
    for question in QUESTIONS:
        page.click(".md-search__input")
        page.fill(".md-search__input", "")
        page.press(".md-search__input", "Backspace")  # the page listens to keys
        page.wait_for_function(f"!{NUM_FOUND}")
        page.fill(".md-search__input", question[:-1])  # no key is heard yet
        page.press(".md-search__input", question[-1])
        page.wait_for_function(NUM_FOUND)
        links = "links => links.map(link => new URL(link.href).pathname)"
        hits = page.eval_on_selector_all(".md-search-result__item > a", links)
        found[question] = list(dict.fromkeys(Path(hit).stem for hit in hits))[:3]
    page.close()
    assert not {question: hits for question, hits in found.items() if QUESTIONS[question] not in hits}
