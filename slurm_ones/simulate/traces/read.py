"""Which format a trace's file has, told by its beginning."""

from __future__ import annotations

from pathlib import Path

from slurm_ones.simulate import BadInput
from slurm_ones.simulate.traces.accounting import read_sacct_file
from slurm_ones.simulate.traces.philly import read_philly
from slurm_ones.simulate.traces.swf import FIELDS, read_swf
from slurm_ones.simulate.traces.tables import TABLES
from slurm_ones.simulate.traces.trace import Trace, lines, opened

KNOWN = (
    "sacct --parsable2 with its header line, SWF, Philly's cluster_job_log, Helios' cluster_log.csv, Acme's "
    "trace_*.csv, Alibaba's openb_pod_list_*.csv, and cuts of Philly and Helios"
)


def read_trace(path: Path, partition: str = "") -> Trace:
    """The trace of a file. `partition` is for `sacct` alone. Raises `BadInput`."""
    if path.is_dir() or not path.exists():
        raise BadInput(f"{path}: no such file; give a trace, or none to ask this site's sacct")
    if not path.is_file():
        raise BadInput(f"{path}: is no regular file; write the trace to a file first")
    with opened(path) as file:
        head = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    if head[:1] in (b"[", b"{"):
        return _all_of_it(read_philly(path), partition)
    first = next((text for _, text in lines(path) if text.strip()), "")
    names = {name.strip() for name in first.split(",")}
    for columns, read in TABLES:
        if names.issuperset(columns):
            return _all_of_it(read(path), partition)
    words = first.split()
    if first.lstrip().startswith(";") or (len(words) == len(FIELDS) and words[0].lstrip("-").isdigit()):
        return _all_of_it(read_swf(path), partition)
    if "|" in first:
        return read_sacct_file(path, partition)
    raise BadInput(f"{path}: line 1: {first!r:.100} begins no trace that is known; there are {KNOWN}")


def _all_of_it(trace: Trace, partition: str) -> Trace:
    if partition:
        raise BadInput(f"--partition: {trace.name} is of the format {trace.format}, which names none that Slurm has")
    return trace
