"""Run a command inside a box: `python -I -S enter.py PID UID GID CWD -- COMMAND...`.

A stand-in for nsenter that a test can treat as the command itself: signals sent to it reach the
command, it ends as the command ended (by the same signal, too), and when it is killed the command
is killed. The environment, standard input and output are passed on as they are. Run as a script,
apart from the package, because it starts for every command and has to be quick about it.
"""

import ctypes
import os
import signal
import sys

# What os.execvp imports, which a box may not have.
import warnings  # noqa: F401

NAMESPACES = ("ipc", "uts", "net", "pid", "mnt")
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
PR_SET_PDEATHSIG = 1
CANNOT_START, NOT_FOUND = 126, 127


def main(pid: str, uid: int, gid: int, cwd: str, command: "list[str]") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    handles = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY)
    for handle in handles:
        if libc.setns(handle, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))
    os.fchdir(root)
    os.chroot(".")
    # A PID namespace counts for children only, so there has to be one. Signals are held back and taken one by one: a
    # handler would wait until the command ends for one that comes just before this process begins to wait for it.
    passed_on = {getattr(signal, name) for name in PASSED_ON}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on | {signal.SIGCHLD})
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.setgroups([gid])
        os.setgid(gid)
        os.setuid(uid)
        # After setuid, which resets it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            os.chdir(cwd)
            os.execvp(command[0], command)
        except OSError as why:
            print(f"{command[0]}: {why}", file=sys.stderr, flush=True)
            os._exit(NOT_FOUND if isinstance(why, FileNotFoundError) else CANNOT_START)
    # With a terminal, ^C reaches the command by itself: passing it on would make it two.
    foreground = os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    ended, wait_status = 0, 0
    while not ended:
        number = signal.sigwait(passed_on | {signal.SIGCHLD})
        if number == signal.SIGCHLD:
            ended, wait_status = os.waitpid(child, os.WNOHANG)
        elif not (foreground and number in (signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH)):
            os.kill(child, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    status = os.waitstatus_to_exitcode(wait_status)
    if status < 0:
        if -status != signal.SIGKILL:  # which nobody may handle
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[6:])
