"""The views in a notebook: types, times, and the example that researchers start from."""

from __future__ import annotations

import ast
import base64
import inspect
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

import ones_db
from ones_db import Database, Store, StoreError, plots
from ones_db.query import QueryError, saved_query
from ones_db.views import VIEWS
from tests.db.make import hello, job, report, run, throughput
from tests.db.test_views import DAY, fill, fill_blocks

EXAMPLE = Path(__file__).parents[2] / "db" / "ones_db" / "examples" / "throughput.ipynb"


def test_every_view_is_a_method_that_says_what_it_tells() -> None:
    for name in VIEWS:
        method = getattr(Database, name)
        assert inspect.getdoc(method) and list(inspect.signature(method).parameters) == ["self", "where"]


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
def test_types_do_not_hang_on_the_rows(store: Store, url: str, full: bool) -> None:
    """Protects a notebook that worked on one database from another that is empty, or has no value in a column."""
    if full:
        fill(store)
        fill_blocks(store)
    types = {
        "int": "Int64",
        "float": "float64",
        "text": "string",
        "day": "string",
        "bool": "boolean",
        "time": "datetime64[us, UTC]",
    }
    with ones_db.connect(url) as ones:
        for name, view in VIEWS.items():
            frame = getattr(ones, name)()
            assert (len(frame) > 0) is full, name
            expected = {column.name: types[column.kind] for column in view.columns if column.kind != "said"}
            assert {column: str(kind) for column, kind in frame.dtypes.items()} == expected, name


def test_times_and_conditions(store: Store, url: str) -> None:
    import pandas  # not while tests are collected: each of pytest's workers would

    fill(store)
    with ones_db.connect(url) as ones:
        (row,) = ones.job_summary(job_id=7, user_name="alice").itertuples()
        assert row.submit_time == pandas.Timestamp(1007, unit="s", tz="UTC")
        assert row.end_time - row.submit_time == pandas.Timedelta(seconds=row.jct_s)
        assert pandas.isna(ones.job_summary(job_id=8)["end_time"].iloc[0])
        assert list(ones.scaling(job_id=7)["speed_up"]) == [1.0, 4.0]
        assert ones.query("SELECT COUNT(*) AS n FROM runs WHERE nodes = :nodes", nodes=2)["n"].tolist() == [1]
        with pytest.raises(QueryError, match="it has cluster, job_id"):
            ones.scaling(job=7)
        with pytest.raises(QueryError, match="begin with SELECT"):
            ones.query("DELETE FROM jobs")


@pytest.mark.slow
def test_plots_by_one_call(store: Store, url: str) -> None:
    """Protects GPUs over time from a job that counts by its run and by its memberships, and from other jobs' rows."""
    fill(store)
    fill_blocks(store)
    with ones_db.connect(url) as ones:
        (held,) = plots.gpus(ones, job_id=10).collections
        tops = held.get_paths()[0].vertices[:, 1]
        assert (tops.min(), tops.max(), set(tops)) == (0.0, 5.0, {0.0, 1.0, 4.0, 5.0})
        axes = plots.learning_curve(ones, 7)
        losses = ones.query(saved_query("learning_curve"), job_id=7)["loss"]
        assert list(axes.lines[0].get_ydata()) == list(losses) and axes.get_title() == "Job 7"
        with pytest.raises(QueryError, match="nothing was measured of job 99"):
            plots.scaling(ones, 99)
        store.record_jobs([job(11)])
        store.record_runs([run(11, 0, 1, 2, start_time=DAY)])
        (held,) = plots.gpus(ones, job_id=11).collections
        times, tops = held.get_paths()[0].vertices.T
        assert tops.max() == 2.0 and 86_400 * (times.max() - times.min()) == pytest.approx(3600.0), "it runs on"
        with Store.open(url, "other") as other:
            fill(other)
        with pytest.raises(QueryError, match="job 7 on gres, other: name one of them by cluster="):
            plots.learning_curve(ones, 7)
        one, *lines = plots.scaling(ones, 7, cluster="other").lines
        assert [len(line.get_xdata()) for line in (one, *lines)] == [2, 1, 1]
        assert len(plots.gpus(ones, job_id=7).collections) == 2


def test_without_pandas(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(StoreError, match=r"ones-db\[notebook\]"):
        ones_db.connect(sqlite_url)


@pytest.mark.slow
def test_the_example_draws_throughput_by_size(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects the notebook that researchers copy: it runs as it is, and its picture is of the job it should be of."""
    with Store.open(sqlite_url, "gres") as store:
        fill(store)
        store.record_runs([run(8, 1, 1, 2, start_time=9e5), run(8, 2, 1, 4, start_time=9.5e5)])
        for restart, seconds in ((1, 0.5), (2, 0.25)):
            reported = [throughput(n, seconds=seconds) for n in (2, 3)]
            report(store, 8, restart, hello=hello(), throughput=reported, offset=9, number=3)
    monkeypatch.setenv("ONES_DATABASE", sqlite_url)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
    notebook.cells.append(nbformat.v4.new_code_cell("[line.get_xydata().tolist() for line in axes.lines]"))
    place = {"metadata": {"path": tmp_path}}
    with tempfile.TemporaryDirectory() as short:
        # Jupyter chooses ports before it opens them, and another process may take one meanwhile: so by files.
        files = Config(KernelManager={"transport": "ipc", "ip": f"{short}/kernel"})
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place, config=files).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert [base64.b64decode(picture)[:4] for picture in pictures] == [b"\x89PNG"]
    ideal, measured = ast.literal_eval(outputs[-1].data["text/plain"])
    assert ideal == [[2.0, 128.0], [4.0, 256.0], [8.0, 512.0]]
    assert measured == [[2.0, 128.0], [4.0, 256.0], [8.0, 128.0]]
