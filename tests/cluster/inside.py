"""The first process of a box: makes the box's world, then only collects the dead.

It runs as process 1 of a PID namespace, in mount, network, UTS and IPC namespaces of its own. When
it dies the kernel kills every other process of the box, and with the last process go the mounts:
nothing has to be undone, so nothing can be forgotten. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

from . import cgroups, linux
from .spec import Bind, Spec

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def be_the_first_process(spec: Spec, ready: Callable[[], None]) -> None:
    """Build the box around this process, say so by `ready`, and reap for ever."""
    # Block first: a child that ends during the set-up must not be missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    socket.sethostname(spec.name)
    _network(spec.network)
    root = _layered_root(spec)
    _devices(root, spec.devices)
    _kernel_file_systems(root)
    for bind in sorted(spec.binds, key=lambda bind: bind.inside):
        _show(root, bind)
    if spec.boots:
        # The kernel's own settings are this machine's, and not a box's to change.
        linux.bind(str(root / "proc/sys"), str(root / "proc/sys"), writable=False)
        cgroups.own(root / "sys/fs/cgroup", spec.name)
    _enter(root)
    ready()
    if spec.boots:
        _boot()
    _reap()


def _network(shared: int | None) -> None:
    if shared is None:
        linux.unshare(linux.CLONE_NEWNET)
        linux.loopback_up()
        return
    handle = os.open(f"/proc/{shared}/ns/net", os.O_RDONLY)
    linux.setns(handle)
    os.close(handle)


def _boot() -> None:
    """Become the root's init, which is told that this is a container."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    os.execve("/sbin/init", ["/sbin/init"], {"container": "slurm-ones", "PATH": "/usr/sbin:/usr/bin"})


def _layered_root(spec: Spec) -> Path:
    """The built root with a writable layer in memory on top, so that it is never written to."""
    layers, root = Path(spec.folder, "layers"), Path(spec.folder, "root")
    layers.mkdir(exist_ok=True)
    root.mkdir(exist_ok=True)
    linux.mount("tmpfs", str(layers), "tmpfs", data="mode=755")
    for layer in ("upper", "work"):
        (layers / layer).mkdir()
    (layers / "upper").chmod(0o755)
    lower = spec.root.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
    options = f"lowerdir={lower},upperdir={layers}/upper,workdir={layers}/work"
    try:
        linux.mount("overlay", str(root), "overlay", data=options)
    except OSError:
        # No overlayfs here (an odd kernel, or a lower layer that it refuses): a copy does as well,
        # only slower.
        shutil.rmtree(root)
        subprocess.run(["cp", "-a", "--reflink=auto", spec.root, str(root)], check=True)
        linux.mount(str(root), str(root), flags=linux.MS_BIND | linux.MS_REC)
    return root


def _devices(root: Path, extra: list[str]) -> None:
    """A /dev of its own, so that what root does to a device in here is not done to the host's. Where devices cannot be
    made, as in many containers, they are binds of the host's."""
    dev = root / "dev"
    linux.mount("tmpfs", str(dev), "tmpfs", linux.MS_NOSUID, "mode=755")
    sources = {name: f"/dev/{name}" for name in DEVICES} | dict.fromkeys(extra, "/dev/null")
    for name, source in sources.items():
        try:
            os.mknod(dev / name, stat.S_IFCHR, Path(source).stat().st_rdev)
            (dev / name).chmod(0o666)
        except PermissionError:
            (dev / name).touch()
            linux.mount(source, str(dev / name), flags=linux.MS_BIND)
    (dev / "pts").mkdir()
    (dev / "shm").mkdir()
    linux.mount("devpts", str(dev / "pts"), "devpts", 0, "newinstance,ptmxmode=0666,mode=0620")
    linux.mount("tmpfs", str(dev / "shm"), "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0"}
    links |= {"stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
    for name, target in links.items():
        (dev / name).symlink_to(target)


def _kernel_file_systems(root: Path) -> None:
    safe = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", str(root / "proc"), "proc", safe)
    linux.mount("sysfs", str(root / "sys"), "sysfs", safe | linux.MS_RDONLY)
    linux.mount("tmpfs", str(root / "tmp"), "tmpfs", linux.MS_NOSUID, "mode=1777")


def _show(root: Path, bind: Bind) -> None:
    """Bind one folder or file of the host, at a path that ordinary users can reach."""
    source, target = Path(bind.host), root / bind.inside.lstrip("/")
    # Parents may exist with modes that shut users out (/root is 700): open them, in our layer.
    for parent in reversed(target.relative_to(root).parents):
        folder = root / parent
        if not folder.exists():
            folder.mkdir(mode=0o755)
            folder.chmod(0o755)
        elif folder != root and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o111)
    if source.is_dir():
        target.mkdir(exist_ok=True)
    elif not target.exists():
        target.touch()
    linux.bind(str(source), str(target), writable=bind.writable)


def _enter(root: Path) -> None:
    """Make `root` the root, and let go of the host's file systems altogether."""
    old = root / "old-root"
    old.mkdir()
    subprocess.run(["pivot_root", str(root), str(old)], check=True)
    os.chdir("/")
    linux.detach("/old-root")
    Path("/old-root").rmdir()


def _reap() -> None:
    """Daemons orphan themselves to us; collect what has ended. Only a kill ends this."""
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue
