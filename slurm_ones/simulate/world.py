"""A simulated cluster on which the jobs of a workload are submitted and run, in virtual time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slurm_ones.simulate.slurm.cluster import Faults, SimulatedCluster
from slurm_ones.simulate.slurm.nodes import PartitionSpec, SlurmConf
from slurm_ones.simulate.slurm.simulated_client import SimulatedClient
from slurm_ones.simulate.slurm.simulated_job import Program, Request
from slurm_ones.simulate.slurm.timeline import ClusterSettings, Timeline
from slurm_ones.simulate.spec import ClusterSpec, asked_shape
from slurm_ones.simulate.training.application import Application, Hot, Mechanism, Requeue, Submission
from slurm_ones.simulate.training.reports import JobFiles
from slurm_ones.simulate.training.training import Training
from slurm_ones.simulate.workloads.profiles import Workload
from slurm_ones.slurm.model import JobKey, Task

USER, ACCOUNT = "researcher", "lab"
BLOCKS = 8
"""Number of tasks in the array of a job of blocks, as in our sbatch templates."""


def least_gpus(app: Application) -> int:
    """Return the fewest GPUs on which the job can train. Its other sizes are multiples of this number."""
    return app.by.degree if app.by is not None else 1


class World:
    """A simulated cluster, the training of its jobs, and the jobs that are still to be submitted."""

    def __init__(
        self,
        workload: Workload,
        spec: ClusterSpec,
        directory: Path,
        settings: ClusterSettings,
        *,
        mechanism: Mechanism = Requeue(),
        seed: int = 0,
        timeline: Timeline | None = None,
        others: Sequence[PartitionSpec] = (),
        oracle: bool = False,
        faults: Faults | None = None,
        conf: SlurmConf = SlurmConf(),
    ) -> None:
        """Schedule all submissions, counted from the present time of `timeline`. Jobs write their files in `directory`.

        With the mechanism `Hot`, elastic jobs are jobs of blocks. `others` are further partitions, which the workload
        does not use. For an `oracle`, all jobs are plain jobs, which are submitted held and write no files.
        """
        self.spec = spec
        self.workload = workload
        self.directory = directory
        self.settings = settings
        self.timeline = timeline or Timeline()
        self.began = self.timeline.now
        self.cluster = SimulatedCluster([*spec.partitions(), *others], settings, self.timeline, faults, conf)
        self.client = SimulatedClient(self.cluster)
        self.trainings: dict[int, Training] = {}
        self.job_ids: dict[str, int] = {}
        """Job id of each submitted job, by its name in the workload."""
        self.mechanism = mechanism
        self._oracle = oracle
        self._speeds = spec.speeds
        self._seed = seed
        self._upcoming = sorted((s.time for s in workload.submissions), reverse=True)
        for submission in workload.submissions:
            self.timeline.at(self.began + submission.time, lambda s=submission: self._submit(s))  # type: ignore[misc]
        self.pass_time(0.0)

    @property
    def seconds(self) -> float:
        """Simulated seconds since the start of the simulation."""
        return self.timeline.now - self.began

    @property
    def done(self) -> bool:
        """True if every job has been submitted and has ended."""
        return not self._upcoming and not self.cluster.live

    @property
    def ended(self) -> int:
        """Number of jobs that have ended."""
        return len(self.trainings) - self.cluster.live

    def pass_time(self, seconds: float, *, until_change: bool = False) -> None:
        """Let `seconds` of virtual time pass. Jobs read their orders before this time, and write their reports to files
        after it."""
        live = [self.trainings[job_id] for job_id in self.cluster.records.live_ids() if job_id in self.trainings]
        for training in live:
            training.check_orders()
        self.timeline.changed = False
        self.timeline.run(self.timeline.now + seconds, until_change=until_change)
        for training in live:
            if training.files is not None:
                training.files.flush()

    def skip_idle(self, interval_s: float) -> None:
        """Let as many whole intervals pass as fit before the next submission, if there is one."""
        left_s = max(self._upcoming[-1] - self.seconds, 0.0) if self._upcoming else 0.0
        self.pass_time(math.floor(left_s / interval_s) * interval_s)

    def _submit(self, submission: Submission) -> None:
        self._upcoming.pop()
        app = self.workload.applications[submission.application]
        request = self._request(submission, app)

        blocks = bool(request.array_tasks)

        def program(key: JobKey) -> Program:
            job_id, task = (key, 0) if isinstance(key, int) else (key.array, key.task)
            if job_id not in self.trainings:
                self.trainings[job_id] = self._training(submission, app, job_id, blocks)
            return self.trainings[job_id].program(task)

        job_id = self.job_ids[submission.name] = self.cluster.submit(request, program)
        if blocks:
            program(Task(job_id, 0))

    def _training(self, submission: Submission, app: Application, job_id: int, blocks: bool) -> Training:
        hot = self.mechanism if isinstance(self.mechanism, Hot) else Hot()
        training = Training(
            submission,
            app,
            self._files(submission, job_id) if submission.elastic and not self._oracle else None,
            self.timeline,
            self.settings,
            self.mechanism.start_s(app),
            np.random.default_rng([self._seed, 2, job_id]),
            hot if blocks else None,
        )
        training.speeds = self._speeds
        training.exited = lambda task, code: self.cluster.exited(Task(job_id, task) if blocks else job_id, code)
        if blocks:
            training.over = lambda: self.cluster.cancel_waiting(job_id)
        return training

    def _request(self, submission: Submission, app: Application) -> Request:
        """Return the job's request as its user gives it to sbatch."""
        shape = asked_shape(submission.gpus, self.spec)
        most = max(min(app.max_gpus, self.spec.gpus), shape.gpus)
        batch = f"{app.min_batch or app.base_batch}-{app.max_batch}"
        blocks = submission.elastic and self._of_blocks(submission)
        least = least_gpus(app)
        step = f":{least}" if 1 < least <= most - least else ""
        comment = f"ones: gpus={least}-{most}{step} batch={batch}{' array=blocks' if blocks else ''}"
        if submission.deadline_s is not None:
            comment += f" deadline={round(submission.deadline_s)}s"
        return Request(
            nodes=shape.nodes,
            gpus_per_node=0 if self.spec.whole_nodes else shape.gpus_per_node,
            name=submission.name,
            comment=comment if submission.elastic else "",
            array_tasks=tuple(range(BLOCKS)) if blocks else (),
            throttle=int(blocks),
            work_dir=str(self.directory),
            hold=self._oracle,
            priority=submission.priority,
            cpus_per_gpu=self.spec.cpus_per_gpu,
            time_limit_s=submission.limit_s,
            user=USER,
            uid=os.geteuid(),
            account=ACCOUNT if self.spec.charged else "",
        )

    # Runs with faults override these two.
    def _of_blocks(self, submission: Submission) -> bool:
        return isinstance(self.mechanism, Hot) and not self._oracle

    def _files(self, submission: Submission, job_id: int) -> JobFiles:
        return JobFiles(self.directory, job_id)
