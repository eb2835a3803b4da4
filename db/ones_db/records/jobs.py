"""Jobs and their runs, as snapshots of the cluster have them."""

from __future__ import annotations

from dataclasses import dataclass

from ones_db.records.reason import NO_REASON, ReasonRecord


@dataclass(frozen=True)
class JobRecord:
    """A job as the newest snapshot has it."""

    job_id: int
    name: str
    user: str
    submit_time: float
    """Slurm changes it when it requeues a job; the store keeps the first, from which the JCT counts."""
    requested_nodes: int
    """As first seen: later snapshots, which show what a resize made of it, do not change it."""
    requested_gpus_per_node: int
    account: str = ""
    partition: str = ""
    comment: str = ""
    work_dir: str = ""
    restart: int = 0
    """How often Slurm has restarted it."""
    elastic: bool = False
    refusal: ReasonRecord = NO_REASON
    """Why it is not elastic."""
    state: str = "PENDING"
    end_time: float | None = None
    """None until it has ended (Slurm shows the expected end of a running job: that is not it)."""
    exit_code: int | None = None
    report_note: str = ""
    """What of its directory or reports could not be believed."""


@dataclass(frozen=True)
class SpecRecord:
    """What a job can do, as it says itself."""

    base_batch: int
    max_batch: int
    max_local_batch: int
    dataset: int
    """Samples in an epoch; 0 when it does not know."""
    epochs: int
    """0 when the script does not say."""
    max_passes: int = 1
    """Most forward passes, of `max_local_batch` samples per GPU each, in an optimizer step."""


@dataclass(frozen=True)
class RunRecord:
    """One start of a job. None where not known (yet)."""

    job_id: int
    restart: int
    nodes: int = 0
    """0 where not known."""
    gpus_per_node: int = 0
    node_list: tuple[str, ...] = ()
    start_time: float | None = None
    end_time: float | None = None
    batch: int | None = None
    """Global batch in which it began."""
    lr_factor: float | None = None
    checkpoint: str | None = None
    """Name of the checkpoint it loaded, empty for none."""
    launch_s: float | None = None
    group_s: float | None = None
    load_s: float | None = None
    end_reason: str | None = None
    exit_code: int | None = None
    note: str | None = None
    epoch: int | None = None
    """Epoch that it has reached, from 0."""
    cursor: int | None = None
    """Samples of that epoch already used."""
    step: int | None = None
    hello_time: float | None = None
    """When its first hello was written; all else that a hello says is as its last start of the ranks said it."""
    report_time: float | None = None
    """When its newest report was written."""
    report_offset: int = 0
    """Bytes of its report file that were read."""
    report_number: int = 0
    """Number of the last report that was read."""
    noise: float | None = None
    """Gradient noise scale that it reported last, samples."""
    progress: float | None = None
    """Progress that it has reached since the job's first run, samples of the base batch."""
    queue_s: float | None = None
    import_s: float | None = None
    first_step_s: float | None = None
    """From the hello to the end of the first step."""
    resizes: int | None = None
    """The job's own count of its runs at another world size, this one included."""
    attempts: int | None = None
    """How often its ranks were started again within it."""
    nonfinite: int | None = None
    """Steps with a loss that is not a finite number."""
    nonfinite_step: int | None = None
    """Step of the last report that had such a loss."""
