"""Build a package of the companion from a release: a virtual environment, units, the account and man pages.

    python .ci/release.py dist && python3 .ci/package.py deb dist        # or rpm, or both

It runs on the system that the package is for, whose Python it uses, with venv and dpkg-deb or rpmbuild. pip gets what
slurm-ones requires from where its own settings say, such as PIP_FIND_LINKS.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME, SETTINGS = "opt/slurm-ones", "etc/slurm-ones/config.toml"
UNITS = ("slurm-ones.service", "slurm-ones-maintain.service", "slurm-ones-maintain.timer", "slurm-ones-web.service")
PLACES = {name: f"usr/lib/systemd/system/{name}" for name in UNITS} | {"config.toml": SETTINGS}
PLACES |= {f"{kind}.d.conf": f"usr/lib/{kind}.d/slurm-ones.conf" for kind in ("sysusers", "tmpfiles")}
SUMMARY = "Elastic training on plain Slurm: the companion"
ABOUT = "It learns how fast training jobs run at each size, and resizes those that opted in."
RELOAD = "[ ! -d /run/systemd/system ] || systemctl daemon-reload\n"
# What each system says of an upgrade or a removal stands in place of the braces.
INSTALLED = (
    "systemd-sysusers slurm-ones.conf\nsystemd-tmpfiles --create slurm-ones.conf\n"
    + RELOAD
    + "{} || echo \"slurm-ones: stop it, run 'slurm-ones db upgrade', and start it again\"\n"
)
REMOVING = "{} || [ ! -d /run/systemd/system ] || systemctl disable --now slurm-ones slurm-ones-maintain.timer\n"
# What Python compiled later is no file of the package.
REMOVED = "{} || rm -rf /opt/slurm-ones\n" + RELOAD
DEB = {
    "postinst": INSTALLED.format('[ -z "$2" ]'),
    "prerm": REMOVING.format('[ "$1" != remove ]'),
    "postrm": REMOVED.format('[ "$1" = upgrade ]')
    + '[ "$1" != purge ] || rm -rf /etc/slurm-ones /var/lib/slurm-ones /var/spool/slurm-ones\n',
}
RPM = {
    "post": INSTALLED.format("[ $1 = 1 ]"),
    "preun": REMOVING.format("[ $1 != 0 ]"),
    "postun": REMOVED.format("[ $1 != 0 ]"),
}
CONTROL = f"""Package: slurm-ones
Version: {{version}}
Architecture: {{machine}}
Maintainer: The slurm-ones developers <root@localhost>
Depends: python3 (>= {{python}}~), python3 (<< {{after}}~), systemd
Section: admin
Priority: optional
Description: {SUMMARY}
 {ABOUT}
"""
# Nothing of the environment is to be stripped, compiled again, or searched for what it requires.
SPEC = f"""%define __os_install_post %{{{{nil}}}}
%define debug_package %{{{{nil}}}}
Name: slurm-ones
Version: {{version}}
Release: 1
Summary: {SUMMARY}
License: BSD-3-Clause
AutoReqProv: no
Requires: python3 >= {{python}}, python3 < {{after}}, systemd
%description
{ABOUT}
%install
mkdir -p %{{{{buildroot}}}}
cp -a {{stage}}/. %{{{{buildroot}}}}
{{scripts}}
%files
%defattr(-,root,root)
%config(noreplace) /{SETTINGS}
{{files}}
"""


def environment(stage: Path, dist: Path) -> Path:
    """Make the environment below the stage, as it will be at its own place."""
    home = stage / HOME
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    pip = [home / "bin/python", "-m", "pip"]
    install = ["install", "--quiet", "--no-compile", f"--find-links={dist}", "slurm-ones[postgres,metrics]"]
    subprocess.run([*pip, *install], check=True)
    subprocess.run([home / "bin/python", HERE / "man.py", stage / "man"], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "pip"], check=True)
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
    for name, place in PLACES.items():
        (stage / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(units / name, stage / place)
    manuals = stage / "usr/share/man/man1"
    manuals.mkdir(parents=True)
    for page in (stage / "man").iterdir():
        (manuals / f"{page.name}.gz").write_bytes(gzip.compress(page.read_bytes(), mtime=0))
    shutil.rmtree(stage / "man")
    (stage / "usr/bin").mkdir()
    (stage / "usr/bin/slurm-ones").symlink_to(f"/{HOME}/bin/slurm-ones")


def deb(stage: Path, dist: Path, **words: str) -> None:
    """Write what dpkg reads, and pack."""
    folder = stage / "DEBIAN"
    folder.mkdir()
    asked = subprocess.run(["dpkg", "--print-architecture"], check=True, capture_output=True, text=True)
    (folder / "control").write_text(CONTROL.format(machine=asked.stdout.strip(), **words))
    (folder / "conffiles").write_text(f"/{SETTINGS}\n")
    for name, text in DEB.items():
        (folder / name).write_text(f"#!/bin/sh\nset -e\n{text}")
        (folder / name).chmod(0o755)
    subprocess.run(["dpkg-deb", "--root-owner-group", "--build", stage, dist], check=True)
    shutil.rmtree(folder)


def rpm(stage: Path, dist: Path, **words: str) -> None:
    """Write what rpmbuild reads, and pack: the environment as one folder."""
    files = [path for path in (stage / "usr").rglob("*") if path.is_symlink() or path.is_file()]
    names = [f"/{HOME}", *(f"/{path.relative_to(stage)}" for path in sorted(files))]
    scripts = "".join(f"%{name}\n{text}" for name, text in RPM.items())
    spec = stage.with_name("slurm-ones.spec")
    spec.write_text(SPEC.format(stage=stage, scripts=scripts, files="\n".join(names), **words))
    places = [f"--define=_topdir {stage.parent}/rpm", f"--define=_rpmdir {dist}"]
    subprocess.run(["rpmbuild", "-bb", "--quiet", *places, spec], check=True)


def main(kinds: list[str], dist: Path) -> None:
    """Build the packages next to the wheels."""
    (wheel,) = dist.glob("slurm_ones-*.whl")
    major, minor = sys.version_info[:2]
    words = {"version": wheel.name.split("-")[1], "python": f"{major}.{minor}", "after": f"{major}.{minor + 1}"}
    with tempfile.TemporaryDirectory() as made:
        stage = Path(made, "stage")
        stage.mkdir(mode=0o755)
        system_files(stage, environment(stage, dist))
        for kind in kinds:
            {"deb": deb, "rpm": rpm}[kind](stage, dist, **words)


if __name__ == "__main__":
    main(sys.argv[1:-1], Path(sys.argv[-1]).resolve())
