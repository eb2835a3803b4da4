"""Faults on a real Slurm, from a seed: SIGKILL and SIGSTOP of everything, full disks, restarted databases, and people
who cancel, hold, release and change their jobs at the worst moments.

    python benchmarks/real_faults.py --faults 200 --seed 1 --json faults.json

Each is followed by a look at every job, Slurm and the database (tests/endtoend/invariants.py). What explains one after
which something was wrong is left in --log. Needs root on a Debian-like host.

With --guests jobs of blocks grow by guests, which Slurm preempts for others: in one part it cancels them, in the next
it requeues them.

With --systemd each companion is the unit that sites install, on a host with a systemd of its own; what differs from the
unit is in `DROP_IN` (tests/endtoend/fault_site.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster import Cluster, root
from tests.cluster.cli import Progress
from tests.cluster.sites import GRES_GUESTS
from tests.cluster.spec import Bind
from tests.conftest import quick
from tests.endtoend.fault_run import PARTS, FaultOutcome, figures, run
from tests.endtoend.fault_site import small_disks
from tests.endtoend.faults import KINDS
from tests.guide.site import HOST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--torch", type=int, default=0, help="so many of the five elastic jobs train with PyTorch")
    parser.add_argument("--blocks", type=int, default=2, help="so many are jobs of blocks")
    parser.add_argument("--systemd", action="store_true", help="companions are services of systemd")
    parser.add_argument("--guests", action="store_true", help="jobs of blocks grow by guests")
    parser.add_argument("--part", action="append", help=f"by default {', '.join(PARTS)}")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only these")
    parser.add_argument("--moment", action="append", help="only at these gates (tests/endtoend/fault_run.py)")
    parser.add_argument("--log", type=Path, help="where to leave what explains a fault")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    log = args.log or Path(tempfile.mkdtemp(prefix="ones-faults-"))
    parts = tuple(args.part or PARTS)
    started = time.monotonic()

    def tell(fault: FaultOutcome) -> None:
        wrong = "; ".join([*fault.lost, *fault.held, *fault.broken])
        at = f"at {fault.moment}" if fault.reached else f"at any moment ({fault.moment} did not come)"
        at = "at any moment" if fault.moment == "any" else at
        words = f"fault {fault.number + 1}/{args.faults} {fault.seconds:5.1f} s: {fault.kind} {at}, job {fault.job}"
        print(f"{words}{f': {wrong}' if wrong else ''}", file=sys.stderr, flush=True)

    if args.systemd:
        root.build(HOST, Progress())
    with small_disks() as disks:
        cluster = Cluster(GRES_GUESTS if args.guests else "gres").start(
            [Bind(str(disk), place, writable=True) for place, disk in disks.items()]
        )
        quick(cluster)
        faults = run(
            cluster,
            disks,
            args.faults,
            args.seed,
            log,
            tell,
            parts=parts,
            torch=args.torch,
            blocks=args.blocks,
            systemd=args.systemd,
            guests=args.guests,
            only=args.kind or (),
            moments=args.moment or (),
        )
        cluster.stop()
    found = figures(faults, time.monotonic() - started)
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if found["broken"] or found["lost"] or found["held"]:
        sys.exit(f"what explains it is in {log}")


if __name__ == "__main__":
    main()
