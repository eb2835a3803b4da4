"""Slurm's accounting in a box: MariaDB, and slurmdbd before it, so that there can be an operator.

The database is made anew at every start, which takes 0.2 s, and lies in memory (35 MB): nothing of it is to
outlive its cluster. It listens on a socket that only SlurmUser and root reach, which is all the protection it has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from .box import Box
from .errors import ClusterError
from .sites import ACCOUNT, OPERATOR, USERS
from .slurm_conf import LOGS

START_SECONDS = 90.0
MISSED = 6
"""Looks in a row without a daemon after which it has ended."""
DATA = "/var/lib/accounting"
# Debian's libmariadb looks for "localhost" here.
SOCKETS = "/run/mysqld"
DATABASE_CONF = "/etc/mysql/accounting.cnf"
DBD_CONF = "/etc/slurm/slurmdbd.conf"
DAEMONS = ("slurmdbd", "mariadbd")

# Slurm keeps a stored procedure in its database, so there have to be MariaDB's own tables. slurmdbd would
# create its database itself, but uses the connection on which it was refused, and the libmariadb of
# MariaDB 11.8.9 takes no answer on such a one ("maximum allowed number of columns (=0)").
MAKE_DATABASE = f"""
rm -rf {DATA}/*
mkdir {DATA}/mysql
{{ echo 'CREATE DATABASE slurm_acct_db;'; echo 'USE mysql;'; cat /usr/share/mariadb/mariadb_system_tables.sql; }} |
    mariadbd --defaults-file={DATABASE_CONF} --bootstrap --silent-startup >{LOGS}/mariadbd.log 2>&1
mariadbd --defaults-file={DATABASE_CONF} </dev/null >>{LOGS}/mariadbd.log 2>&1 &
"""


def start(box: Box, cluster: str, environment: Mapping[str, str], commands: Sequence[str] = ()) -> None:
    """Start accounting for the cluster of that name and tell it of our users, and whatever `commands` of sacctmgr
    do. It needs the box's slurm.conf and keys, and has to be there before slurmctld is.

    Raises ClusterError, with nothing of it left running, where it does not start.
    """
    uid, gid = box.ids("slurm")
    for inside in (DATA, SOCKETS, "/run/slurmdbd"):
        folder = box.root / inside.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        os.chown(folder, uid, gid)
    # slurmdbd insists on its file being SlurmUser's own, since a password may be in it.
    for inside, text in ((DATABASE_CONF, _database_conf()), (DBD_CONF, _dbd_conf(cluster))):
        path = box.root / inside.lstrip("/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        os.chown(path, uid, gid)
    try:
        if box.run(["sh", "-ec", MAKE_DATABASE], user="slurm", env=environment, check=False).returncode != 0:
            raise _failure(box, "mariadbd", "cannot make its database")
        _await(box, "mariadbd", ["test", "-S", f"{SOCKETS}/mysqld.sock"], environment)
        box.run(["slurmdbd"], user="slurm", env=environment)
        _await(box, "slurmdbd", ["sacctmgr", "-n", "show", "cluster"], environment)
        people = box.root / "run/slurmdbd/people"
        people.write_text(_people(cluster))
        for command in ("load /run/slurmdbd/people", *commands):
            box.run(["sacctmgr", "-i", *command.split()], env=environment)
    except ClusterError:
        for daemon in DAEMONS:
            box.run(["pkill", "-KILL", "-x", daemon], check=False)
        raise


def _await(box: Box, daemon: str, question: list[str], environment: Mapping[str, str]) -> None:
    """Wait until `daemon` answers, which is when the command `question` succeeds."""
    deadline, missed = time.monotonic() + START_SECONDS, 0
    while box.run(question, env=environment, check=False).returncode != 0:
        lives = box.run(["pgrep", "-x", daemon], check=False).returncode == 0
        # One that was only just started has the name of the shell that starts it for a moment.
        missed = 0 if lives else missed + 1
        if missed == MISSED or time.monotonic() > deadline:
            raise _failure(box, daemon, "does not answer" if lives else "ended")
        time.sleep(0.05)


def _failure(box: Box, daemon: str, what: str) -> ClusterError:
    """What became of a daemon, with the last it wrote."""
    log = box.root / LOGS.lstrip("/") / f"{daemon}.log"
    words = log.read_text().splitlines()[-4:] if log.exists() else []
    return ClusterError("\n".join([f"{daemon} {what}", *words]))


def _people(cluster: str) -> str:
    """Cluster, account and users, as `sacctmgr load` reads them."""
    lines = [f"Cluster - '{cluster}'", "Parent - 'root'", f"Account - '{ACCOUNT}'", f"Parent - '{ACCOUNT}'"]
    for user in USERS:
        level = ":AdminLevel='Operator'" if user == OPERATOR else ""
        lines.append(f"User - '{user}':DefaultAccount='{ACCOUNT}'{level}")
    return "\n".join(lines) + "\n"


def _dbd_conf(cluster: str) -> str:
    lines = [
        f"DbdHost={cluster}",
        "DbdAddr=127.0.0.1",
        "SlurmUser=slurm",
        "AuthType=auth/slurm",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=slurm",
        f"LogFile={LOGS}/slurmdbd.log",
        "PidFile=/run/slurmdbd/slurmdbd.pid",
    ]
    return "\n".join(lines) + "\n"


def _database_conf() -> str:
    """Small, quick to start, no network and no care for the data: no sync is worth its time here."""
    lines = [
        "[mariadbd]",
        f"datadir={DATA}",
        f"socket={SOCKETS}/mysqld.sock",
        f"pid-file={SOCKETS}/mariadbd.pid",
        "skip-networking",
        # Whoever reaches the socket may do anything: see above who does.
        "skip-grant-tables",
        "performance-schema=OFF",
        "max-connections=32",
        "key-buffer-size=1M",
        "aria-pagecache-buffer-size=8M",
        "innodb-buffer-pool-size=32M",
        "innodb-log-file-size=8M",
        "innodb-data-file-path=ibdata1:12M:autoextend",
        "innodb-autoextend-increment=4",
        "innodb-temp-data-file-path=ibtmp1:2M:autoextend",
        "innodb-undo-tablespaces=0",
        "innodb-flush-log-at-trx-commit=0",
        "innodb-flush-method=nosync",
        "innodb-doublewrite=0",
        # Containers often may not use the kernel's.
        "innodb-use-native-aio=0",
        # What slurmdbd asks for; without the second it ends when two writes meet.
        "innodb-lock-wait-timeout=900",
        "innodb-snapshot-isolation=OFF",
    ]
    return "\n".join(lines) + "\n"
