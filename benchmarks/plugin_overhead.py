"""How much longer a submission takes with the Slurm plugin, on real Slurms.

    python benchmarks/plugin_overhead.py --site gres --json plugin.json

In each round, jobs are submitted to a Slurm without the plugin, with sbatch's options, with the controller's checks
too, and with sbatch's filter too, forwards or backwards. Each sbatch is timed alone, by a process in the cluster. A
difference is one of medians of the same round; the median and the spread over rounds are given, and what sbatch itself
computes, which other work on the machine changes less. Jobs are plain, or elastic by their comment or, where sbatch
knows it, by an option. Aim: at most 5 ms.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster import Cluster
from tests.plugin.installed import ETC, SPANK, clear, reconfigure

TIMED = """
import json, os, sys, time
many, *options = sys.argv[1:]
nothing = os.open(os.devnull, os.O_RDWR)
took = []
for _ in range(int(many)):
    begin = time.perf_counter()
    child = os.posix_spawnp("sbatch", ["sbatch", "-H", *options, "--wrap", "true"], os.environ,
                            file_actions=[(os.POSIX_SPAWN_DUP2, nothing, number) for number in (0, 1, 2)])
    _, status, used = os.wait4(child, 0)
    assert status == 0, (options, status)
    took.append((time.perf_counter() - begin, used.ru_utime + used.ru_stime))
print(json.dumps(took))
"""
CONTROLLER, FILTER = "JobSubmitPlugins=lua\n", "CliFilterPlugins=lua\n"
WAYS = {
    "without": ("", ""),
    "options": (SPANK, ""),
    "options and controller": (SPANK, CONTROLLER),
    "options, controller and filter": (SPANK, CONTROLLER + FILTER),
}
"""Lines of plugstack.conf and slurm.conf."""
COMMENT, OPTION = "elastic by comment", "elastic by option"
JOBS = {"plain": (), COMMENT: ("--comment=ones: gpus=1-4",), OPTION: ("--elastic-gpus=1-4",)}


def timed(cluster: Cluster, many: int, options: tuple[str, ...]) -> tuple[float, float]:
    """Milliseconds of one submission, and of them sbatch's processor time: medians."""
    done = cluster.run([cluster.python, "-I", "-c", TIMED, str(many), *options], timeout=300)
    clear(cluster)
    seconds, used = zip(*json.loads(done.stdout), strict=True)
    return 1000 * median(seconds), 1000 * median(used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", choices=("gres", "old"), default="gres")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--submissions", type=int, default=25, help="Of each kind of job, each way, each round.")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds: list[dict[tuple[str, str], tuple[float, float]]] = []
    with Cluster(args.site) as cluster:
        etc = cluster.root / ETC
        before = (etc / "slurm.conf").read_text()
        cluster.run(["slurm-ones", "plugin", "install", "/etc/slurm"], user="root")
        for number in range(args.rounds):
            took: dict[tuple[str, str], tuple[float, float]] = {}
            for way in list(WAYS) if number % 2 == 0 else list(WAYS)[::-1]:
                spank, lines = WAYS[way]
                (etc / "plugstack.conf").write_text(spank)
                (etc / "slurm.conf").write_text(lines + before)
                reconfigure(cluster)
                timed(cluster, 3, ())
                for job, options in JOBS.items():
                    if spank or job != OPTION:
                        took[way, job] = timed(cluster, args.submissions, options)
            rounds.append(took)
            print(f"round {number + 1}/{args.rounds}", file=sys.stderr)
    found = {"site": args.site, "rounds": args.rounds, "submissions": args.submissions, "longer": longer(rounds)}
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def longer(rounds: list[dict[tuple[str, str], tuple[float, float]]]) -> list[dict[str, str | float]]:
    """For each way and kind of job how much longer than without the plugin, over the rounds."""
    rows: list[dict[str, str | float]] = []
    for way, job in rounds[0]:
        like = ("without", COMMENT if job == OPTION else job)
        for_one = [[one[way, job][i] for one in rounds] for i in (0, 1)]
        wall, used = ([one[way, job][i] - one[like][i] for one in rounds] for i in (0, 1))
        row: dict[str, str | float] = {"way": way, "job": job}
        row |= {"ms": median(for_one[0]), "sbatch_processor_ms": median(for_one[1])}
        if way != "without":
            row |= {"longer_ms": median(wall), "least": min(wall), "most": max(wall)}
            row |= {
                "longer_processor_ms": median(used),
                "ratio": median(one[way, job][0] / one[like][0] for one in rounds),
            }
        rows.append({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    return rows


if __name__ == "__main__":
    main()
