"""The Standard Workload Format of the Parallel Workloads Archive: 18 numbers a line, `;` before header and comments.

Feitelson et al., "Experience with using the Parallel Workloads Archive", JPDC 74(10), 2014. A processor is read as a
GPU: the format knows none.
"""

from __future__ import annotations

import re
from pathlib import Path

from slurm_ones.simulate.traces.trace import Collector, Trace, TraceJob, bad, lines, number

FIELDS = (
    "job number", "submit time", "wait time", "run time", "allocated processors", "average CPU time", "used memory",
    "requested processors", "requested time", "requested memory", "status", "user", "group", "executable", "queue",
    "partition", "preceding job", "think time",
)  # fmt: skip
PARTIAL = (2, 3, 4)
"""Status of a line that is one stretch of a job which has a line of its own besides."""
_HEADER = re.compile(r";\s*(MaxNodes|MaxProcs)\s*:\s*(\d{1,9})")


def read_swf(path: Path) -> Trace:
    """The trace of a file; raises `BadInput`."""
    found = Collector(path.name, "SWF")
    header: dict[str, int] = {}
    for line, text in lines(path):
        if not text.strip() or text.lstrip().startswith(";"):
            if match := _HEADER.match(text.lstrip()):
                header[match[1]] = int(match[2])
            continue
        words = text.split()
        if len(words) != len(FIELDS):
            bad(path, line, f"has {len(words)} fields, not {len(FIELDS)}", "a line of SWF has 18 numbers")
        values = [number(path, line, FIELDS[i], word) for i, word in enumerate(words)]
        job, submitted, wait, run, allocated, _, _, requested, limit, _, status = values[:11]
        if int(status) in PARTIAL:
            found.leave_out("part of a job that has a line of its own")
            continue
        gpus = int(allocated if allocated > 0 else requested)
        started = submitted + wait if wait >= 0 else None
        one = TraceJob(f"{job:.0f}", submitted, started, run, gpus, 0, max(limit, 0.0))
        found.add(one, f"{path.name}: line {line}")
    nodes, most = header.get("MaxNodes", 0), header.get("MaxProcs", 0)
    each = most // nodes if nodes and most and most % nodes == 0 else 0
    return found.trace(notes=["each processor is read as a GPU: SWF knows no GPUs"], gpus_per_node=each)
