"""A run's sizes in others' loggers: the real packages, offline; a test of one that is absent is skipped."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ones_wrapper.protocol import RUN_URL, Batch, Checkpoint, Throughput
from ones_wrapper.run.series import Series
from tests.waiting import until
from tests.wrapper.run.test_records import Run

RUN_ID = "here-7-abcd"
TEXT = "1x1 → 1x2 at step 3: paused 0.5 s"
EXPECTED = {
    "ones/gpus": [(2, 2.0), (3, 2.0), (3, 2.0)],
    "ones/batch": [(2, 8.0), (3, 16.0), (3, 16.0)],
    "ones/pause_s": [(3, 0.5)],
    "ones/samples_per_s": [(2, 4.0)],
}


def written(opened: Callable[[str], Any], directory: Path) -> None:
    """Have a logger opened, and a resize and a change of the batch written."""
    series = Series(opened, lambda: RUN_ID, directory)
    series._now = {"gpus": 2}
    for report in (Throughput(0, 2, 0, 8, 2.0, 8, 1.0), Checkpoint("c", 0, 0, 2, 1, 0.1), Batch(3, 16, 1.5)):
        series.report(report)
    series.resized(3, 0.5, TEXT)


def check(found: dict[str, list[tuple[int, float]]]) -> None:
    assert {name: found[name] for name in EXPECTED} == EXPECTED


def test_tensorboard(tmp_path: Path) -> None:
    """Scalars and the resize's text, as TensorBoard reads them."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    made: list[SummaryWriter] = []

    def opened(run_id: str) -> SummaryWriter:
        made.append(SummaryWriter(str(tmp_path / run_id)))
        return made[0]

    written(opened, tmp_path)
    made[0].close()
    events = EventAccumulator(str(tmp_path / RUN_ID))
    events.Reload()
    check({name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]})
    (text,) = events.Tensors("ones/resize/text_summary")
    assert text.tensor_proto.string_val[0].decode() == TEXT


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics of the run that the script began, and a tag for each resize."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")

    def opened(run_id: str) -> Any:
        mlflow.start_run(run_name=run_id)
        return mlflow

    written(opened, tmp_path)
    run = mlflow.active_run().info.run_id
    mlflow.flush_async_logging()
    mlflow.end_run()
    client = mlflow.MlflowClient()
    check({name: sorted((one.step, one.value) for one in client.get_metric_history(run, name)) for name in EXPECTED})
    tags = client.get_run(run).data.tags
    assert (tags["ones.resize.3"], tags["mlflow.runName"]) == (TEXT, RUN_ID)


def logged(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log, after W&B's header: in blocks of 32 KiB, each piece with
    checksum, length and kind (1: whole, 2 to 4: first, middle, last)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_wandb(tmp_path: Path) -> None:
    """Rows of a run that is written offline: the script's own steps stay what they are."""
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    run = wandb.init(id=RUN_ID, mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    series = Series(lambda run_id: run, lambda: RUN_ID, tmp_path)
    series._now = {"gpus": 2}
    series.report(Throughput(0, 2, 0, 8, 2.0, 8, 1.0))
    run.log({"loss": 1.0}, step=100)
    series.report(Batch(3, 16, 1.5))
    series.resized(3, 0.5, TEXT)
    run.log({"loss": 0.5}, step=101)
    run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")

    def history() -> list[dict[str, str]] | None:
        records = [Record.FromString(data) for data in logged(path.read_bytes())]
        found = [one.history.item for one in records if one.WhichOneof("record_type") == "history"]
        rows = [{item.key or item.nested_key[0]: item.value_json for item in items} for items in found]
        return rows if sum("loss" in row for row in rows) == 2 else None

    # A process of W&B's writes the file.
    rows = until(history, "both rows of the script")
    losses = [float(row["loss"]) for row in rows if "loss" in row]
    found = {name: [float(row[name]) for row in rows if name in row] for name in (*EXPECTED, "ones/step")}
    assert losses == [1.0, 0.5] and found["ones/step"] == [2.0, 3.0]
    assert (found["ones/batch"], found["ones/pause_s"], found["ones/samples_per_s"]) == ([8.0, 16.0], [0.5], [4.0])
    assert [json.loads(row["ones/resize"]) for row in rows if "ones/resize" in row] == [TEXT]


class Plain:
    """A logger with Lightning's method."""

    url = "https://wandb.example.org/lab/runs/7"

    def __init__(self, fails: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails = fails

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if self.fails:
            raise ConnectionError("away")
        self.rows.append((step, metrics))


def test_a_run_writes_what_it_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Protects a script whose logger fails, or is none, from its end; and a run's resize from being left out."""
    logger, opened = Plain(), list[str]()
    run = Run(tmp_path, series=lambda run_id: opened.append(run_id) or logger)
    run.step()
    run.change(0.5)
    run.step()
    assert len(opened) == 1 and logger.rows[0] == (0, {"ones/gpus": 1.0, "ones/batch": 8.0})
    pauses = [(step, row["ones/pause_s"]) for step, row in logger.rows if "ones/pause_s" in row]
    assert pauses == [(1, pytest.approx(0.81))] and logger.rows[-1][1]["ones/gpus"] == 2.0
    assert (tmp_path / RUN_URL).read_text() == logger.url
    run.records.stop_leading("")
    for bad in (Plain(fails=True), object()):
        written(lambda run_id, bad=bad: bad, tmp_path)  # type: ignore[misc]
    said = capsys.readouterr().err
    assert said.count("init: series: ConnectionError: away; nothing more") == 1
    assert said.count("init: series: TypeError: object is no W&B run") == 1
