"""Learner of the models that policies are given, from the histories of jobs."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ones_db import JobHistory
from ones_wrapper.protocol import Spec
from slurm_ones.learn.hierarchy import (
    Factor,
    GroupPath,
    JobEvidence,
    KindEvidence,
    KindFactors,
    Tree,
    faster,
    found_widths,
    on_kinds,
    prior_on,
)
from slurm_ones.learn.histories import CAUTIOUS as CAUTIOUS_NOISE
from slurm_ones.learn.histories import (
    NoiseEfficiency,
    base_kind,
    by_terms,
    dataset_of,
    epochs_in,
    free_batch,
    group_of,
    inexact,
    is_wired,
    join_of,
    leave_of,
    log_of,
    own_noise,
    plain_spec,
    points_in,
    progress_in,
    ratios,
    ready_of,
    reshards,
    training_after,
    unreported_epochs,
    without_bytes,
)
from slurm_ones.learn.progress import BetaProgress, TrainingState, at_least
from slurm_ones.learn.step_time import CAUTIOUS, WIRED, Fit, Prior, fit_all, layout_of
from slurm_ones.learn.throughput import MeasuredThroughput, moved
from slurm_ones.learn.workload import script
from slurm_ones.policy.contract import EfficiencyModel, Progress, ThroughputModel

NOWHERE = GroupPath(None, None, "")
"""Group of a job that has reported nothing."""
AROUND = {False: CAUTIOUS, True: WIRED}
"""Prior before any measurement, by whether the jobs report the bytes that they send."""
PEERS = 3
"""Fewest finished jobs of other users with the same spec that can bound how fast a job is believed to be."""
RESIZE_S = 30.0
"""Pause of training, in seconds, that is expected of a resize before any resize was measured."""
RESHARD = 2.0
"""Factor on `RESIZE_S` for a first resize that reshards its checkpoint, which is then read and written once more."""
JOIN_S, LEAVE_S, READY_S = 0.5, 0.05, 8.0
"""Pause in seconds when blocks join, pause when blocks leave, and seconds until joining blocks are ready. They are used
until some are measured, and come from small models (docs/benchmarks/resizes.md)."""
TERM_S = 5.0
"""Pause, in seconds, of a change that restarts training from a checkpoint, before any was measured. It is a guess:
forking and starting take about a second for a small model; a large model is also written and read."""
SPARE = 100
"""Number of models kept in addition to the most that one tick has needed. Models of jobs that reported last are
kept."""
SCRIPTS = 10_000
"""Largest number of scripts (pairs of user and job name) whose last spec is kept."""


@dataclass(frozen=True)
class JobModel:
    """Models and limits of one job, as learned."""

    spec: Spec | None
    """Spec that the job reported, or else that the last job of the same script reported; None if there is neither."""
    throughput: ThroughputModel
    efficiency: EfficiencyModel
    progress: Progress
    samples: float
    """Progress since the job's first run, in samples at the base batch."""
    losses: tuple[tuple[float, float], ...]
    """Pairs (epochs done, loss), one for each epoch whose loss the job reported."""
    resize_s: float
    """Expected pause of training at a resize, in seconds."""
    dataset: int = 0
    """Number of samples in an epoch: reported, or else measured in ended epochs; 0 if unknown."""
    shrink_s: float | None = None
    """Expected pause of training when the job gives up GPUs, in seconds; None if it is `resize_s`."""
    prepare_s: float = 0.0
    """Expected time, in seconds, between a block's start and its joining."""
    on: Mapping[str, ThroughputModel] = field(default_factory=dict)
    """Throughput model on each kind of GPU that the caller asked for."""


@dataclass(frozen=True)
class _Switches:
    """Typical duration of changes of blocks, in seconds."""

    join_s: float = JOIN_S
    leave_s: float = LEAVE_S
    ready_s: float = READY_S
    term_s: float = TERM_S


@dataclass(frozen=True)
class _Learned:
    """Throughput model of a job, and the history and prior from which it was fitted."""

    history: JobHistory
    prior: Prior
    model: MeasuredThroughput
    on: dict[str, ThroughputModel] = field(default_factory=dict)
    """Throughput model on each other kind of GPU that has been asked for."""


class Learner:
    """Learner of models from the histories of jobs.

    The models of finished jobs are fitted when a job finishes, the models of a running job when it reports something
    new. Jobs that report the same spec (base batch, local batch, dataset, epochs) are taken for jobs of one script.
    Jobs with the same batches form one family.

    A job's prior comes from its own user's jobs of the spec. It is shrunk towards others' jobs of the spec, those
    towards the family, and the family towards the site. `hierarchy` bounds how much one user influences other people's
    jobs, and widens intervals by the errors that past priors made.

    A job that has not run yet gets the last spec of a job of the same user and name. A number at the end of the name
    does not count.
    """

    def __init__(self, *, seed: int = 0, gpu_speeds: Mapping[str, float] | None = None) -> None:
        """Create the learner. `gpu_speeds` holds the site's guess of the relative speed of its GPU kinds."""
        self._seed = seed
        self._finished: Sequence[JobHistory] = ()
        self._past: dict[int, list[tuple[JobHistory, Fit]]] = {}
        """Fits of each finished job: one as reported and, if it reported the bytes that it sends, one without them."""
        self._progress = BetaProgress(seed=seed)
        self._trees = {wired: Tree((), around) for wired, around in AROUND.items()}
        self._widths = dict.fromkeys(AROUND, (1.0, 1.0))
        self._priors: dict[tuple[bool, GroupPath, str], Prior] = {}
        self._own: Counter[tuple[Hashable, str]] = Counter()
        self._specs: Counter[Hashable] = Counter()
        self._peers: dict[GroupPath, Prior] = {}
        self._noise = CAUTIOUS_NOISE
        self._noises: dict[Spec, float] = {}
        self._resize_s, self._reshard_s = RESIZE_S, RESHARD * RESIZE_S
        self._switches = _Switches()
        self._joins: dict[Spec, float] = {}
        self._learned: dict[int, _Learned] = {}
        self._factors = KindFactors(gpu_speeds or {})
        self._most = 0
        self._scripts: dict[tuple[str, str], Spec] = {}

    def finished(self, histories: Sequence[JobHistory]) -> None:
        """Learn from the jobs that have completed, newest first. Do nothing if this is the same object as at the last
        call."""
        if histories is self._finished:
            return
        self._finished = histories
        self._learn_scripts(reversed(histories))
        self._progress = BetaProgress([log_of(history) for history in reversed(histories)], seed=self._seed)
        self._learn_step_times(histories)
        self._learn_noise(histories)
        paused = [(history, history.pause_s) for history in histories if history.pause_s is not None]
        self._resize_s = _median((pause for _, pause in paused), RESIZE_S)
        self._reshard_s = _median((pause for h, pause in paused if reshards(h.spec)), RESHARD * self._resize_s)
        self._learn_switches(histories)

    def _learn_scripts(self, histories: Iterable[JobHistory]) -> None:
        for history in histories:
            if history.spec is not None:
                key = script(history.job.user, history.job.name)
                self._scripts.pop(key, None)
                self._scripts[key] = history.spec
        # Users choose the names, so their number must be bounded.
        _keep(self._scripts, SCRIPTS)

    def _learn_step_times(self, histories: Sequence[JobHistory]) -> None:
        new = [history for history in histories if id(history) not in self._past]
        # A job that reports its bytes is fitted a second time without them, as evidence for jobs that have not run yet.
        variants = [[one for one in (history, without_bytes(history)) if one is not None] for history in new]
        fits = iter(fit_all([(*points_in(one), AROUND[is_wired(one.spec)]) for both in variants for one in both]))
        self._past |= {id(both[0]): [(one, next(fits)) for one in both] for both in variants}
        # `_past` holds the histories that it keeps, so no other object can get the same id.
        self._past = {key: self._past[key] for key in map(id, histories)}
        measured = [both[0] for both in self._past.values() if len(both[0][1].misfit)]
        self._factors.learn([_kinds_of(history, fit) for history, fit in measured])
        # The parameters of all jobs are expressed for one kind of GPU.
        jobs: dict[bool, list[tuple[GroupPath, Fit]]] = {False: [], True: []}
        for history, _ in measured:
            by = self._factor_of(history, back=True).mean  # the uncertainty of the factor is left out
            for one, fit in self._past[id(history)]:
                on_reference = moved(fit, by * faster(layout_of(one.spec))) if by else fit
                jobs[is_wired(one.spec)].append((group_of(one), on_reference))
        for wired, around in AROUND.items():
            self._trees[wired] = Tree([(path, JobEvidence.of(fit)) for path, fit in jobs[wired]], around)
            self._widths[wired] = found_widths(jobs[wired], around)
        paths = [group_of(history) for history, _ in measured]
        self._own, self._specs = Counter((path.spec, path.user) for path in paths), Counter(path.spec for path in paths)
        self._peers, self._priors = {}, {}
        for known in self._learned.values():
            known.on.clear()

    def _factor_of(self, history: JobHistory, *, back: bool = False) -> Factor:
        """Return the factor from the reference kind to the kind of the job's fit; with `back`, the factor in the other
        direction."""
        ends = self._factors.reference, base_kind(history.throughput) or self._factors.reference
        return self._factors.factor(group_of(history).spec, *(reversed(ends) if back else ends))

    def _learn_switches(self, histories: Sequence[JobHistory]) -> None:
        """Learn for how long changes of blocks pause training, over all jobs. Joins are also learned for each spec,
        because a larger state takes longer to send."""
        joins: dict[Spec, list[float]] = defaultdict(list)
        for history in histories:
            if history.spec is not None and (cost := join_of(history)) is not None:
                joins[plain_spec(history.spec)].append(cost)
        self._joins = {spec: statistics.median(found) for spec, found in joins.items()}
        self._switches = _Switches(
            _median((cost for spec, cost in self._joins.items() if not by_terms(spec)), JOIN_S),
            _median((leave_of(history) for history in histories if not by_terms(history.spec)), LEAVE_S),
            _median(map(ready_of, histories), READY_S),
            _median((cost for spec, cost in self._joins.items() if by_terms(spec)), TERM_S),
        )

    def _learn_noise(self, histories: Sequence[JobHistory]) -> None:
        found: dict[Spec, list[float]] = defaultdict(list)
        for history in histories:
            ratio = own_noise(history)
            if history.spec is not None and ratio is not None:
                found[plain_spec(history.spec)].append(ratio)
        self._noise = _median((ratio for some in found.values() for ratio in some), CAUTIOUS_NOISE)
        self._noises = {spec: statistics.median(some) for spec, some in found.items()}

    def look(self, histories: Iterable[JobHistory]) -> None:
        """Update the models of these jobs from their new reports. All are fitted in one call."""
        histories = list(histories)
        self._learn_scripts(histories)
        self._fit(map(self._with_spec, histories))
        self._most = max(self._most, len(histories))
        # A prior that was dropped is computed again when it is needed. Without this bound the caches would grow until a
        # job finishes.
        for known in (self._learned, self._priors, self._peers):
            _keep(known, self._most + SPARE)

    def _fit(self, histories: Iterable[JobHistory]) -> None:
        stale = [history for history in histories if not self._current(history)]
        priors = [self._prior_of(history) for history in stale]
        fits = fit_all([(*points_in(history), prior) for history, prior in zip(stale, priors, strict=True)])
        for history, prior, fit in zip(stale, priors, fits, strict=True):
            self._learned.pop(history.job.job_id, None)
            widths = self._widths[is_wired(history.spec)]
            model = MeasuredThroughput(fit, layout_of(history.spec), self._peers_of(history), widths)
            self._learned[history.job.job_id] = _Learned(history, prior, model)

    def _current(self, history: JobHistory) -> bool:
        known = self._learned.get(history.job.job_id)
        if known is None or known.prior is not self._prior_of(history):
            return False
        before = known.history
        return before is history or (before.throughput == history.throughput and before.spec == history.spec)

    def _peers_of(self, history: JobHistory) -> Prior | None:
        """Return the prior that other users' jobs of this spec give, on the kind of GPU of the job's fit. None if they
        are too few."""
        path = group_of(history)
        if path.spec is None or self._specs[path.spec] - self._own[path.spec, path.user] < PEERS:
            return None
        if path not in self._peers:
            self._peers[path] = self._trees[is_wired(history.spec)].expect(path, others=True)
        return prior_on(self._peers[path], self._factor_of(history), layout_of(history.spec))

    def _prior_of(self, history: JobHistory) -> Prior:
        """Return the prior of a job on the kind of GPU of its fit."""
        path, wired = group_of(history), is_wired(history.spec)
        key = wired, path, base_kind(history.throughput)
        if key not in self._priors:
            expected = self._trees[wired].expect(path)
            self._priors[key] = prior_on(expected, self._factor_of(history), layout_of(history.spec))
        return self._priors[key]

    def about(
        self, history: JobHistory | None, now: float = 0.0, *, blocks: bool = False, kinds: Sequence[str] = ()
    ) -> JobModel:
        """Return the models of a job, on these `kinds` of GPU too. For a job without a history they are those of a
        typical job. `blocks` says that its blocks can join and leave.

        `now` is Slurm's clock. A job that has long reported nothing is expected to need at least as long again (Lindy's
        law). This holds even if little was left at its last report.
        """
        if history is None:
            nothing = self._progress.progress(TrainingState(dataset=0, epochs=0.0))
            typical = MeasuredThroughput.of((), self._trees[False].expect(NOWHERE))
            on = on_kinds(typical, self._factors.reference, kinds, self._factors, None, ())
            known = JobModel(None, typical, NoiseEfficiency(1.0, self._noise), nothing, 0.0, (), self._resize_s, on=on)
            return self._of_blocks(known, None) if blocks else known
        history = self._with_spec(history)
        self._fit([history])
        declared = float(history.spec.epochs) if history.spec is not None else 0.0
        efficiency = self._efficiency(history)
        training = training_after(history, epochs_in(history), len(history.epochs))
        progress = self._progress.progress(training, declared)
        usual_s = self._reshard_s if reshards(history.spec) else self._resize_s
        known = JobModel(
            spec=history.spec,
            throughput=self._learned[history.job.job_id].model,
            efficiency=efficiency,
            progress=at_least(progress, unreported_epochs(history, efficiency, now)),
            samples=progress_in(history),
            losses=tuple((float(point.epoch + 1), point.loss) for point in history.epochs if point.loss is not None),
            resize_s=usual_s if history.pause_s is None else history.pause_s,
            dataset=dataset_of(history),
            on=self._on(history, kinds) if kinds else {},
        )
        return self._of_blocks(known, history) if blocks else known

    def _on(self, history: JobHistory, kinds: Sequence[str]) -> Mapping[str, ThroughputModel]:
        known = self._learned[history.job.job_id]
        if not known.on.keys() >= {*kinds}:
            here = base_kind(history.throughput)
            own = ratios(history.throughput, known.model.fit, layout_of(history.spec), here)
            here, spec = here or self._factors.reference, group_of(history).spec
            known.on.update(on_kinds(known.model, here, kinds, self._factors, spec, own))
        return {kind: known.on[kind] for kind in kinds}

    def _of_blocks(self, known: JobModel, history: JobHistory | None) -> JobModel:
        """Return the models with the pauses of changes of blocks: the job's own, or else those of other jobs with its
        spec."""
        typical = self._switches
        if history is None:
            return replace(known, resize_s=typical.join_s, shrink_s=typical.leave_s, prepare_s=typical.ready_s)
        shrink_s = None if by_terms(history.spec) else _first(leave_of(history), typical.leave_s)
        prepare_s = _first(ready_of(history), typical.ready_s)
        return replace(known, resize_s=self._join_s(history), shrink_s=shrink_s, prepare_s=prepare_s)

    def switch_s(self, history: JobHistory | None) -> float:
        """Return the expected pause of a change of blocks, in seconds: the job's own, or else that of joins in similar
        jobs."""
        if history is not None and history.switch_s is not None:
            return history.switch_s
        return self._switches.join_s if history is None else self._join_s(self._with_spec(history))

    def _join_s(self, history: JobHistory) -> float:
        of_spec = self._joins.get(plain_spec(history.spec)) if history.spec is not None else None
        typical = self._switches.term_s if by_terms(history.spec) else self._switches.join_s
        return _first(join_of(history), _first(of_spec, typical))

    def _with_spec(self, history: JobHistory) -> JobHistory:
        """Return the history with a spec: the one that the job reported, or else the last of the same script."""
        expected = self._scripts.get(script(history.job.user, history.job.name)) if history.spec is None else None
        return history if expected is None else replace(history, spec=expected)

    def _efficiency(self, history: JobHistory) -> NoiseEfficiency:
        if history.spec is None:
            return NoiseEfficiency(1.0, math.inf)  # without a base batch no batch is less efficient
        typical = self._noise if inexact(history.spec) else self._noises.get(plain_spec(history.spec), self._noise)
        ratio = own_noise(history) or typical
        return NoiseEfficiency(history.spec.base_batch, ratio * max(history.spec.base_batch, 1), free_batch(history))


def _kinds_of(history: JobHistory, fit: Fit) -> KindEvidence:
    here, path = base_kind(history.throughput), group_of(history)
    found = ratios(history.throughput, fit, layout_of(history.spec), here)
    return KindEvidence(path.spec, path.user, here, fit, found)


def _median(values: Iterable[float | None], default: float) -> float:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else default


def _first(value: float | None, default: float) -> float:
    return value if value is not None else default


def _keep(known: dict[Any, Any], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]
