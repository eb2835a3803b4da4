"""Programs that tests run and that Debian packages: installed where that can be done, as in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

APT = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10")
APT += ("-o", "DPkg::Lock::Timeout=120")


def installed(programs: Sequence[str], packages: Sequence[str]) -> str:
    """Why these programs are not here, empty where they are; installs the packages where that can be done."""
    if all(shutil.which(program) for program in programs):
        return ""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return f"no {' and '.join(packages)} here, and installing them needs root on Debian"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # All that needs the network comes first: what unpacks is not cut short.
    install = ["install", "-y", "--no-install-recommends", *packages]
    for command in (["update"], [*install, "--download-only"], [*install, "--no-download"]):
        try:
            done = subprocess.run(
                ["apt-get", "-q", *APT, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=None if "--no-download" in command else 180,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {' '.join(command)}: no end within 180 s"
        if done.returncode != 0 and command != ["update"]:
            return f"apt-get cannot install {', '.join(packages)}: {done.stderr[-300:]}"
    return ""
