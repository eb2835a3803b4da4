"""The live page in a real Chromium: what it shows at each width, light and dark, and that it changes by itself."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ones_db import Store
from tests import debian
from tests.cluster import paths
from tests.db.make import job
from tests.marks import NIGHTLY, nightly
from tests.show.conftest import TOKEN, Page
from tests.waiting import until

pytestmark = pytest.mark.slow
PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
PICTURES = paths.REPOSITORY / "build" / "pictures"
"""Screenshots, for whoever wants to look."""

# Contrast by WCAG 2 of each text against what is behind it.
CONTRAST = """
const seen = new Map();
const line = (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
const lum = (c) => { const v = c.map((x) => line(x / 255));
  return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
const worst = [];
for (const e of document.querySelectorAll("body *")) {
  if (e.hidden || e.getAttribute("aria-hidden") || !e.textContent.trim() || !e.offsetParent) continue;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
  const a = lum(parse(getComputedStyle(e).color)), b = lum(behind(e));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) worst.push([e.tagName, e.textContent.trim().slice(0, 40), ratio]);
}
return worst;
"""


# Rows whose short cells, which have titles above them, are not in one line.
BROKEN = """
return [...document.querySelectorAll("tr:not([hidden])")].filter((row) => {
  const tops = [...row.cells].filter((e) => e.offsetParent && !e.classList.contains("long")).map((e) => e.offsetTop);
  return new Set(tops).size > 1;
}).map((row) => row.textContent);
"""

SHOWN = "return [...document.querySelectorAll('#waiting tbody tr:not([hidden])')].map((row) => row.textContent);"


def installed() -> str:
    """Why there is no browser, empty where there is one; installs Debian's where that can be done."""
    return debian.installed(("chromium", "chromedriver"), PACKAGES)


def driver() -> Any:
    """A Chromium without a window, to be driven."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    found.set_page_load_timeout(60)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    why = installed()
    if why:
        pytest.skip(why)
    found = driver()
    yield found
    found.quit()


def sized(browser: Any, width: int, scheme: str) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )


def picture(browser: Any, name: str) -> None:
    """For people to look at, by night."""
    from selenium.common.exceptions import TimeoutException

    if not NIGHTLY:
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    # Chromium gives itself 10 s, and nothing is tested by it.
    with suppress(TimeoutException):
        browser.save_screenshot(str(PICTURES / name))


@pytest.mark.parametrize("scheme", ["light", nightly("dark")])
def test_each_width_light_and_dark(serve: Callable[..., Page], browser: Any, scheme: str) -> None:
    """Protects readers: nothing beside the window, rows in one line, every text has WCAG AA's contrast, nothing
    in the console."""
    page = serve()
    browser.get_log("browser")
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}")
    for width in (360, 1280, 2560) if NIGHTLY else (360, 2560):
        sized(browser, width, scheme)
        for path in ("", "decisions", "jobs/10", "jobs/7"):
            browser.get(f"http://127.0.0.1:{page.port}/{path}")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, (width, path)
            assert browser.execute_script(CONTRAST) == [], (width, path)
            assert browser.execute_script(BROKEN) == [], (width, path)
            picture(browser, f"{path.replace('/', '-') or 'cluster'}-{width}-{scheme}.png")
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text(encoding="utf-8")
VIOLATIONS = """
const done = arguments[0];
axe.run(document).then((found) => done(found.violations.map(
  (one) => [one.id, one.help, one.nodes.map((node) => node.html.slice(0, 120)).slice(0, 3)])));
"""


WINDOWS = [(width, scheme) for width in (1440, 800, 390) for scheme in ("light", "dark")]


@pytest.mark.parametrize(("width", "scheme"), [one if one == (390, "dark") else nightly(*one) for one in WINDOWS])
def test_axe_finds_nothing(serve: Callable[..., Page], browser: Any, width: int, scheme: str) -> None:
    """Protects people who use the pages by keyboard, screen reader or magnifier, at each width and in both themes."""
    page = serve()
    browser.set_script_timeout(60)
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}")
    sized(browser, width, scheme)
    for path in ("", "decisions", "jobs/10", "jobs/7"):
        browser.get(f"http://127.0.0.1:{page.port}/{path}")
        browser.execute_script(AXE)
        assert browser.execute_async_script(VIOLATIONS) == [], path
    browser.execute_script("document.querySelector('main').append(document.createElement('img'))")
    assert [name for name, *_ in browser.execute_async_script(VIOLATIONS)] == ["image-alt"]


def test_it_changes_by_itself(serve: Callable[..., Page], browser: Any) -> None:
    """Protects what makes it live: a tick changes the page, and neither the reader's filter nor place is lost."""
    page = serve()
    sized(browser, 1280, "light")
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}")
    until(lambda: browser.find_element("id", "state").text == "live")
    browser.find_element("id", "filter").send_keys("newcomer")
    browser.execute_script("window.stays = true")
    with Store.open(page.url, "gres") as store:
        store.record_jobs([job(11, name="newcomer", state="PENDING")])
    page.tick(time.time() + 1)
    # In one look: a row that was found may have been replaced before it is read.
    until(lambda: [text for text in browser.execute_script(SHOWN) if "newcomer" in text])
    assert len(browser.execute_script(SHOWN)) == 1
    assert browser.execute_script("return window.stays") is True


SELECTED = "return String(document.getSelection());"
SELECT = """
const cell = [...document.querySelectorAll('#waiting td')].find((one) => one.textContent === 'waits-for-gpus');
document.getSelection().selectAllChildren(cell);
return String(document.getSelection());
"""


def test_selected_text_survives_a_refresh(serve: Callable[..., Page], browser: Any) -> None:
    """Protects a reader who copies from a page that changes each minute; what is new comes once nothing is selected."""
    page = serve()
    sized(browser, 1280, "light")
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}")
    until(lambda: browser.find_element("id", "state").text == "live")
    assert browser.execute_script(SELECT) == "waits-for-gpus"
    with Store.open(page.url, "gres") as store:
        store.record_jobs([job(11, name="newcomer", state="PENDING")])
    page.tick(time.time() + 1)
    until(lambda: "3\nwait" in browser.find_element("id", "health").text)  # the page was refreshed
    assert browser.execute_script(SELECTED) == "waits-for-gpus"
    assert not [text for text in browser.execute_script(SHOWN) if "newcomer" in text]
    browser.execute_script("document.getSelection().removeAllRanges();")
    until(lambda: [text for text in browser.execute_script(SHOWN) if "newcomer" in text])


PLACES = """
const box = (one) => one.getBoundingClientRect();
return [...document.querySelectorAll('#waiting tbody tr')].map((row) => {
  const why = row.querySelector('td.long');
  const others = [...row.cells].filter((cell) => cell !== why && cell.offsetParent !== null);
  const below = box(why).top - Math.max(...others.map((cell) => box(cell).bottom));
  return [below, box(why).width / box(row).width, why.textContent];
});
"""


@pytest.mark.parametrize("width", [390, 880])
def test_the_reason_stands_under_its_row(serve: Callable[..., Page], browser: Any, width: int) -> None:
    """Protects readers of a narrow page: below 900 px a reason has a line of its own, as wide as the table."""
    page = serve()
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}")
    sized(browser, 1280, "light")
    assert all(below < 0 and share < 0.9 for below, share, _ in browser.execute_script(PLACES))
    sized(browser, width, "light")
    found = browser.execute_script(PLACES)
    assert len(found) == 2 and all(below > -1 and share > 0.99 and why for below, share, why in found), found


def test_by_keyboard_alone(serve: Callable[..., Page], browser: Any) -> None:
    """Protects people without a mouse: tabs reach the waiting jobs and one of them, and Enter opens it."""
    page = serve()
    sized(browser, 1280, "light")
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}")
    for goal in ("#waiting", "/jobs/8"):
        for _ in range(12):
            browser.switch_to.active_element.send_keys("\ue004")
            if (browser.switch_to.active_element.get_attribute("href") or "").endswith(goal):
                break
        if goal == "#waiting":
            browser.switch_to.active_element.send_keys("\ue007")
    browser.switch_to.active_element.send_keys("\ue007")
    until(lambda: browser.current_url.endswith("/jobs/8"))
    assert "Why is it waiting?" in browser.find_element("tag name", "main").text


def test_tables_sort_filter_and_say_so(serve: Callable[..., Page], browser: Any) -> None:
    """Protects whoever looks for a job among many: order, a count, "nothing found", ten rows until all are wanted, and
    an address that shows the same to somebody else."""
    page = serve()
    with Store.open(page.url, "gres") as store:
        store.record_jobs([job(100 + n, name=f"many{n}", state="PENDING") for n in range(12)])
    page.tick(time.time() + 1)
    sized(browser, 1280, "light")
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}")
    until(lambda: len(browser.execute_script(SHOWN)) == 10)
    browser.find_element("css selector", "#waiting .more").click()
    assert len(browser.execute_script(SHOWN)) == 14
    head = browser.find_element("css selector", "#waiting th button")
    head.click()
    numbers = [int(text.split("\u25a0 ")[-1][:3]) for text in browser.execute_script(SHOWN)[2:]]
    assert numbers == sorted(numbers) and len(numbers) == 12
    field = browser.find_element("id", "filter")
    field.send_keys("many1")
    until(lambda: browser.find_element("id", "found").text == "3 found")
    assert browser.current_url.endswith("?filter=many1")
    field.send_keys("0x")
    until(lambda: browser.find_element("id", "found").text == "nothing found")
    browser.get(f"http://127.0.0.1:{page.port}/?filter=many11")
    until(lambda: browser.find_element("id", "found").text == "1 found")


def test_a_pointer_reads_the_picture(serve: Callable[..., Page], browser: Any) -> None:
    """Protects whoever wants a figure from the picture: who held what at a moment."""
    from selenium.webdriver import ActionChains

    page = serve()
    sized(browser, 1280, "light")
    browser.get(f"http://127.0.0.1:{page.port}/?token={TOKEN}&span=15m")
    browser.get(f"http://127.0.0.1:{page.port}/?span=15m")
    picture = browser.find_element("css selector", "#gpus figure svg")
    ActionChains(browser).move_to_element_with_offset(picture, int(picture.size["width"] * 0.45), 0).perform()
    said = browser.find_element("css selector", "#gpus .at").text
    assert re.search(r": \d+ GPUs \(.*job 10 trains: 2.*; jobs that did not opt in: 3$", said)
    assert "3\nare held by jobs that did not opt in" in browser.find_element("id", "health").text
    browser.get(f"http://127.0.0.1:{page.port}/?span=all")
    assert browser.find_elements("css selector", "#gpus .rest")
    browser.get(f"http://127.0.0.1:{page.port}/?span=15m&by=user")
    assert "bob" in browser.find_element("css selector", "#gpus .legend").text
