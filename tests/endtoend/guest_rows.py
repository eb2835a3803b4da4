"""What others want while a job has grown over a cluster, as data: tests and `benchmarks/guests.py` share these rows."""

from __future__ import annotations

from typing import Literal, NamedTuple

from slurm_ones.slurm.model import Queue
from tests.cluster.sites import GRES_GUESTS, GRES_SCAVENGE, OLD_GUESTS, Site


class GuestVariant(NamedTuple):
    """A Slurm, and how a job grows there."""

    site: Site
    about: str
    queue: Queue | None = None
    """Of guests; None: growth is in the user's own queue, and goes back by the companion's rule."""
    plain: bool = False
    """The job is one without blocks."""


VARIANTS = {
    "qos": GuestVariant(GRES_GUESTS, "26.05, guests by QOS", Queue(qos="guest")),
    "partition": GuestVariant(GRES_SCAVENGE, "26.05, guests by partition", Queue("scavenge")),
    "old": GuestVariant(OLD_GUESTS, "22.05, guests by partition", Queue("scavenge")),
    "blocks": GuestVariant(GRES_GUESTS, "26.05, blocks without guests"),
    "old-blocks": GuestVariant(OLD_GUESTS, "22.05, blocks without guests"),
    "plain": GuestVariant(GRES_GUESTS, "26.05, a plain job", plain=True),
    "old-plain": GuestVariant(OLD_GUESTS, "22.05, a plain job", plain=True),
}


class GrownJob(NamedTuple):
    """An elastic job that asked for one GPU, or one node, and has grown."""

    gpus: tuple[int, ...] = (16,)
    """Sizes of a job of blocks, one after the other: of one node, or of whole nodes."""
    plain: tuple[int, int] | None = (4, 4)
    """Nodes of a plain one and GPUs of each; None: its growth holds nothing that others want."""
    options: tuple[str, ...] = ()
    whole: bool = False
    """In partition `whole`, whose nodes have one GPU that Slurm does not know."""
    account: str = ""
    """Guests are charged to it."""
    step_ms: int = 400
    admin: tuple[str, ...] = ()
    """What root does before it is submitted, and takes back by `undo`."""
    grows: tuple[str, ...] = ()
    """The same before it grows."""
    undo: tuple[str, ...] = ()
    most: int = 16
    """GPUs that it could have."""
    guests: tuple[int, ...] = ()
    """GPUs of each guest, the largest first, where they are looked at."""
    near_s: int = 0
    """So long before the end of its limit a block is replaced."""
    rest_s: int = 1
    """For so long the job does not grow once Slurm took a guest of it."""
    late: bool = False
    """Guests are switched on once it has grown."""
    batch: tuple[int, int] = (16, 64)
    """The least and the most that it allows; the most is wanted."""
    cost: float = 0.0
    """What its owner lets its growth cost, if that is said."""
    env: tuple[str, ...] = ()
    """NAME=VALUE, of a job that trains nothing, also in the benchmark."""
    trains: bool = False
    """It trains, also in tests."""
    pair: bool = False
    """Another one grows with it, whose changes begin no term; later the policy that is shipped decides for both."""


LAB_8 = "sacctmgr -i modify account lab set grptres=gres/gpu=8"
LAB_ANY = "sacctmgr -i modify account lab set grptres=gres/gpu=-1"
USER = "sacctmgr -i modify qos normal set maxtresperuser=gres/gpu="
MAINTENANCE = (
    "scontrol create reservation ReservationName=maint StartTime=now+30minutes Duration=60 Users=root Nodes=ALL "
    "Flags=MAINT,IGNORE_JOBS"
)
FACTOR = "sacctmgr -i modify qos guest set usagefactor="
GROWN = {
    "full": GrownJob(guests=(4, 4, 4, 3)),
    "memory": GrownJob((8,), (4, 1), ("--mem=3500",), guests=(4, 3)),
    "licences": GrownJob((2, 3), None, ("--licenses=matlab:1",), guests=(1, 1)),
    "limit": GrownJob((8,), (2, 4), admin=(LAB_8,), undo=(LAB_ANY,)),
    "account": GrownJob(plain=None, account="guests", admin=(LAB_8,), undo=(LAB_ANY,)),
    "user": GrownJob(plain=None, admin=(f"{USER}4",), undo=(f"{USER}-1",)),
    "whole": GrownJob((4,), (4, 1), whole=True),
    "reserved": GrownJob(
        (4,),
        None,
        ("--time=60",),
        grows=(MAINTENANCE,),
        undo=("scontrol delete ReservationName=maint",),
        most=4,
        guests=(1, 1, 1),
    ),
    "slow": GrownJob((8,), None, step_ms=9000),
    "few": GrownJob((4,), None, most=4, guests=(1, 1, 1)),
    "ending": GrownJob(near_s=90),
    "late": GrownJob(late=True),
    "rests": GrownJob(rest_s=10),
    "alone": GrownJob((1,), None, ("--signal=B:USR2@10",), step_ms=200, most=1, near_s=90, batch=(16, 32), trains=True),
    "terms": GrownJob(
        (2, 4, 8),
        None,
        most=8,
        rest_s=0,
        batch=(16, 16),
        env=("LIGHT_TERMS=1", "LIGHT_SCALES=1", "LIGHT_STEP_S=0.2", "LIGHT_EPOCHS=2000"),
        pair=True,
    ),
    "free": GrownJob(
        (2, 4, 8),
        None,
        admin=(f"{FACTOR}0",),
        undo=(f"{FACTOR}1",),
        most=8,
        batch=(16, 16),
        cost=1.1,
        env=("LIGHT_SCALES=0.3", "LIGHT_STEP_S=0.4", "LIGHT_EPOCHS=30"),
    ),
}


class GuestRow(NamedTuple):
    """What somebody wants, and what is to become of it."""

    about: str
    options: tuple[str, ...]
    """Of sbatch; {base} is the node of the job's base, {other} one that has growth alone."""
    grown: str = "full"
    user: str = "bob"
    first: str = ""
    """What is submitted before: a waiting `guest`, or a job that is `impossible` now."""
    admin: tuple[str, ...] = ()
    undo: tuple[str, ...] = ()
    judged: Literal["served", "waits", "limits", "renewed", "rests", "worth", "cost"] = "served"
    """It is served; it waits and nothing is taken for it; the time limits of guests are looked at; a new base takes the
    place of one whose limit nears; the job rests once it was served, or takes no guests any more; or it ends, and one
    like it is charged for its growth."""
    rule: bool = False
    """Slurm does not preempt for it: the companion's rule serves it, with guests too."""
    accounting: bool = False
    """It needs accounting, or takes minutes and is run only where there is."""
    by_qos: bool = False
    """It needs guests in a QOS of their own."""
    guests: bool = False
    """It makes sense with guests alone."""
    unheld: bool = False
    """Guests hold none of it, so that nothing need be taken for it."""
    plain_waits: bool = False
    """A plain job gives nothing back for it, since its requeue would cost its base."""
    any_guest: bool = False
    """Each guest would do: the youngest goes where Slurm is asked for that."""
    within_s: float = 60.0
    """Who has not started by then is not served."""


IMPOSSIBLE = ("--nodes=4", "--gres=gpu:4")
RESERVED = (
    "scontrol create reservation ReservationName=theirs StartTime=now Duration=30 Users=bob Nodes={other} "
    "Flags=IGNORE_JOBS"
)
CLOSE, OPEN = ("scontrol update PartitionName=gpu State=" + state for state in ("DOWN", "UP"))
ROWS = {
    "a1": GuestRow(
        "a GPU in another partition of the same tier", ("--partition=other", "--gres=gpu:1"), any_guest=True
    ),
    "a2": GuestRow("a GPU in a partition of a higher tier", ("--partition=high", "--gres=gpu:1"), any_guest=True),
    "b": GuestRow("a GPU", ("--gres=gpu:1",), any_guest=True),
    "b2": GuestRow("three whole nodes", ("--nodes=3", "--gres=gpu:4")),
    "c1": GuestRow("16 CPUs of a node", ("--nodes=1", "--ntasks=16")),
    "c2": GuestRow("2 CPUs", ("--ntasks=2",)),
    "d": GuestRow("a GPU of a node by name", ("--nodelist={other}", "--gres=gpu:1")),
    "d2": GuestRow("3 GPUs next to the base", ("--nodelist={base}", "--gres=gpu:3")),
    "j1": GuestRow("a node of an exclusive partition", ("--partition=excl", "--nodes=1")),
    "j2": GuestRow("three of its nodes", ("--partition=excl", "--nodes=3")),
    "k": GuestRow("--exclusive", ("--nodes=1", "--exclusive")),
    "l": GuestRow("the same user's rigid job, a GPU", ("--gres=gpu:1",), user="alice", any_guest=True),
    "m": GuestRow(
        "the first block of another elastic job",
        ("--array=0-1%1", "--comment=ones: gpus=1-2 batch=32-64 array=blocks", "--gres=gpu:1"),
        # Without guests its policy decides for which elastic job another one shrinks.
        guests=True,
    ),
    "n": GuestRow("four whole nodes, impossible next to the base", IMPOSSIBLE, judged="waits"),
    "n2": GuestRow("a GPU for 5 min behind that", ("--time=5", "--gres=gpu:1"), first="impossible", plain_waits=True),
    "o": GuestRow("a node, while a guest of somebody waits", ("--gres=gpu:4",), first="guest", guests=True),
    "i2": GuestRow(
        "a GPU in one's own reservation",
        ("--reservation=theirs", "--gres=gpu:1"),
        admin=(RESERVED,),
        undo=("scontrol delete ReservationName=theirs",),
    ),
    "e": GuestRow("3000 MB of two nodes, GPUs and CPUs being free", ("--nodes=2", "--mem=3000"), "memory"),
    "f": GuestRow("a licence", ("--licenses=matlab:1",), "licences", unheld=True),
    "q1": GuestRow(
        "a GPU, in a QOS that does not list the guests'",
        ("--qos=strict", "--gres=gpu:1"),
        admin=("sacctmgr -i add qos strict", "sacctmgr -i modify user bob set qos+=strict"),
        undo=("sacctmgr -i modify user bob set qos-=strict", "sacctmgr -i delete qos strict"),
        rule=True,
        by_qos=True,
        guests=True,
        within_s=120.0,
    ),
    "q2": GuestRow(
        "a GPU, while guests are exempt",
        ("--gres=gpu:1",),
        admin=("sacctmgr -i modify qos guest set preemptexempttime=01:00:00",),
        undo=("sacctmgr -i modify qos guest set preemptexempttime=-1",),
        rule=True,
        by_qos=True,
        guests=True,
        within_s=120.0,
    ),
    "r1": GuestRow("the job's base nears its end", (), "ending", judged="renewed", accounting=True, guests=True),
    "r2": GuestRow(
        "the same, and no other base may start in time",
        (),
        "ending",
        admin=(CLOSE,),
        undo=(OPEN,),
        judged="renewed",
        accounting=True,
        guests=True,
    ),
    "r3": GuestRow(
        "the same, of a job without guests",
        (),
        "alone",
        admin=(CLOSE,),
        undo=(OPEN,),
        judged="renewed",
        accounting=True,
        guests=True,
    ),
    "s": GuestRow("a GPU, of growth before guests", ("--gres=gpu:1",), "late", rule=True, guests=True),
    "t": GuestRow("a GPU, twice in a row", ("--gres=gpu:1",), "rests", judged="rests", guests=True),
    "u": GuestRow(
        "three whole nodes, from two jobs; one loses work with each guest",
        ("--nodes=3", "--gres=gpu:4"),
        "terms",
        judged="worth",
        accounting=True,
        guests=True,
    ),
    "v": GuestRow(
        "the next job's growth is charged", (), "free", judged="cost", accounting=True, by_qos=True, guests=True
    ),
    "g0": GuestRow("a GPU, an account's GrpTRES being used up", ("--gres=gpu:1",), "limit", rule=True, accounting=True),
    "g2": GuestRow(
        "the same, guests having an account of their own", ("--gres=gpu:1",), "account", accounting=True, guests=True
    ),
    "h": GuestRow(
        "3 GPUs within the user's own MaxTRESPU",
        ("--gres=gpu:3",),
        "user",
        user="alice",
        accounting=True,
        by_qos=True,
        guests=True,
    ),
    "p1": GuestRow("a whole node that has no GRES", ("--partition=whole", "--nodes=1"), "whole"),
    "p2": GuestRow("two of them", ("--partition=whole", "--nodes=2"), "whole"),
    "i1": GuestRow("maintenance in 30 min", (), "reserved", judged="limits", guests=True),
    "w1": GuestRow("a GPU of a job of four on one node", ("--nodelist={base}", "--gres=gpu:1"), "few", guests=True),
    "w2": GuestRow("two GPUs of it", ("--nodelist={base}", "--gres=gpu:2"), "few", guests=True),
    "kill": GuestRow("a node, in steps of 9 s", ("--nodelist={other}", "--gres=gpu:4"), "slow", guests=True),
}


def rows_of(variant: GuestVariant) -> list[str]:
    """The rows that can be there, those of one grown job together."""
    found = []
    for name, row in ROWS.items():
        grown = GROWN[row.grown]
        possible = variant.site.accounting or not row.accounting
        possible &= variant.queue is not None or not row.guests
        possible &= not row.by_qos or (variant.queue is not None and bool(variant.queue.qos))
        if possible and (not variant.plain or grown.plain is not None):
            found.append(name)
    return sorted(found, key=lambda name: list(GROWN).index(ROWS[name].grown))
