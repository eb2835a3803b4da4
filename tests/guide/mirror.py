"""What pip needs on the hosts, which have no network: wheels for their Python, fetched once by ours."""

from __future__ import annotations

import configparser
import hashlib
import re
import subprocess
import sys
from pathlib import Path

from tests.cluster import ClusterError, paths, root
from tests.guide.site import HOST

PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
BUILD = ("setuptools>=68", "wheel")
DISTRIBUTIONS = ("wrapper", "db", ".")
EXTRAS = ("migrate", "postgres", "metrics")
INSIDE = "/mirror"
PIP_CONF = f"[global]\nno-index = true\nfind-links = {INSIDE}\ndisable-pip-version-check = true\n"


def _python() -> str:
    """The hosts' Python, such as 3.14."""
    names = (root.folder(HOST) / "usr/bin").glob("python3.[0-9]*")
    return max((path.name.removeprefix("python") for path in names if path.name[-1].isdecimal()), key=_newest)


def _newest(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _requirements() -> list[str]:
    """What the three distributions need from elsewhere, with the extras that the guide installs."""
    lines: list[str] = []
    for name in DISTRIBUTIONS:
        setup = configparser.ConfigParser()
        setup.read(paths.REPOSITORY / name / "setup.cfg")
        lines += setup["options"]["install_requires"].splitlines()
        if setup.has_section("options.extras_require"):
            extras = setup["options.extras_require"]
            lines += [line for extra in EXTRAS for line in extras.get(extra, "").splitlines()]
    ours = ("", "ones-db", "ones-wrapper")
    return [line for line in lines if re.split(r"[\[=]", line)[0] not in ours and "python_version <" not in line]


def folder() -> Path:
    """The folder of wheels on this machine, filled first where it is not. Raises ClusterError where it cannot be."""
    wanted = list(dict.fromkeys([*BUILD, *_requirements()]))
    python = _python()
    key = hashlib.sha256("\n".join([python, *wanted]).encode()).hexdigest()[:10]
    place = paths.cache() / "wheels" / key
    if not place.is_dir():
        partial = place.with_name(f"{key}.partial")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(partial)]
        command += ["--implementation", "cp", "--python-version", python]
        command += [f"--platform={platform}" for platform in PLATFORMS]
        done = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"no wheels for the hosts' Python {python}: {done.stderr.strip()[-2000:]}")
        partial.rename(place)
    return place


def ready() -> Path:
    """Where an environment with all of this installed is kept, if it is there."""
    return folder() / "environment"
