"""A fault run as a page: the same run, everything in it as text, and a real browser that goes through its time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment

from tests.faults.plan import FaultPlan
from tests.faults.recording import FAULT, PHASE, VIOLATION, Recorder, Recording
from tests.faults.replay_page import page
from tests.faults.run import Result, run
from tests.show.test_browser import CONTRAST, driver, installed, picture, sized

SEED = 512984238
"""A block that trained was once requeued while the others were put into our hold, and stayed in it with them."""
HOSTILE = '</script><script>document.title = "taken"</script><b>\x1b[2J'


@pytest.fixture(scope="module")
def replayed() -> tuple[Result, Recording, str]:
    """A run in which something was reported that must never be, and its page."""
    recorders: list[Recorder] = []

    def begun(fault_run: Any) -> None:
        recorders.append(Recorder(fault_run))
        fault_run.world.timeline.after(100.0, lambda: fault_run.checker.report(HOSTILE))

    plan = FaultPlan.with_blocks(SEED)
    result = run(plan, begun=begun)
    return result, recorders[0].recording, page(plan, result, recorders[0].recording)


@pytest.mark.nightly
@pytest.mark.slow
def test_looking_changes_nothing(replayed: tuple[Result, Recording, str]) -> None:
    """Protects what a seed stands for: with a page it is the same run as without."""
    result, recording, _ = replayed
    alone = run(FaultPlan.with_blocks(SEED))
    assert (result.kinds, result.resizes) == (alone.kinds, alone.resizes)
    assert [what for what in result.violations if HOSTILE not in what] == list(alone.violations) == []
    assert sum(event.kind == FAULT for event in recording.events) == sum(alone.kinds.values())
    assert any(event.kind == PHASE for event in recording.events)
    for track in [*recording.jobs.values(), *recording.others.values()]:
        assert [stood.time for stood in track] == sorted({stood.time for stood in track})
    # Those of the plan, and the rigid job that arrives.
    assert len(recording.jobs) >= len(FaultPlan.with_blocks(SEED).jobs)
    assert any(stood.gpus for track in recording.jobs.values() for stood in track)
    assert any(stood.state == "down" for stood in recording.others["companion on host-0"])


class Scripts(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script"
        self.found += [""] if self._inside else []
        assert tag not in ("link", "img") or dict(attrs).get("href", "").startswith("data:")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.found[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


@pytest.mark.slow
def test_all_of_it_is_text_and_in_one_file(replayed: tuple[Result, Recording, str]) -> None:
    """Protects the reader's browser from what jobs and people wrote, and the page from needing a network."""
    _, recording, text = replayed
    scripts = Scripts(text).found
    assert len(scripts) == 2 and "\x1b" not in text and "http://" not in scripts[1] and "https:" not in text
    told = json.loads(scripts[0])
    assert len(told["events"]) == len(recording.events) and len(told["x"]) == len(told["times"])
    assert any(kind == VIOLATION and "</script>" in words for _, kind, words in told["events"])
    assert Environment(autoescape=True).from_string("{{ x }}").render(x="<b>") in text


@pytest.fixture
def browser() -> Iterator[Any]:
    if why := installed():
        pytest.skip(why)
    found = driver()
    yield found
    found.quit()


@pytest.mark.nightly
@pytest.mark.slow
def test_in_a_browser(replayed: tuple[Result, Recording, str], browser: Any, tmp_path: Path) -> None:
    """Protects whoever debugs: keys go through time, at every width, light and dark, without an error."""
    first = next(event for event in replayed[1].events if event.kind == FAULT and event.time > 0.0)
    file = tmp_path / "run.html"
    file.write_text(replayed[2], encoding="utf-8")
    for width, scheme in ((360, "light"), (1280, "dark"), (3840, "light")):
        sized(browser, width, scheme)
        browser.get(file.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(CONTRAST) == []
        picture(browser, f"fault-run-{width}-{scheme}.png")
    assert browser.title.startswith(f"Fault run {SEED}")

    def press(key: str) -> str:
        browser.switch_to.active_element.send_keys(key)
        return str(browser.find_element("id", "clock").text)

    # It opens where something is wrong.
    assert browser.find_element("id", "clock").text == "100.0 s"
    assert "</script>" in browser.find_element("id", "said").text
    assert press("\ue011") == "0.0 s" and "held" in browser.find_element("id", "jobs").text
    later = press("\ue014")
    assert later not in ("0.0 s", "100.0 s") and press("\ue012") == "0.0 s"
    assert press("f") == f"{first.time:.1f} s" and first.text in browser.find_element("id", "said").text
    assert press("v") == "100.0 s"
    cursor = browser.find_element("css selector", ".cursor").get_attribute("x1")
    assert 0.0 < float(cursor) < 1000.0
    browser.find_element("id", "slider").send_keys("\ue010")
    assert "ended" in browser.find_element("id", "jobs").text
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
