"""The views as pandas frames, for notebooks::

    import ones_db

    ones = ones_db.connect("sqlite:///ones.sqlite")
    ones.scaling(job_id=7).plot(x="gpus", y="samples_per_s")

Needs pandas (``pip install 'ones-db[notebook]'``). Nothing in the database can be changed by it.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from ones_db.errors import StoreError
from ones_db.query import TIMEOUT_S, Reader, view_query
from ones_db.view import Column
from ones_db.views import VIEWS

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_TYPES = {"int": "Int64", "float": "float64", "text": "string", "day": "string", "bool": "boolean"}
"""pandas' type of each kind of column; all take missing values."""


def connect(url: str, *, timeout_s: float = TIMEOUT_S) -> Database:
    """The database at `url`, such as ``sqlite:///build/demo/ones.sqlite`` or ``postgresql://host/ones``, for reading.

    Raises `StoreError` where pandas is missing, and as `Store.open` does.
    """
    return Database(url, timeout_s=timeout_s)


class Database:
    """The views, each as a method that returns a frame.

    Columns are as docs/database.md has them, with pandas' types that know missing values; times are in UTC with their
    time zone (`datetime64`), so the same times as text are left out. Conditions are by name: ``job_id=7``,
    ``user_name="alice"``. A frame is of one moment, and the next may be of a later one.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Use `connect`."""
        _pandas()
        self._reader = Reader(url, timeout_s=timeout_s)

    def close(self) -> None:
        """Let go of the database."""
        self._reader.close()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def job_summary(self, **where: Any) -> DataFrame:
        """One row a job: how long it took, waited and ran, at which sizes, and what resizing did to it."""
        return self.view("job_summary", **where)

    def run_timeline(self, **where: Any) -> DataFrame:
        """One row a run: when, where and at which size."""
        return self.view("run_timeline", **where)

    def block_timeline(self, **where: Any) -> DataFrame:
        """One row a start of a block: when, where and at which size."""
        return self.view("block_timeline", **where)

    def membership_timeline(self, **where: Any) -> DataFrame:
        """One row a membership: which blocks of a job trained together, and what the change cost."""
        return self.view("membership_timeline", **where)

    def scaling(self, **where: Any) -> DataFrame:
        """Throughput, speed-up and efficiencies of jobs at each shape and global batch."""
        return self.view("scaling", **where)

    def resize_cost(self, **where: Any) -> DataFrame:
        """What each finished resize cost, by phase."""
        return self.view("resize_cost", **where)

    def gpu_hours(self, **where: Any) -> DataFrame:
        """GPU-hours by user, account and day."""
        return self.view("gpu_hours", **where)

    def decisions_explained(self, **where: Any) -> DataFrame:
        """What each decision gave each job, and why."""
        return self.view("decisions_explained", **where)

    def what_if(self, **where: Any) -> DataFrame:
        """JCT of completed jobs against the prediction at the requested size."""
        return self.view("what_if", **where)

    def size_limits(self, **where: Any) -> DataFrame:
        """What the training strategy of each job can do at each number of GPUs."""
        return self.view("size_limits", **where)

    def view(self, name: str, **where: Any) -> DataFrame:
        """A view by its name, in its own order: the rows whose columns equal what `where` names.

        Raises `QueryError` where there is no such view or column.
        """
        pandas = _pandas()
        with self._reader.ask(view_query(name, list(where)), where) as answer:
            rows = list(answer.rows)
        kinds = {column.name: column for column in VIEWS[name].columns}
        frame = pandas.DataFrame.from_records(rows, columns=list(answer.columns))
        return pandas.DataFrame(
            {name: _typed(frame[name], kinds[name]) for name in answer.columns if kinds[name].kind != "said"}
        )

    def query(self, sql: str, **parameters: Any) -> DataFrame:
        """The answer to one query of your own, with values for its ``:parameters``; times stay Unix seconds.

        Raises `QueryError` where it cannot be answered.
        """
        with self._reader.ask(sql, parameters) as answer:
            frame = _pandas().DataFrame.from_records(list(answer.rows), columns=list(answer.columns))
        return frame.convert_dtypes()


def _typed(series: Series, column: Column) -> Series:
    if column.kind == "time":
        return _pandas().to_datetime(series.astype("float64"), unit="s", utc=True).dt.as_unit("us")
    return series.astype(_TYPES[column.kind])


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise StoreError("frames need pandas: pip install 'ones-db[notebook]'") from None
    return pandas
