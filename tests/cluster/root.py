"""Build the root of a site: a small Debian with that site's Slurm in it.

A root is built in `<its folder>.partial`, one stamped step after the other, and renamed when it is
whole; so an interrupted build goes on where it was, and a folder without `.partial` can be trusted.
Downloaded packages are kept apart, so that even the first step is quick to repeat.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import host, paths
from .errors import ClusterError
from .report import Report, step
from .sites import USERS, Site

STAMPS = ".slurm-ones"
VERSION = "slurm-version"

# Not being asked for a sync after every file halves the time of the install; what nobody reads
# here is left out.
DPKG_CONFIGURATION = """\
force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
"""


def folder(site: Site) -> Path:
    """Where the site's root is, or will be."""
    return paths.roots() / f"{site.base or site.name}-{site.recipe()}"


def slurm_version(site: Site) -> str:
    """The Slurm that the built root has, such as 26.05.5."""
    return (folder(site) / STAMPS / VERSION).read_text().strip()


def is_built(site: Site) -> bool:
    return folder(site).is_dir()


def build(site: Site, report: Report) -> Path:
    """Build the site's root unless it is there, and return it."""
    final = folder(site)
    if final.is_dir():
        return final
    host.check()
    final.parent.mkdir(parents=True, exist_ok=True)
    with locked(final.with_name(final.name + ".lock"), report):
        if final.is_dir():
            return final
        partial = final.with_name(final.name + ".partial")
        steps: list[tuple[str, Callable[[Site, Path, Report], None]]] = [
            ("packages", _packages),
            ("users", _users),
            ("version", _version),
            ("trim", _trim),
        ]
        for name, work in steps:
            stamp = partial / STAMPS / name
            if stamp.exists():
                continue
            with step(report, f"{site.name}: {name}"):
                work(site, partial, report)
            stamp.parent.mkdir(exist_ok=True)
            stamp.touch()
        partial.rename(final)
    return final


@contextmanager
def locked(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock of one thing being built; say so when somebody else has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.note("another process is building this; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _packages(site: Site, root: Path, report: Report) -> None:
    # debootstrap cannot go on in a half-made root; with the packages kept, starting anew is cheap.
    if root.exists():
        shutil.rmtree(root)
    configuration = root / "etc/dpkg/dpkg.cfg.d/slurm-ones"
    configuration.parent.mkdir(parents=True)
    root.chmod(0o755)
    configuration.write_text(DPKG_CONFIGURATION)
    paths.debs().mkdir(parents=True, exist_ok=True)
    log = root.with_name(root.name + ".log")
    # In namespaces of its own, and gone when we are: it mounts /proc in the root, and were we killed it
    # would go on working in a root that the next builder thinks is its own.
    command = ["setpriv", "--pdeathsig", "KILL"]
    command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", host.debootstrap()]
    command += ["--variant=minbase", f"--cache-dir={paths.debs()}"]
    command += [f"--include={','.join(site.packages)}", site.suite, str(root), host.mirror()]
    command += [str(host.debootstrap_script())]
    environment = {**os.environ, **host.APT_QUIET, **host.proxies(), "LC_ALL": "C"}
    last = ""
    with log.open("w") as sink, _piped(command, environment) as process:
        for line in process.stdout or ():
            sink.write(line)
            last = line.strip() or last
            if line.startswith("I: ") and "Validating" not in line:
                report.detail(line.removeprefix("I: ").strip())
    if process.returncode != 0:
        raise ClusterError(f"debootstrap failed: {last}\nAll it said is in {log}")


@contextmanager
def _piped(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A command whose output is read line by line, and which does not outlive the reader."""
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _chroot(root: Path, *command: str) -> str:
    done = subprocess.run(["chroot", str(root), *command], capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)} failed in {root}: {done.stderr.strip()}")
    return done.stdout


def _users(site: Site, root: Path, report: Report) -> None:
    known = (root / "etc/passwd").read_text()
    for name, uid in USERS.items():
        if f"\n{name}:" not in known:
            options = ("--no-create-home", "--shell", "/bin/bash", "--user-group")
            _chroot(root, "useradd", "--uid", str(uid), *options, name)
        (root / "home" / name).mkdir(exist_ok=True)
    for path in ("scratch", "opt/pyslurm", "etc/slurm", "var/log/slurm"):
        (root / path).mkdir(parents=True, exist_ok=True)


def _version(site: Site, root: Path, report: Report) -> None:
    shown = _chroot(root, "dpkg-query", "--show", "--showformat=${Version}", "slurm-client")
    (root / STAMPS).mkdir(exist_ok=True)
    # The Debian revision (26.05.5-1) says nothing about Slurm.
    (root / STAMPS / VERSION).write_text(shown.split("-")[0])


def _trim(site: Site, root: Path, report: Report) -> None:
    """Remove what only an installer needs."""
    for path in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
        shutil.rmtree(root / path, ignore_errors=True)
