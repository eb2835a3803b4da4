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
from itertools import product
from pathlib import Path

from ones_db import Store
from slurm_ones.cli.jobs import reader
from slurm_ones.config import Settings
from slurm_ones.show.table import JobOrder
from slurm_ones.show.window import TopApp
from tests.faults.plan import FaultPlan
from tests.faults.replay_page import write_replay
from tests.show.test_browser import driver, installed, sized

PORT = 8699
BUSY_S = 45.0
"""From the demo's start."""
WIDTHS = (1440, 1280, 800, 390)
SEED = 512984238
"""A fault run with changes of blocks and faults of many kinds."""


def terminal(url: str, cluster: str, picture: Path) -> None:
    """`slurm-ones top` as it looks in a terminal of 120 columns, as SVG."""

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
            await app.workers.wait_for_complete()
            await pilot.pause()
            drawn = app.export_screenshot(title="slurm-ones top")
            # Fonts from the network: the reader's own will do.
            picture.write_text(re.sub(r"@font-face\s*{[^}]*}", "", drawn))

    asyncio.run(main())


def page(url: str, job_id: int, folder: Path) -> None:
    """The live page and a job's in a Chromium, as `page-cluster-1280-light.webp` and the like."""
    command = [sys.executable, "-m", "slurm_ones.cli", "web", "--port", str(PORT), "--token", "t", "--database", url]
    with subprocess.Popen(command) as server:
        try:
            for _ in range(60):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{PORT}/static/icon.svg", timeout=2)
                    break
                except OSError:
                    time.sleep(0.5)
            browser = driver()
            for path, name in (("", "page-cluster"), (f"jobs/{job_id}", "page-job")):
                for width, scheme in product(WIDTHS, ("light", "dark")):
                    sized(browser, width, scheme)
                    browser.get(f"http://127.0.0.1:{PORT}/{path}?token=t")
                    time.sleep(1.0)
                    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": 70})
                    (folder / f"{name}-{width}-{scheme}.webp").write_bytes(base64.b64decode(shot["data"]))
            browser.quit()
        finally:
            server.terminate()


def fault_run(folder: Path) -> None:
    """The page of a fault run, in the middle of it."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "run.html"
        write_replay(file, FaultPlan.with_blocks(SEED))
        browser = driver()
        browser.set_window_size(1280, 1100)
        browser.get(file.as_uri())
        for _ in range(8):
            browser.find_element("id", "fault").click()
        browser.save_screenshot(str(folder / "fault-run.png"))
        browser.quit()


def main(folder: str) -> None:
    if why := installed():
        sys.exit(why)
    demo(Path(folder))
    fault_run(Path(folder))


def demo(folder: Path) -> None:
    """Draw those of page and terminal while `slurm-ones demo` runs and many of its jobs train."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "slurm_ones.cli", "demo", "--no-browser", f"--directory={name}/demo"]
        with subprocess.Popen(command) as running:
            try:
                time.sleep(BUSY_S)
                url = f"sqlite:///{name}/demo/ones.sqlite"
                with Store.open(url, "", read_only=True) as store:
                    cluster, jobs = store.cluster, store.job_summaries()
                terminal(url, cluster, folder / "top.svg")
                page(url, max(jobs, key=lambda job: job.resizes).job_id, folder)
            finally:
                running.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main(*sys.argv[1:])
