"""What the machine has to be for a real Slurm to run on it, and what to do where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from .errors import ClusterError

ELSEWHERE = (
    "What works without it: `slurm-ones simulate` (a simulated Slurm), `make test` (it runs the tests that need no "
    "Slurm, and says what it skips) and slurm-ones itself on a Slurm that you have (see README.md). Or run this as "
    "root in a Debian container or virtual machine (docker run --privileged)."
)
MIRROR_VARIABLE = "SLURM_ONES_MIRROR"
APT_QUIET = {"DEBIAN_FRONTEND": "noninteractive"}


def check() -> None:
    """Raise ClusterError, saying what is missing, unless a box can be started here."""
    if os.geteuid() != 0:
        raise ClusterError(
            "A Slurm of one's own needs root here (it makes namespaces and starts daemons as "
            f"several users). {ELSEWHERE}"
        )
    missing = [name for name in ("pivot_root", "setpriv", "unshare") if not shutil.which(name)]
    if missing:
        raise ClusterError(f"{', '.join(missing)} not found (util-linux). {ELSEWHERE}")
    # A child tries, so that we stay where we are.
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--net", "--uts", "--ipc", "true"], capture_output=True, text=True
    )
    if tried.returncode != 0:
        raise ClusterError(f"This machine does not let root make namespaces ({tried.stderr.strip()}). {ELSEWHERE}")


def debootstrap() -> str:
    """The path of debootstrap, installed first where that can be done."""
    found = shutil.which("debootstrap")
    if found:
        return found
    if not shutil.which("apt-get"):
        raise ClusterError(
            f"Building a root needs debootstrap, and this machine has no apt-get to install it with. {ELSEWHERE}"
        )
    environment = {**os.environ, **APT_QUIET}
    # A machine whose package lists are missing or old needs the update first.
    for command in (["install", "-y", "debootstrap"], ["update"], ["install", "-y", "debootstrap"]):
        done = subprocess.run(["apt-get", "-q", *command], env=environment, capture_output=True, text=True)
        found = shutil.which("debootstrap")
        if found:
            return found
    raise ClusterError(f"apt-get cannot install debootstrap: {done.stderr.strip()}")


def mirror() -> str:
    """The Debian mirror that this machine's own apt uses, or $SLURM_ONES_MIRROR."""
    chosen = os.environ.get(MIRROR_VARIABLE)
    if chosen:
        return chosen
    if shutil.which("apt-get"):
        fields = "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)"
        listed = subprocess.run(["apt-get", "indextargets", "--format", fields], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            origin, label, component, uri = line.split("|", 3)
            # The security archive has another label and lacks the other releases.
            if (origin, label, component) == ("Debian", "Debian", "main"):
                return uri
    raise ClusterError(f"This machine's apt knows no Debian mirror: set {MIRROR_VARIABLE} to one. {ELSEWHERE}")


def proxies() -> dict[str, str]:
    """apt's proxy as the environment variables that debootstrap's downloader understands."""
    found: dict[str, str] = {}
    if not shutil.which("apt-config"):
        return found
    for scheme in ("http", "https"):
        answer = subprocess.run(
            ["apt-config", "shell", "PROXY", f"Acquire::{scheme}::Proxy"], capture_output=True, text=True
        ).stdout.strip()
        if answer.startswith("PROXY="):
            found[f"{scheme}_proxy"] = answer.removeprefix("PROXY=").strip("'\"")
    return found


def debootstrap_script() -> Path:
    """The recipe for any current Debian. A release younger than this machine's debootstrap has no
    recipe of its own name there, and all of them are links to sid's."""
    return Path("/usr/share/debootstrap/scripts/sid")
