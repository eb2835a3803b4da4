"""Packages of the companion, in a Debian of its own: a deb from its build to its purge, an rpm of the same files.

The rpm is built by Debian's rpmbuild, and not installed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster import host as cluster_host
from tests.cluster import root, unavailable
from tests.cluster.cli import Progress
from tests.guide import mirror
from tests.guide.site import HOST
from tests.packaging.environment import TOP, release

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.nightly]

SCRIPT = """
set -ex
mount -t tmpfs none {work} && mkdir {work}/upper {work}/work {work}/root
mount -t overlay overlay -o lowerdir={root},upperdir={work}/upper,workdir={work}/work {work}/root
mount -t proc proc {work}/root/proc && mount --rbind /dev {work}/root/dev
sed -i /path-exclude/d {work}/root/etc/dpkg/dpkg.cfg.d/*
cp -r {source} {work}/root/source && cp -r {wheels} {work}/root/wheels
typed() {{ chroot {work}/root env -i PATH=/usr/sbin:/usr/bin HOME=/root LANG=C.UTF-8 PIP_NO_INDEX=1 {proxies} "$@"; }}
typed apt-get -q -o Acquire::Check-Valid-Until=false update >{work}/apt.log
typed apt-get -qy install --no-install-recommends rpm >>{work}/apt.log
typed env PIP_FIND_LINKS=/wheels DPKG_DEB_COMPRESSOR_TYPE=none python3 /source/.ci/package.py deb rpm /source/dist
typed sh -exc '{lines}'
"""
LINES = """
cd /tmp
dpkg-deb -c /source/dist/*.deb | grep -v ^d | sed -r "s/ +[0-9]+ [^ ]+ [^ ]+ / /; s/ -> .*//" | sort >deb
packed="[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} .%{FILENAMES}\\n]"
rpm -qp --qf "$packed" /source/dist/*/*.rpm | grep -v ^d | sort >rpm
diff deb rpm
test "$(rpm -qcp /source/dist/*/*.rpm)" = /etc/slurm-ones/config.toml
rpm -qp --scripts /source/dist/*/*.rpm | grep "systemctl disable"
dpkg -i /source/dist/*.deb
test "$(slurm-ones --version)" = "slurm-ones $(dpkg-query -W -f "\\${Version}" slurm-ones)"
slurm-ones db upgrade --database sqlite:////var/lib/slurm-ones/ones.sqlite
getent passwd slurm-ones
test "$(stat -c %U /var/lib/slurm-ones)" = slurm-ones
test -f /usr/share/man/man1/slurm-ones-why.1.gz
test -z "$(grep -rlI /tmp/ /opt/slurm-ones/bin /opt/slurm-ones/pyvenv.cfg)"
echo "# ours" >>/etc/slurm-ones/config.toml
dpkg -i /source/dist/*.deb
grep "^# ours" /etc/slurm-ones/config.toml
dpkg --remove slurm-ones
test ! -e /opt/slurm-ones && test -f /etc/slurm-ones/config.toml && test -f /var/lib/slurm-ones/ones.sqlite
dpkg --purge slurm-ones
test -z "$(ls -d /etc/slurm-ones /var/lib/slurm-ones /usr/bin/slurm-ones /usr/lib/sysusers.d/slurm-ones.conf)"
echo all done
"""


def test_from_its_build_to_its_purge(tmp_path: Path) -> None:
    """Settings that a site changed stay at an upgrade and a removal, its data too; purged, nothing is left."""
    if why := unavailable():
        pytest.skip(why)
    source, work = tmp_path / "source", tmp_path / "work"
    shutil.copytree(TOP / ".ci", source / ".ci")
    release(source / "dist")
    work.mkdir()
    host = root.build(HOST, Progress())
    proxies = " ".join(f"{name}={value}" for name, value in cluster_host.proxies().items())
    script = SCRIPT.format(
        work=work,
        root=host,
        source=source,
        wheels=mirror.folder(),
        proxies=proxies,
        lines=LINES.strip().replace("'", "'\\''"),
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False, timeout=3600
    )
    assert done.returncode == 0 and "all done" in done.stdout, done.stdout + done.stderr
