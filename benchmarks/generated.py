"""Options of the benchmarks that simulate generated jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurm_ones.simulate.workloads.generate import MIXES


def parser_of(doc: str | None, *, seeds: int, jobs: int, gpus: int) -> argparse.ArgumentParser:
    """Which jobs, on how large a cluster, and where the figures go; with these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help="workloads, each of a seed from 0 on")
    parser.add_argument("--jobs", type=int, default=jobs, metavar="N", help="jobs of each")
    parser.add_argument("--gpus", type=int, default=gpus, metavar="N", help="GPUs of the cluster, 4 a node")
    parser.add_argument("--mix", choices=sorted(MIXES), default="philly", help="kinds of jobs")
    return parser
