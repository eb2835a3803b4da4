"""Views of jobs of blocks: which blocks Slurm ran, and which of them trained together when."""

from __future__ import annotations

from ones_db.view import Column, View
from ones_db.view_parts import B_UNTIL, END, JOB, JOBS, M_AFTER, M_BEGAN, M_UNTIL, WHO, WHOSE, said, time_of

BLOCK_TIMELINE = View(
    "block_timeline",
    "One row a start of a block: when, where and at which size the blocks of a job ran",
    (
        *JOB,
        *WHO,
        Column("task", "int", "task of the job array"),
        Column("restart", "int", "Slurm's restart count of the task"),
        Column("slurm_id", "int", "Slurm's job id of the task, as accounting has it"),
        Column("nodes", "int", "nodes"),
        Column("gpus_per_node", "int", "GPUs per node"),
        Column("gpus", "int", "GPUs in all"),
        Column("node_list", "text", "names of its nodes, separated by commas"),
        time_of("start_time", "start"),
        said("started", "start_time"),
        time_of("end_time", "end; null while it goes on"),
        said("ended", "end_time"),
        Column("running_s", "float", "its length, seconds; of a block that goes on, as far as is known"),
        Column("gpu_hours", "float", "its length times its GPUs, GPU-hours"),
        Column("state", "text", "base state, as Slurm names it"),
    ),
    f"""
    SELECT {WHOSE}, b.task, b.restart, b.slurm_id, b.nodes, b.gpus_per_node, b.nodes * b.gpus_per_node AS gpus,
        b.node_list, b.start_time, COALESCE(b.end_time, j.end_time) AS end_time,
        latest(0.0, {B_UNTIL} - b.start_time) AS running_s,
        latest(0.0, {B_UNTIL} - b.start_time) * b.nodes * b.gpus_per_node / 3600.0 AS gpu_hours, b.state
    {JOBS} CROSS JOIN blocks b
    WHERE j.cluster_id = c.id AND b.job_id = j.id""",
    ("start_time", "job_id", "task"),
)

MEMBERSHIP_TIMELINE = View(
    "membership_timeline",
    "One row a membership: which blocks of a job trained together, from when to when, and what the change cost",
    (
        *JOB,
        *WHO,
        Column("term", "int", "term of the leader; the run's restart"),
        Column("generation", "int", "rises with each change, over all terms of the job"),
        time_of("start_time", "from when"),
        said("started", "start_time"),
        time_of("end_time", "to when: the next one, or the run's end; null while it is in force"),
        said("ended", "end_time"),
        Column("lasted_s", "float", "its length, seconds; of one that is in force, as far as is known"),
        Column("blocks", "text", "tasks of its blocks in rank order, separated by commas; the first leads"),
        Column("nodes", "int", "nodes"),
        Column("gpus_per_node", "int", "GPUs per node; 0 where nodes give unequally many"),
        Column("gpus", "int", "GPUs in all"),
        Column("batch", "int", "global batch, samples"),
        Column("step", "int", "optimizer steps since the job's first run, at its beginning"),
        Column("pause_s", "float", "how long no rank trained for the change, seconds"),
        Column("bytes", "int", "state that was sent to new blocks, bytes"),
        Column("transfer_s", "float", "what sending it took of pause_s, seconds"),
        Column("ready_s", "float", "from the order until the last new block was ready, training going on, seconds"),
        Column("why", "text", "order, lost, leaving or first"),
        Column("order_number", "int", "order that asked for it; null where the job changed by itself"),
    ),
    f"""
    SELECT {WHOSE}, r.restart AS term, m.generation, m.time AS start_time, COALESCE({M_AFTER}, {END}) AS end_time,
        latest(0.0, {M_UNTIL} - {M_BEGAN}) AS lasted_s, m.blocks, m.nodes, m.gpus_per_node, m.world AS gpus, m.batch,
        m.step, m.pause_s, m.bytes, m.transfer_s, m.ready_s, m.why, m.order_number
    {JOBS} CROSS JOIN runs r CROSS JOIN memberships m
    WHERE j.cluster_id = c.id AND r.job_id = j.id AND m.run_id = r.id AND r.start_time IS NOT NULL""",
    ("start_time", "job_id", "generation"),
)
