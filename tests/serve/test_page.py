"""The live page of `mcinfer serve` in a real browser: the system's, or Playwright's own."""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.serve.conftest import Held, Serve
from tests.serve.servers import Server

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE_MS = 40_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip("no browser: apt install chromium, or playwright install chromium")
        browser = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, server: Server, wide: int = 1000) -> Iterator[Page]:
    """The page of a server; it fails if its script does, or if it asks for what it may not."""
    page = browser.new_page(viewport={"width": wide, "height": 900})
    page.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if "Policy" in said.text else None)
    page.goto(f"http://{server.url}/")
    yield page
    page.close()
    assert not wrong


def test_page_shows_a_worker_that_is_killed_and_comes_back(
    browser: Browser, serve: Serve, fake_model: Held
) -> None:
    server = serve(fake_model(), "--name", "m", "--engine", "fake", "--devices", 2)
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            assert server.infer(np.ones((1, 4), np.float32), "m").status == 200

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with opened(browser, server) as page:
            rows = page.locator("tbody tr")
            expect(rows).to_have_count(2)
            expect(page.locator("h2 b")).to_have_text("ready")
            expect(page.locator(".charts polyline")).to_have_count(5)
            expect(page.locator("dd").first).not_to_have_text("0")  # requests a second
            os.kill(server.workers()[0], signal.SIGKILL)
            expect(page.locator("tbody td:nth-child(4)", has_text="1")).to_have_count(1)
            expect(page.locator("h2 b")).to_have_text("ready")
    finally:
        ended.set()
        asking.join()


def _places(page: Page, kind: str) -> list[tuple[float, float]]:
    """Top and height of all such elements, at one moment: the page is drawn anew each second."""
    look = "e => { const r = e.getBoundingClientRect(); return [r.top, r.height] }"
    section = (
        "[...document.querySelectorAll('section')].find(s => s.textContent.includes('affine'))"
    )
    found: list[tuple[float, float]] = page.evaluate(
        f"kind => [...{section}.querySelectorAll(kind)].map({look})", kind
    )
    assert found
    return found


def test_figures_are_in_one_row_at_1280_pixels_and_no_label_is_broken(
    browser: Browser, server: Server
) -> None:
    for _ in range(20):
        assert server.infer(np.ones((1, 4), np.float32), "affine").status == 200
    with opened(browser, server, 1280) as page:
        section = page.locator("section", has_text="affine")
        expect(section.locator("svg")).to_have_count(4)
        for kind in ("dt", "dd", "svg", "figcaption"):
            assert len({top for top, _ in _places(page, kind)}) == 1, kind
        heights = [high for kind in ("dt", "figcaption") for _, high in _places(page, kind)]
        assert max(heights) < 1.9 * 12.8  # of one line


def test_form_sends_a_request_of_the_model_s_own_and_shows_what_came(
    browser: Browser, server: Server
) -> None:
    with opened(browser, server, 420) as page:
        page.select_option("#model", "affine")
        shape = page.locator("[name=shape]")
        expect(shape).to_have_count(1)
        shape.fill("2 4")
        page.select_option("[name=values]", "ones")
        page.click("button")
        expect(page.locator("#answer")).to_contain_text("FP32 [2, 4]")
        expect(page.locator("#answer")).to_contain_text("least 3, most 3, mean 3")  # 2x + 1
        shape.fill("2 5")
        page.click("button")
        expect(page.locator("#answer .reason")).to_contain_text(
            "got shape [2, 5], expected [-1, 4]"
        )
        wide, seen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= seen == 420


@pytest.mark.parametrize("name", ["numbers", "scalars", "texts"])
def test_form_has_values_of_every_type_and_shape(
    browser: Browser, server: Server, name: str
) -> None:
    with opened(browser, server) as page:
        page.select_option("#model", name)
        metadata = server.ask(f"/v2/models/{name}").json
        expect(page.locator("#inputs .row")).to_have_count(len(metadata["inputs"]))
        page.click("button")
        for output in metadata["outputs"]:
            expect(page.locator("#answer")).to_contain_text(
                f"{output['name']} {output['datatype']}"
            )


def test_model_may_have_the_name_of_what_every_object_has(
    browser: Browser, serve: Serve, fake_model: Held
) -> None:
    names = ["__proto__", "constructor"]
    models = [fake_model()] * 2
    words = [word for name in names for word in ("--name", name)]
    server = serve(*models, *words, "--engine", "fake", "--devices", "inline")
    with opened(browser, server) as page:
        expect(page.locator("h2 b")).to_have_text(["ready", "ready"])
        expect(page.locator(".charts polyline")).to_have_count(10)


def test_page_without_its_script_has_the_figures(browser: Browser, server: Server) -> None:
    context = browser.new_context(java_script_enabled=False, viewport={"width": 420, "height": 900})
    page = context.new_page()
    page.goto(f"http://{server.url}/")
    expect(page.locator("pre").first).to_contain_text("1 of 1 workers serve")
    expect(page.locator("pre").first).to_contain_text("cpu:0")
    expect(page.locator("form")).to_be_hidden()
    context.close()
