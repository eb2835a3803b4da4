"""The pictures of page and terminal in the documents, of a demo that is busy, and of a fault run:
`python -m tests.pictures docs/img`. Pages are drawn at each width and in both themes.
"""

from __future__ import annotations

import asyncio
import base64
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from textual.widgets import DataTable

from ones_db import Store
from slurm_ones.cli.jobs import reader
from slurm_ones.config import Settings
from slurm_ones.show.table import JobOrder
from slurm_ones.show.window import TopApp
from tests.faults.plan import FaultPlan
from tests.faults.replay_page import write_replay
from tests.show.test_browser import driver, installed, sized

PORT = 8699
BEGUN_S, BUSY_S = 20.0, 40.0
"""From the demo's start: when its database is there, and when most of its jobs train."""
WIDTHS = (1440, 1280, 800, 390)
HIGH = 1000
"""Height of a picture, about."""
ENDS = """
const ends = [...document.querySelectorAll("main section, main tbody tr:not([hidden])")]
  .filter((e) => e.offsetHeight > 0).map((e) => e.getBoundingClientRect().bottom + window.scrollY);
const near = ends.reduce((a, b) => (Math.abs(b - arguments[0]) < Math.abs(a - arguments[0]) ? b : a), 0);
return [document.documentElement.clientWidth, Math.ceil(near)];
"""
SEED = 512984238
"""A fault run with changes of blocks and faults of many kinds."""


def terminal(url: str, cluster: str, job_id: int, picture: Path) -> None:
    """`slurm-ones top` as it looks in a terminal of 120 columns with this job selected, as SVG."""

    def opened() -> Store:
        return Store.open(url, cluster, read_only=True)

    async def main() -> None:
        app = TopApp(
            Settings(database=url, cluster=cluster), reader(Settings(database=url), named=True), opened,
            JobOrder(every_state=True), 60.0,
        )  # fmt: skip
        async with app.run_test(size=(120, 32)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            table = app.query_one(DataTable)
            table.move_cursor(row=table.get_row_index(str(job_id)))
            await pilot.pause()
            await app.workers.wait_for_complete()
            await pilot.pause()
            drawn = app.export_screenshot(title="slurm-ones top")
            # Fonts from the network: the reader's own will do.
            picture.write_text(re.sub(r"@font-face\s*{[^}]*}", "", drawn))

    asyncio.run(main())


@contextmanager
def served(url: str) -> Iterator[str]:
    """The address of the live page of this database."""
    command = [sys.executable, "-m", "slurm_ones.cli", "web", "--port", str(PORT), "--token", "t", "--database", url]
    with subprocess.Popen(command) as server:
        try:
            for _ in range(60):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/static/icon.svg", timeout=2)
                    break
                except OSError:
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{PORT}"
        finally:
            server.terminate()


def drawn(browser: Any, picture: Path) -> None:
    """What the browser shows, down to the end of a section or row that is nearest to `HIGH` pixels."""
    width, height = browser.execute_script(ENDS, HIGH)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    asked = {"format": "webp", "quality": 70, "captureBeyondViewport": True, "clip": clip}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", asked)
    picture.write_bytes(base64.b64decode(shot["data"]))


def page(browser: Any, address: str, name: str, folder: Path) -> None:
    """A page at each width and in both themes, as `page-cluster-1280-light.webp` and the like."""
    browser.get(f"{address}?token=t")
    time.sleep(1.0)
    for width, scheme in product(WIDTHS, ("light", "dark")):
        sized(browser, width, scheme)
        time.sleep(0.1)
        drawn(browser, folder / f"{name}-{width}-{scheme}.webp")


def fault_run(browser: Any, folder: Path) -> None:
    """The page of a fault run, in the middle of it."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "run.html"
        write_replay(file, FaultPlan.with_blocks(SEED))
        sized(browser, 1280, "light")
        browser.get(file.as_uri())
        for _ in range(8):
            browser.find_element("id", "fault").click()
        drawn(browser, folder / "fault-run.webp")


def demo(browser: Any, folder: Path) -> None:
    """Draw those of page and terminal while `slurm-ones demo` runs and many of its jobs train."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "slurm_ones.cli", "demo", "--no-browser", f"--directory={name}/demo"]
        url, begun = f"sqlite:///{name}/demo/ones.sqlite", time.monotonic()
        with subprocess.Popen(command) as running:
            try:
                time.sleep(BEGUN_S)
                with served(url) as address:
                    time.sleep(begun + BUSY_S - time.monotonic())
                    with Store.open(url, "", read_only=True) as store:
                        cluster, jobs = store.cluster, store.job_summaries()
                    page(browser, f"{address}/", "page-cluster", folder)
                    job = max((job for job in jobs if job.running), key=lambda job: job.resizes)
                    page(browser, f"{address}/jobs/{job.job_id}", "page-job", folder)
                terminal(url, cluster, job.job_id, folder / "top.svg")
            finally:
                running.send_signal(signal.SIGINT)


def main(folder: str) -> None:
    if why := installed():
        sys.exit(why)
    browser = driver()
    try:
        demo(browser, Path(folder))
        fault_run(browser, Path(folder))
    finally:
        browser.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
