"""Build a Debian package of the companion from a release: a virtual environment, units, the account and man pages.

    python .ci/release.py dist && python3 .ci/deb.py dist

It runs on the Debian that the package is for, whose Python it uses, with python3-venv and dpkg-dev. pip gets what
slurm-ones requires from where its own settings say, such as PIP_FIND_LINKS.
"""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = "opt/slurm-ones"
UNITS = ("slurm-ones.service", "slurm-ones-maintain.service", "slurm-ones-maintain.timer", "slurm-ones-web.service")
CONTROL = """Package: slurm-ones
Version: {version}
Architecture: {machine}
Maintainer: The slurm-ones developers <root@localhost>
Depends: python3 (>= {python}~), python3 (<< {next}~), systemd
Section: admin
Priority: optional
Description: Elastic training on plain Slurm: the companion
 It learns how fast training jobs run at each size, and resizes those that opted in.
"""
SCRIPTS = {
    "postinst": """#!/bin/sh
set -e
systemd-sysusers slurm-ones.conf
systemd-tmpfiles --create slurm-ones.conf
[ ! -d /run/systemd/system ] || systemctl daemon-reload
[ -z "$2" ] || echo "slurm-ones: stop it, run 'slurm-ones db upgrade', and start it again"
""",
    "prerm": """#!/bin/sh
set -e
[ "$1" != remove ] || [ ! -d /run/systemd/system ] || systemctl disable --now slurm-ones slurm-ones-maintain.timer
""",
    # What Python compiled later is no file of the package.
    "postrm": """#!/bin/sh
set -e
[ "$1" = upgrade ] || rm -rf /opt/slurm-ones
[ ! -d /run/systemd/system ] || systemctl daemon-reload
[ "$1" != purge ] || rm -rf /etc/slurm-ones /var/lib/slurm-ones /var/spool/slurm-ones
""",
}


def environment(stage: Path, dist: Path) -> Path:
    """Make the environment below the stage, as it will be at its own place."""
    home = stage / HOME
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [home / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", f"--find-links={dist}"]
    subprocess.run([*pip, "slurm-ones[postgres,metrics]"], check=True)
    subprocess.run([home / "bin/python", HERE / "man.py", stage / "man"], check=True)
    subprocess.run([home / "bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", "pip"], check=True)
    for file in (home / "pyvenv.cfg", *(home / "bin").iterdir()):
        if file.is_file() and not file.is_symlink():
            file.write_text(file.read_text().replace(str(home), f"/{HOME}"))
    for left in home.rglob("__pycache__"):
        shutil.rmtree(left)
    # Lines of a traceback name the place where it runs.
    compiled = [sys.executable, "-m", "compileall", "-q", "-s", stage, "-p", "/", home / "lib"]
    subprocess.run(compiled, check=False, stdout=subprocess.DEVNULL)
    return home


def system_files(stage: Path, home: Path) -> None:
    """Put units, account, settings, man pages and the command where the system looks for them."""
    (units,) = home.glob("lib/python*/site-packages/slurm_ones/service/units")
    places = {name: f"usr/lib/systemd/system/{name}" for name in UNITS}
    places |= {
        f"{kind}.conf": f"usr/lib/{kind.partition('.')[0]}.d/slurm-ones.conf" for kind in ("sysusers.d", "tmpfiles.d")
    }
    places["config.toml"] = "etc/slurm-ones/config.toml"
    for name, place in places.items():
        (stage / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(units / name, stage / place)
    manuals = stage / "usr/share/man/man1"
    manuals.mkdir(parents=True)
    for page in (stage / "man").iterdir():
        (manuals / f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
    shutil.rmtree(stage / "man")
    (stage / "usr/bin").mkdir()
    (stage / "usr/bin/slurm-ones").symlink_to(f"/{HOME}/bin/slurm-ones")


def control(stage: Path, version: str) -> None:
    """Write what dpkg reads."""
    folder, (major, minor) = stage / "DEBIAN", sys.version_info[:2]
    folder.mkdir()
    machine = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True
    ).stdout.strip()
    python, after = f"{major}.{minor}", f"{major}.{minor + 1}"
    (folder / "control").write_text(CONTROL.format(version=version, machine=machine, python=python, next=after))
    (folder / "conffiles").write_text("/etc/slurm-ones/config.toml\n")
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def main(dist: Path) -> None:
    """Build the package next to the wheels."""
    (wheel,) = dist.glob("slurm_ones-*.whl")
    version = re.findall(r"slurm_ones-([^-]+)-", wheel.name)[0]
    with tempfile.TemporaryDirectory() as made:
        stage = Path(made, "stage")
        stage.mkdir(mode=0o755)
        system_files(stage, environment(stage, dist))
        control(stage, version)
        subprocess.run(["dpkg-deb", "--root-owner-group", "--build", stage, dist], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
