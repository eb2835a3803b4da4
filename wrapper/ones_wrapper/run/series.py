"""Series of a run for W&B, TensorBoard, MLflow or Lightning: GPUs, batch, learning rate, speed, pauses and resizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ones_wrapper.process.log import log
from ones_wrapper.protocol import RUN_URL, Report, Throughput

Open = Callable[[str], Any]
"""Function from the job's run id to a logger: a W&B run, a SummaryWriter, the module mlflow with an active run, or an
object with Lightning's `log_metrics`."""
_NAMES = {"gpus": "world", "batch": "batch", "lr_factor": "lr_factor"}


class Series:
    """Writer of rank 0's reports to a logger, opened with the first report. An error of the logger is logged, and ends
    the series only."""

    def __init__(self, opened: Open | None, run_id: Callable[[], str], directory: Path) -> None:
        """`opened` makes the logger; None for no series. The address of the logger's page is written into the job's
        directory `directory`."""
        self._opened, self._run_id, self._directory = opened, run_id, directory
        self._logger: Any = None
        self._now: dict[str, float] = {}

    def report(self, report: Report) -> None:
        """Write the numbers of a report that the series has."""
        found = {name: getattr(report, field) for name, field in _NAMES.items() if hasattr(report, field)}
        self._now |= found
        if isinstance(report, Throughput):
            found["samples_per_s"] = report.samples / max(report.seconds, 1e-9)
        if found:
            self._write(getattr(report, "step", 0), self._now | found)

    def resized(self, step: int, pause_s: float, text: str) -> None:
        """Write a resize with its pause; `text` is the resize's line in the job's log."""
        self._write(step, self._now | {"pause_s": pause_s}, text)

    def _write(self, step: int, numbers: Mapping[str, float], resize: str = "") -> None:
        if self._opened is None:
            return
        try:
            if self._logger is None:
                self._logger = self._opened(self._run_id())
                if hasattr(self._logger, "define_metric"):
                    self._logger.define_metric("ones/step")
                    self._logger.define_metric("ones/*", step_metric="ones/step")
                if url := address(self._logger):
                    (self._directory / RUN_URL).write_text(url)
            write(self._logger, step, {f"ones/{name}": float(value) for name, value in numbers.items()}, resize)
        except Exception as error:
            self._opened = None
            log(f"init: series: {type(error).__name__}: {str(error)[:300]}; nothing more is written to this logger")

    def close(self) -> None:
        """Close the logger in a thread, because another rank writes the series from now on."""
        self._opened = None
        for name in ("finish", "end_run", "close"):
            if end := getattr(self._logger, name, None):
                threading.Thread(target=end, daemon=True).start()
                return


def address(logger: Any) -> str:
    """Return the address of the page for the logger's run; empty if there is no server."""
    if hasattr(logger, "set_tag"):
        server, run = logger.get_tracking_uri(), logger.active_run().info
        return f"{server}/#/experiments/{run.experiment_id}/runs/{run.run_id}" if server.startswith("http") else ""
    url = None if getattr(logger, "offline", False) else getattr(logger, "url", None)
    return url if isinstance(url, str) else ""


def write(logger: Any, step: int, numbers: Mapping[str, float], resize: str) -> None:
    """Write numbers, and a resize's text, for a step. Raises TypeError if the object is no known logger."""
    if hasattr(logger, "add_scalar"):  # TensorBoard
        for name, value in numbers.items():
            logger.add_scalar(name, value, step)
        if resize:
            logger.add_text("ones/resize", resize, step)
    elif hasattr(logger, "define_metric"):  # W&B, whose own step belongs to the script: these rows go with its next one
        logger.log({"ones/step": step, **numbers, **({"ones/resize": resize} if resize else {})}, commit=False)
    elif hasattr(logger, "set_tag"):  # MLflow, which has no series of texts
        logger.log_metrics(dict(numbers), step=step, synchronous=False)
        if resize:
            logger.set_tag(f"ones.resize.{step}", resize, synchronous=False)
    elif hasattr(logger, "log_metrics"):  # Lightning's loggers
        logger.log_metrics(dict(numbers), step)
    else:
        raise TypeError(f"{type(logger).__name__} is no W&B run, SummaryWriter, mlflow, or logger of Lightning's")
