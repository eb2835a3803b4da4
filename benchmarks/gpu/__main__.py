"""Runs the checks that this machine's GPUs can show, prints a table and writes it as JSON.

    python -m benchmarks.gpu --json gpu.json                 # all
    python -m benchmarks.gpu G4 G14                          # these
    python -m benchmarks.gpu --rehearse                      # the checks' code on the CPU: no check is run
    python -m benchmarks.gpu --table                         # the table of docs/gpu.md

Ends with 1 if a check failed. Without a GPU it lists what would run, and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.harness import PATIENCE, TOP, Check, Result, Site, paths, run_all

ALONE_MIN, SEVERAL_MIN = 8.0, 40.0
"""How long all may take with one GPU, and with more."""
_ASK = """
import json, os
from ones_wrapper.devices.defaults import set_defaults
set_defaults(os.environ)
import torch
from ones_wrapper.devices.choice import visible
count, said = visible()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if count else ""
cards = sorted({torch.cuda.get_device_name(n) for n in range(count)})
print(json.dumps(dict(torch=torch.__version__, nccl=nccl, gpus=count, cards=cards, said=said)))
"""


def machine() -> dict[str, Any]:
    """What a process of its own finds here; `gpus` is 0 if torch is missing, with why as `said`."""
    done = subprocess.run([sys.executable, "-c", _ASK], cwd=TOP, env=paths(os.environ), capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or "it ended without a word").splitlines()[-1]
        return {"torch": "", "nccl": "", "gpus": 0, "cards": [], "said": f"{sys.executable}: {why}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def docs_table(checks: Sequence[Check]) -> str:
    """As docs/gpu.md has it."""
    rows = [f"| {one.name} | {one.shows} | {one.expected} | {one.by_hand} |" for one in checks]
    return "\n".join(["| check | what it shows | expected | by hand, because |", "| --- | --- | --- | --- |", *rows])


def line(check: Check, result: Result) -> str:
    """One check, and what was seen."""
    seen = "; ".join(f"{one['what']} {number(one['value'])}" for one in result.seen)
    words = result.why.strip().splitlines()
    why = f" ({words[0] if result.good else words[-1]})" if words else ""
    return f"{check.name:4} {result.state:9} {result.seconds:5.1f} s  {check.shows}: {seen or check.expected}{why}"


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CHECK", help="by default all")
    parser.add_argument("--json", type=Path, metavar="F", help="write the results there")
    parser.add_argument("--minutes", type=float, help=f"{ALONE_MIN:g}, with several GPUs {SEVERAL_MIN:g}")
    parser.add_argument("--rehearse", action="store_true", help="run the checks' code on the CPU")
    parser.add_argument("--table", action="store_true", help="print the table of the documents")
    args = parser.parse_args(arguments)
    if args.table:
        print(docs_table(CHECKS))
        return 0
    if unknown := set(args.names) - {check.name for check in CHECKS}:
        parser.error(f"no such check: {', '.join(sorted(unknown))}")
    checks = [check for check in CHECKS if not args.names or check.name in args.names]
    by_name = {check.name: check for check in checks}
    found = machine()
    if found["gpus"]:
        print(f"{found['gpus']} × {', '.join(found['cards'])}, torch {found['torch']}, NCCL {found['nccl']}")
    else:
        print(f"no GPU (torch {found['torch'] or 'is missing'}{'; ' * bool(found['said'])}{found['said']}); with one:")
    minutes = args.minutes or (ALONE_MIN if found["gpus"] < 2 else SEVERAL_MIN) * (PATIENCE if args.rehearse else 1)
    site = Site(found["gpus"], args.rehearse, until=time.monotonic() + 60 * minutes)
    results = run_all(checks, site, lambda one: print(line(by_name[one.name], one), flush=True))
    ran = [one for one in results if one.state != "skipped"]
    bad = [one for one in results if not one.good]
    for one in bad:
        print(f"\n{one.name} {one.state}:\n{one.why}")
    count = 0 if args.rehearse else len(ran)
    rehearsed = f" (a rehearsal on the CPU: the code of {len(ran)} checks ran)" if args.rehearse else ""
    print(f"\n{count} checks run{rehearsed}, {len(bad)} not as expected")
    if args.json:
        written = {**found, "rehearsal": args.rehearse, "run": count, "bad": len(bad)}
        text = json.dumps({**written, "checks": [asdict(one) for one in results]}, indent=1)
        args.json.write_text(text + "\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
