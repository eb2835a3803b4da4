CREATE TABLE public.accounting (
    job_id bigint NOT NULL,
    time_limit_s double precision,
    import_time double precision NOT NULL
);
COMMENT ON TABLE public.accounting IS 'jobs that are known from Slurm''s accounting alone';
COMMENT ON COLUMN public.accounting.job_id IS 'job (jobs.id)';
COMMENT ON COLUMN public.accounting.time_limit_s IS 'time limit, seconds; null where it had none';
COMMENT ON COLUMN public.accounting.import_time IS 'when its rows were last read, Unix seconds';
CREATE TABLE public.actions (
    id bigint NOT NULL,
    cluster_id bigint NOT NULL,
    "time" double precision NOT NULL,
    user_name text NOT NULL,
    action text NOT NULL,
    detail text NOT NULL
);
COMMENT ON TABLE public.actions IS 'what people did to the companion, its database and its jobs';
COMMENT ON COLUMN public.actions.id IS 'key of this table alone';
COMMENT ON COLUMN public.actions.cluster_id IS 'cluster';
COMMENT ON COLUMN public.actions."time" IS 'when, Unix seconds';
COMMENT ON COLUMN public.actions.user_name IS 'login name of who did it';
COMMENT ON COLUMN public.actions.action IS 'what was done: a command, or what was seen of a file';
COMMENT ON COLUMN public.actions.detail IS 'with what, in words';
CREATE SEQUENCE public.actions_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.actions_id_seq OWNED BY public.actions.id;
CREATE TABLE public.alembic_version (
    version_num character varying(32) NOT NULL
);
CREATE TABLE public.batch_changes (
    run_id bigint NOT NULL,
    number bigint NOT NULL,
    "time" double precision NOT NULL,
    step bigint NOT NULL,
    batch bigint NOT NULL,
    lr_factor double precision NOT NULL,
    order_number bigint,
    passes bigint,
    ramp bigint
);
COMMENT ON TABLE public.batch_changes IS 'changes of the global batch inside a run';
COMMENT ON COLUMN public.batch_changes.run_id IS 'run';
COMMENT ON COLUMN public.batch_changes.number IS 'number of the report';
COMMENT ON COLUMN public.batch_changes."time" IS 'when, Unix seconds';
COMMENT ON COLUMN public.batch_changes.step IS 'optimizer steps since the job''s first run';
COMMENT ON COLUMN public.batch_changes.batch IS 'global batch from then on, samples';
COMMENT ON COLUMN public.batch_changes.lr_factor IS 'learning rate over the one set for the base batch, where it goes';
COMMENT ON COLUMN public.batch_changes.order_number IS 'order that asked for it';
COMMENT ON COLUMN public.batch_changes.passes IS 'forward passes per step from then on';
COMMENT ON COLUMN public.batch_changes.ramp IS 'steps over which the learning rate goes there';
CREATE TABLE public.checkpoints (
    run_id bigint NOT NULL,
    number bigint NOT NULL,
    "time" double precision NOT NULL,
    name text NOT NULL,
    epoch bigint NOT NULL,
    cursor bigint NOT NULL,
    step bigint NOT NULL,
    bytes bigint NOT NULL,
    seconds double precision NOT NULL,
    order_number bigint,
    stall_s double precision
);
COMMENT ON TABLE public.checkpoints IS 'checkpoints that became durable';
COMMENT ON COLUMN public.checkpoints.run_id IS 'run';
COMMENT ON COLUMN public.checkpoints.number IS 'number of the report';
COMMENT ON COLUMN public.checkpoints."time" IS 'when it was durable, Unix seconds';
COMMENT ON COLUMN public.checkpoints.name IS 'its name in the job''s directory';
COMMENT ON COLUMN public.checkpoints.epoch IS 'epoch, from 0';
COMMENT ON COLUMN public.checkpoints.cursor IS 'samples of the epoch already used';
COMMENT ON COLUMN public.checkpoints.step IS 'optimizer steps since the job''s first run';
COMMENT ON COLUMN public.checkpoints.bytes IS 'size, bytes';
COMMENT ON COLUMN public.checkpoints.seconds IS 'to write it, seconds';
COMMENT ON COLUMN public.checkpoints.order_number IS 'order that asked for it';
COMMENT ON COLUMN public.checkpoints.stall_s IS 'how long training stood still for it, seconds';
CREATE TABLE public.clusters (
    id bigint NOT NULL,
    name text NOT NULL
);
COMMENT ON TABLE public.clusters IS 'Slurm clusters that this database remembers';
COMMENT ON COLUMN public.clusters.id IS 'key of this table alone';
COMMENT ON COLUMN public.clusters.name IS 'the cluster''s name, as Slurm has it';
CREATE SEQUENCE public.clusters_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.clusters_id_seq OWNED BY public.clusters.id;
CREATE TABLE public.decision_alternatives (
    decision_id bigint NOT NULL,
    job_id bigint NOT NULL,
    rank bigint NOT NULL,
    nodes bigint NOT NULL,
    gpus_per_node bigint NOT NULL,
    batch bigint NOT NULL,
    worth double precision NOT NULL
);
COMMENT ON TABLE public.decision_alternatives IS 'the best few sizes that a decision weighed for a job';
COMMENT ON COLUMN public.decision_alternatives.decision_id IS 'decision';
COMMENT ON COLUMN public.decision_alternatives.job_id IS 'job (jobs.id)';
COMMENT ON COLUMN public.decision_alternatives.rank IS 'from 0, the best for the job';
COMMENT ON COLUMN public.decision_alternatives.nodes IS 'nodes; 0 for waiting';
COMMENT ON COLUMN public.decision_alternatives.gpus_per_node IS 'GPUs per node; 0 for waiting';
COMMENT ON COLUMN public.decision_alternatives.batch IS 'global batch, samples; 0 for waiting';
COMMENT ON COLUMN public.decision_alternatives.worth IS 'what it is worth by itself, in the policy''s own unit; more is better';
CREATE TABLE public.decision_jobs (
    decision_id bigint NOT NULL,
    job_id bigint NOT NULL,
    nodes bigint,
    gpus_per_node bigint,
    batch bigint,
    from_nodes bigint,
    from_gpus_per_node bigint,
    from_batch bigint,
    reason text NOT NULL,
    acted boolean NOT NULL,
    outcome text NOT NULL,
    reason_code text DEFAULT ''::text NOT NULL,
    reason_arguments text DEFAULT '{}'::text NOT NULL,
    outcome_code text DEFAULT ''::text NOT NULL,
    outcome_arguments text DEFAULT '{}'::text NOT NULL
);
COMMENT ON TABLE public.decision_jobs IS 'what a decision gives each job, and why';
COMMENT ON COLUMN public.decision_jobs.decision_id IS 'decision';
COMMENT ON COLUMN public.decision_jobs.job_id IS 'job (jobs.id)';
COMMENT ON COLUMN public.decision_jobs.nodes IS 'nodes; null where it waits';
COMMENT ON COLUMN public.decision_jobs.gpus_per_node IS 'GPUs per node; null where it waits';
COMMENT ON COLUMN public.decision_jobs.batch IS 'global batch, samples; null where it waits';
COMMENT ON COLUMN public.decision_jobs.from_nodes IS 'nodes it held; null where it waited';
COMMENT ON COLUMN public.decision_jobs.from_gpus_per_node IS 'GPUs per node it held; null where it waited';
COMMENT ON COLUMN public.decision_jobs.from_batch IS 'global batch it had, samples';
COMMENT ON COLUMN public.decision_jobs.reason IS 'why, in words for its user';
COMMENT ON COLUMN public.decision_jobs.acted IS 'the companion set out to carry it out';
COMMENT ON COLUMN public.decision_jobs.outcome IS 'what came of it, in words';
COMMENT ON COLUMN public.decision_jobs.reason_code IS 'code of reason, by which causes are counted';
COMMENT ON COLUMN public.decision_jobs.reason_arguments IS 'what reason names, as a JSON object';
COMMENT ON COLUMN public.decision_jobs.outcome_code IS 'code of outcome, by which causes are counted';
COMMENT ON COLUMN public.decision_jobs.outcome_arguments IS 'what outcome names, as a JSON object';
CREATE TABLE public.decisions (
    id bigint NOT NULL,
    cluster_id bigint NOT NULL,
    "time" double precision NOT NULL,
    policy text NOT NULL,
    mode text NOT NULL,
    score double precision,
    seconds double precision NOT NULL,
    generations bigint,
    CONSTRAINT ck_decisions_mode CHECK ((mode = ANY (ARRAY['advise'::text, 'act'::text])))
);
COMMENT ON TABLE public.decisions IS 'schedules that a policy decided on';
COMMENT ON COLUMN public.decisions.id IS 'key of this table alone';
COMMENT ON COLUMN public.decisions.cluster_id IS 'cluster';
COMMENT ON COLUMN public.decisions."time" IS 'when, Unix seconds';
COMMENT ON COLUMN public.decisions.policy IS 'name of the policy';
COMMENT ON COLUMN public.decisions.mode IS 'advise (nothing was changed) or act';
COMMENT ON COLUMN public.decisions.score IS 'score of the schedule, in the policy''s own unit';
COMMENT ON COLUMN public.decisions.seconds IS 'what it took to decide, seconds';
COMMENT ON COLUMN public.decisions.generations IS 'generations of the search so far';
CREATE TABLE public.jobs (
    id bigint NOT NULL,
    cluster_id bigint NOT NULL,
    job_id bigint NOT NULL,
    submit_time double precision NOT NULL,
    name text NOT NULL,
    user_name text NOT NULL,
    account text NOT NULL,
    partition text NOT NULL,
    comment text NOT NULL,
    work_dir text NOT NULL,
    requested_nodes bigint NOT NULL,
    requested_gpus_per_node bigint NOT NULL,
    restart bigint NOT NULL,
    elastic boolean NOT NULL,
    refusal text NOT NULL,
    state text NOT NULL,
    end_time double precision,
    exit_code bigint,
    report_note text NOT NULL,
    base_batch bigint,
    max_batch bigint,
    max_local_batch bigint,
    dataset bigint,
    epochs bigint,
    deferred_until double precision,
    max_passes bigint,
    refusal_code text DEFAULT ''::text NOT NULL,
    refusal_arguments text DEFAULT '{}'::text NOT NULL
);
COMMENT ON TABLE public.jobs IS 'jobs; Slurm uses a job id again after it has run out of them';
COMMENT ON COLUMN public.jobs.id IS 'key of this table alone';
COMMENT ON COLUMN public.jobs.cluster_id IS 'cluster';
COMMENT ON COLUMN public.jobs.job_id IS 'Slurm''s job id';
COMMENT ON COLUMN public.jobs.submit_time IS 'first submission, Unix seconds (Slurm changes its own at each requeue)';
COMMENT ON COLUMN public.jobs.name IS 'name that the user gave it';
COMMENT ON COLUMN public.jobs.user_name IS 'login name of its owner (`user` means something else in SQL)';
COMMENT ON COLUMN public.jobs.account IS 'account it is charged to';
COMMENT ON COLUMN public.jobs.partition IS 'partition it was last seen in';
COMMENT ON COLUMN public.jobs.comment IS 'its comment, which holds the opting in';
COMMENT ON COLUMN public.jobs.work_dir IS 'working directory, which holds the job''s directory';
COMMENT ON COLUMN public.jobs.requested_nodes IS 'nodes it asked for when first seen';
COMMENT ON COLUMN public.jobs.requested_gpus_per_node IS 'GPUs per node it asked for when first seen';
COMMENT ON COLUMN public.jobs.restart IS 'how often Slurm has restarted it';
COMMENT ON COLUMN public.jobs.elastic IS 'opted in, and nothing speaks against resizing it';
COMMENT ON COLUMN public.jobs.refusal IS 'why it is not elastic, in words; empty where it is';
COMMENT ON COLUMN public.jobs.state IS 'base state, as Slurm names it';
COMMENT ON COLUMN public.jobs.end_time IS 'end, Unix seconds; null until then';
COMMENT ON COLUMN public.jobs.exit_code IS 'exit code of the batch script; null until the end';
COMMENT ON COLUMN public.jobs.report_note IS 'what of its directory or reports could not be believed, in words';
COMMENT ON COLUMN public.jobs.base_batch IS 'global batch its learning rate was chosen for, samples';
COMMENT ON COLUMN public.jobs.max_batch IS 'largest global batch it takes, samples';
COMMENT ON COLUMN public.jobs.max_local_batch IS 'most samples per GPU per forward pass';
COMMENT ON COLUMN public.jobs.dataset IS 'samples in an epoch; 0 where it does not know';
COMMENT ON COLUMN public.jobs.epochs IS 'epochs it means to train; 0 where it does not say';
COMMENT ON COLUMN public.jobs.deferred_until IS 'until when the companion keeps it from starting, Unix seconds; null where it does not';
COMMENT ON COLUMN public.jobs.max_passes IS 'most forward passes per optimizer step';
COMMENT ON COLUMN public.jobs.refusal_code IS 'code of refusal, by which causes are counted';
COMMENT ON COLUMN public.jobs.refusal_arguments IS 'what refusal names, as a JSON object';
CREATE VIEW public.decisions_explained WITH (security_invoker='true') AS
 SELECT v.cluster,
    v.job_id,
    v.submit_time,
    v.name,
    v.user_name,
    v.decision_id,
    v."time",
    to_char((to_timestamp(v."time") AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text) AS decided,
    v.policy,
    v.mode,
    v.action,
    v.from_gpus,
    v.gpus,
    v.from_batch,
    v.batch,
    v.reason,
    v.reason_code,
    v.reason_arguments,
    v.alternatives,
    v.acted,
    v.outcome,
    v.outcome_code,
    v.outcome_arguments
   FROM ( SELECT c.name AS cluster,
            j.job_id,
            j.submit_time,
            j.name,
            j.user_name,
            d.id AS decision_id,
            d."time",
            d.policy,
            d.mode,
                CASE
                    WHEN (COALESCE(g.nodes, (0)::bigint) = 0) THEN
                    CASE
                        WHEN (COALESCE(g.from_nodes, (0)::bigint) = 0) THEN 'waits'::text
                        ELSE 'parks'::text
                    END
                    WHEN (COALESCE(g.from_nodes, (0)::bigint) = 0) THEN 'starts'::text
                    WHEN ((g.nodes * g.gpus_per_node) > (g.from_nodes * g.from_gpus_per_node)) THEN 'grows'::text
                    WHEN ((g.nodes * g.gpus_per_node) < (g.from_nodes * g.from_gpus_per_node)) THEN 'shrinks'::text
                    WHEN (g.nodes <> g.from_nodes) THEN 'moves'::text
                    WHEN (g.batch <> g.from_batch) THEN 'batch'::text
                    ELSE 'keeps'::text
                END AS action,
            (g.from_nodes * g.from_gpus_per_node) AS from_gpus,
            (g.nodes * g.gpus_per_node) AS gpus,
            g.from_batch,
            g.batch,
            g.reason,
            g.reason_code,
            g.reason_arguments,
            ( SELECT string_agg(s.size, ' > '::text) AS string_agg
                   FROM ( SELECT ((((a.nodes || 'x'::text) || a.gpus_per_node) || '/'::text) || a.batch) AS size
                           FROM public.decision_alternatives a
                          WHERE ((a.decision_id = g.decision_id) AND (a.job_id = g.job_id))
                          ORDER BY a.rank) s) AS alternatives,
                CASE
                    WHEN g.acted THEN 1
                    ELSE 0
                END AS acted,
            g.outcome,
            g.outcome_code,
            g.outcome_arguments
           FROM (((public.clusters c
             CROSS JOIN public.jobs j)
             CROSS JOIN public.decision_jobs g)
             CROSS JOIN public.decisions d)
          WHERE ((j.cluster_id = c.id) AND (g.job_id = j.id) AND (d.id = g.decision_id))) v;
CREATE SEQUENCE public.decisions_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.decisions_id_seq OWNED BY public.decisions.id;
CREATE TABLE public.epochs (
    run_id bigint NOT NULL,
    number bigint NOT NULL,
    "time" double precision NOT NULL,
    epoch bigint NOT NULL,
    step bigint NOT NULL,
    samples bigint NOT NULL,
    loss double precision,
    accuracy double precision,
    nonfinite bigint
);
COMMENT ON TABLE public.epochs IS 'epochs that ended';
COMMENT ON COLUMN public.epochs.run_id IS 'run';
COMMENT ON COLUMN public.epochs.number IS 'number of the report';
COMMENT ON COLUMN public.epochs."time" IS 'end of the epoch, Unix seconds';
COMMENT ON COLUMN public.epochs.epoch IS 'the epoch that ended, from 0';
COMMENT ON COLUMN public.epochs.step IS 'optimizer steps since the job''s first run';
COMMENT ON COLUMN public.epochs.samples IS 'samples used in it';
COMMENT ON COLUMN public.epochs.loss IS 'loss that the script reports for it';
COMMENT ON COLUMN public.epochs.accuracy IS 'accuracy that the script reports for it, as a fraction';
COMMENT ON COLUMN public.epochs.nonfinite IS 'steps with a loss that is not a finite number';
CREATE TABLE public.runs (
    id bigint NOT NULL,
    job_id bigint NOT NULL,
    restart bigint NOT NULL,
    nodes bigint NOT NULL,
    gpus_per_node bigint NOT NULL,
    node_list text,
    start_time double precision,
    end_time double precision,
    batch bigint,
    lr_factor double precision,
    checkpoint text,
    launch_s double precision,
    group_s double precision,
    load_s double precision,
    end_reason text,
    exit_code bigint,
    note text,
    epoch bigint,
    cursor bigint,
    step bigint,
    first_loss double precision,
    hello_time double precision,
    report_time double precision,
    report_offset bigint NOT NULL,
    report_number bigint NOT NULL,
    noise double precision,
    progress double precision,
    queue_s double precision,
    import_s double precision,
    first_step_s double precision,
    resizes bigint,
    attempts bigint,
    hello_number bigint,
    nonfinite bigint,
    nonfinite_step bigint
);
COMMENT ON TABLE public.runs IS 'one start of a job each';
COMMENT ON COLUMN public.runs.id IS 'key of this table alone';
COMMENT ON COLUMN public.runs.job_id IS 'job (jobs.id)';
COMMENT ON COLUMN public.runs.restart IS 'Slurm''s restart count, 0 in the first run';
COMMENT ON COLUMN public.runs.nodes IS 'nodes; 0 where not known';
COMMENT ON COLUMN public.runs.gpus_per_node IS 'GPUs per node; 0 where not known';
COMMENT ON COLUMN public.runs.node_list IS 'names of its nodes, separated by commas';
COMMENT ON COLUMN public.runs.start_time IS 'start, Unix seconds';
COMMENT ON COLUMN public.runs.end_time IS 'end, Unix seconds; null until then';
COMMENT ON COLUMN public.runs.batch IS 'global batch in which it began, samples';
COMMENT ON COLUMN public.runs.lr_factor IS 'learning rate it began with, over the one set for the base batch';
COMMENT ON COLUMN public.runs.checkpoint IS 'name of the checkpoint it loaded; empty for none';
COMMENT ON COLUMN public.runs.launch_s IS 'from the batch script to the ranks'' first line, seconds';
COMMENT ON COLUMN public.runs.group_s IS 'to build the process group, seconds';
COMMENT ON COLUMN public.runs.load_s IS 'to load the checkpoint, seconds';
COMMENT ON COLUMN public.runs.end_reason IS 'why it ended: the job''s word, else Slurm''s state';
COMMENT ON COLUMN public.runs.exit_code IS 'exit code that it reported';
COMMENT ON COLUMN public.runs.note IS 'what people should know, in the job''s words';
COMMENT ON COLUMN public.runs.epoch IS 'epoch it has reached, from 0';
COMMENT ON COLUMN public.runs.cursor IS 'samples of that epoch already used';
COMMENT ON COLUMN public.runs.step IS 'optimizer steps since the job''s first run';
COMMENT ON COLUMN public.runs.first_loss IS 'first training loss that it reported';
COMMENT ON COLUMN public.runs.hello_time IS 'when its first hello was written, Unix seconds';
COMMENT ON COLUMN public.runs.report_time IS 'when its newest report was written, Unix seconds';
COMMENT ON COLUMN public.runs.report_offset IS 'bytes of its report file that were read';
COMMENT ON COLUMN public.runs.report_number IS 'number of the last report that was read';
COMMENT ON COLUMN public.runs.noise IS 'gradient noise scale that it reported last, samples';
COMMENT ON COLUMN public.runs.progress IS 'progress it has reached since the job''s first run, samples of the base batch';
COMMENT ON COLUMN public.runs.queue_s IS 'from the last report of the run before to the batch script, seconds';
COMMENT ON COLUMN public.runs.import_s IS 'what imports took of launch_s, seconds';
COMMENT ON COLUMN public.runs.first_step_s IS 'from the hello to the end of the first step, seconds';
COMMENT ON COLUMN public.runs.resizes IS 'runs so far that began at another world size, by the job''s own count';
COMMENT ON COLUMN public.runs.attempts IS 'how often its ranks were started again within it';
COMMENT ON COLUMN public.runs.hello_number IS 'number of the hello of its last start of the ranks';
COMMENT ON COLUMN public.runs.nonfinite IS 'steps with a loss that is not a finite number';
COMMENT ON COLUMN public.runs.nonfinite_step IS 'step of the last report that had such a loss; null for none';
CREATE VIEW public.gpu_hours AS
 SELECT v.cluster,
    v.user_name,
    v.account,
    v.day,
    v.day_time,
    v.jobs,
    v.runs,
    v.gpu_hours
   FROM ( WITH RECURSIVE days(n) AS (
                 SELECT (0)::bigint AS int8
                UNION ALL
                 SELECT (days.n + 1)
                   FROM days
                  WHERE ((days.n)::double precision <= (( SELECT max((COALESCE(COALESCE(r.end_time,
                                CASE
                                    WHEN (j.restart > r.restart) THEN COALESCE(r.report_time, r.start_time)
                                    ELSE NULL::double precision
                                END, j.end_time), GREATEST(r.start_time, COALESCE(r.report_time, r.start_time), COALESCE(( SELECT max(look."time") AS max
                                   FROM public.decisions look
                                  WHERE (look.cluster_id = j.cluster_id)), r.start_time))) - GREATEST(r.start_time, j.submit_time))) AS max
                           FROM (public.runs r
                             CROSS JOIN public.jobs j)
                          WHERE (j.id = r.job_id)) / (86400.0)::double precision))
                )
         SELECT p.cluster,
            p.user_name,
            p.account,
            substr(to_char((to_timestamp(p.day_time) AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text), 1, 10) AS day,
            p.day_time,
            count(DISTINCT p.job) AS jobs,
            count(*) AS runs,
            (sum(((p.gpus)::double precision * (LEAST(p.ended, (p.day_time + (86400.0)::double precision)) - GREATEST(p.began, p.day_time)))) / (3600.0)::double precision) AS gpu_hours
           FROM ( SELECT s.cluster,
                    s.user_name,
                    s.account,
                    s.job,
                    s.gpus,
                    s.began,
                    s.ended,
                    ((((floor((s.began / (86400.0)::double precision)))::bigint + days.n) * 86400))::double precision AS day_time
                   FROM (( SELECT c.name AS cluster,
                            j.user_name,
                            j.account,
                            j.id AS job,
                                CASE
                                    WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                                    ELSE (0)::bigint
                                END AS gpus,
                            GREATEST(r.start_time, j.submit_time) AS began,
                            COALESCE(COALESCE(r.end_time,
                                CASE
                                    WHEN (j.restart > r.restart) THEN COALESCE(r.report_time, r.start_time)
                                    ELSE NULL::double precision
                                END, j.end_time), GREATEST(r.start_time, COALESCE(r.report_time, r.start_time), COALESCE(( SELECT max(look."time") AS max
                                   FROM public.decisions look
                                  WHERE (look.cluster_id = j.cluster_id)), r.start_time))) AS ended
                           FROM ((public.clusters c
                             CROSS JOIN public.jobs j)
                             CROSS JOIN public.runs r)
                          WHERE ((j.cluster_id = c.id) AND (r.job_id = j.id) AND (r.start_time IS NOT NULL))) s
                     CROSS JOIN days)
                  WHERE ((s.ended > s.began) AND (((((floor((s.began / (86400.0)::double precision)))::bigint + days.n) * 86400))::double precision < s.ended))) p
          GROUP BY p.cluster, p.user_name, p.account, p.day_time) v;
CREATE TABLE public.health (
    cluster_id bigint NOT NULL,
    "time" double precision NOT NULL,
    mode text NOT NULL,
    interval_s double precision NOT NULL,
    tick_time double precision,
    tick_s double precision,
    running bigint,
    waiting bigint,
    gpus bigint,
    error text NOT NULL,
    error_time double precision
);
COMMENT ON TABLE public.health IS 'how the companion that acted last was at its last tick';
COMMENT ON COLUMN public.health.cluster_id IS 'cluster';
COMMENT ON COLUMN public.health."time" IS 'when it wrote this, Unix seconds';
COMMENT ON COLUMN public.health.mode IS 'act or advise';
COMMENT ON COLUMN public.health.interval_s IS 'seconds from one tick to the next';
COMMENT ON COLUMN public.health.tick_time IS 'end of its last tick that was not in vain, Unix seconds; null before one';
COMMENT ON COLUMN public.health.tick_s IS 'what that tick took, seconds';
COMMENT ON COLUMN public.health.running IS 'elastic jobs that ran then';
COMMENT ON COLUMN public.health.waiting IS 'elastic jobs that waited then';
COMMENT ON COLUMN public.health.gpus IS 'GPUs on which elastic jobs ran then';
COMMENT ON COLUMN public.health.error IS 'its last complaint, in words; empty where it had none since it started';
COMMENT ON COLUMN public.health.error_time IS 'when it complained, Unix seconds';
CREATE TABLE public.resizes (
    id bigint NOT NULL,
    job_id bigint NOT NULL,
    decision_id bigint,
    restart bigint NOT NULL,
    old_nodes bigint NOT NULL,
    old_gpus_per_node bigint NOT NULL,
    old_batch bigint,
    new_nodes bigint NOT NULL,
    new_gpus_per_node bigint NOT NULL,
    new_batch bigint,
    state text NOT NULL,
    order_number bigint,
    started double precision NOT NULL,
    deadline double precision,
    ended double precision,
    outcome text NOT NULL,
    pause_s double precision,
    outcome_code text DEFAULT ''::text NOT NULL,
    outcome_arguments text DEFAULT '{}'::text NOT NULL
);
COMMENT ON TABLE public.resizes IS 'resizes, each written down before it begins';
COMMENT ON COLUMN public.resizes.id IS 'key of this table alone';
COMMENT ON COLUMN public.resizes.job_id IS 'job (jobs.id)';
COMMENT ON COLUMN public.resizes.decision_id IS 'decision that asked for it';
COMMENT ON COLUMN public.resizes.restart IS 'restart count of the run that it leaves';
COMMENT ON COLUMN public.resizes.old_nodes IS 'nodes before';
COMMENT ON COLUMN public.resizes.old_gpus_per_node IS 'GPUs per node before';
COMMENT ON COLUMN public.resizes.old_batch IS 'global batch before, samples';
COMMENT ON COLUMN public.resizes.new_nodes IS 'nodes after; 0 to stop the job';
COMMENT ON COLUMN public.resizes.new_gpus_per_node IS 'GPUs per node after';
COMMENT ON COLUMN public.resizes.new_batch IS 'global batch after, samples; null leaves the job''s own';
COMMENT ON COLUMN public.resizes.state IS 'state of the resize; ''done'' when it took effect';
COMMENT ON COLUMN public.resizes.order_number IS 'order that was given to the job for it';
COMMENT ON COLUMN public.resizes.started IS 'when it was written down, Unix seconds';
COMMENT ON COLUMN public.resizes.deadline IS 'when the present state is given up, Unix seconds';
COMMENT ON COLUMN public.resizes.ended IS 'when it ended, Unix seconds; null while it is open';
COMMENT ON COLUMN public.resizes.outcome IS 'what came of it, in words';
COMMENT ON COLUMN public.resizes.pause_s IS 'from the last step before to the first after it, seconds';
COMMENT ON COLUMN public.resizes.outcome_code IS 'code of outcome, by which causes are counted';
COMMENT ON COLUMN public.resizes.outcome_arguments IS 'what outcome names, as a JSON object';
CREATE VIEW public.job_summary WITH (security_invoker='true') AS
 SELECT v.cluster,
    v.job_id,
    v.submit_time,
    to_char((to_timestamp(v.submit_time) AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text) AS submitted,
    v.name,
    v.user_name,
    v.account,
    v.partition,
    v.state,
    v.elastic,
    v.requested_gpus,
    v.start_time,
    to_char((to_timestamp(v.start_time) AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text) AS started,
    v.end_time,
    to_char((to_timestamp(v.end_time) AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text) AS ended,
    v.jct_s,
    v.queueing_s,
    v.running_s,
    v.runs,
    v.sizes,
    v.smallest_gpus,
    v.largest_gpus,
    v.gpu_hours,
    v.resizes,
    v.pause_s,
    v.accuracy
   FROM ( SELECT c.name AS cluster,
            j.job_id,
            j.submit_time,
            j.name,
            j.user_name,
            j.account,
            j.partition,
            j.state,
                CASE
                    WHEN j.elastic THEN 1
                    ELSE 0
                END AS elastic,
            (j.requested_nodes * j.requested_gpus_per_node) AS requested_gpus,
            ( SELECT min(r.start_time) AS min
                   FROM public.runs r
                  WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL))) AS start_time,
            j.end_time,
            (j.end_time - j.submit_time) AS jct_s,
            (( SELECT min(r.start_time) AS min
                   FROM public.runs r
                  WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL))) - j.submit_time) AS queueing_s,
            ( SELECT sum(GREATEST((0.0)::double precision, (COALESCE(COALESCE(r.end_time,
                        CASE
                            WHEN (j.restart > r.restart) THEN COALESCE(r.report_time, r.start_time)
                            ELSE NULL::double precision
                        END, j.end_time), GREATEST(r.start_time, COALESCE(r.report_time, r.start_time), COALESCE(( SELECT max(look."time") AS max
                           FROM public.decisions look
                          WHERE (look.cluster_id = j.cluster_id)), r.start_time))) - GREATEST(r.start_time, j.submit_time)))) AS sum
                   FROM public.runs r
                  WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL))) AS running_s,
            ( SELECT count(*) AS count
                   FROM public.runs r
                  WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL))) AS runs,
            ( SELECT string_agg(s.shape, ' > '::text) AS string_agg
                   FROM ( SELECT ((r.nodes || 'x'::text) || r.gpus_per_node) AS shape
                           FROM public.runs r
                          WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL) AND (r.nodes > 0))
                          ORDER BY r.restart) s) AS sizes,
            ( SELECT min(
                        CASE
                            WHEN (r.nodes > 0) THEN
                            CASE
                                WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                                ELSE (0)::bigint
                            END
                            ELSE NULL::bigint
                        END) AS min
                   FROM public.runs r
                  WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL))) AS smallest_gpus,
            ( SELECT max(
                        CASE
                            WHEN (r.nodes > 0) THEN
                            CASE
                                WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                                ELSE (0)::bigint
                            END
                            ELSE NULL::bigint
                        END) AS max
                   FROM public.runs r
                  WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL))) AS largest_gpus,
            ( SELECT (sum((GREATEST((0.0)::double precision, (COALESCE(COALESCE(r.end_time,
                        CASE
                            WHEN (j.restart > r.restart) THEN COALESCE(r.report_time, r.start_time)
                            ELSE NULL::double precision
                        END, j.end_time), GREATEST(r.start_time, COALESCE(r.report_time, r.start_time), COALESCE(( SELECT max(look."time") AS max
                           FROM public.decisions look
                          WHERE (look.cluster_id = j.cluster_id)), r.start_time))) - GREATEST(r.start_time, j.submit_time))) * (
                        CASE
                            WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                            ELSE (0)::bigint
                        END)::double precision)) / (3600.0)::double precision)
                   FROM public.runs r
                  WHERE ((r.job_id = j.id) AND (r.start_time IS NOT NULL))) AS gpu_hours,
            ( SELECT count(*) AS count
                   FROM public.resizes z
                  WHERE ((z.job_id = j.id) AND (z.state = 'done'::text) AND (z.ended IS NOT NULL) AND (z.restart >= 0))) AS resizes,
            ( SELECT COALESCE(sum(z.pause_s), (0.0)::double precision) AS "coalesce"
                   FROM public.resizes z
                  WHERE (z.job_id = j.id)) AS pause_s,
            ( SELECT e.accuracy
                   FROM (public.runs r
                     CROSS JOIN public.epochs e)
                  WHERE ((e.run_id = r.id) AND (r.job_id = j.id) AND (e.accuracy IS NOT NULL))
                  ORDER BY r.restart DESC, e.number DESC
                 LIMIT 1) AS accuracy
           FROM (public.clusters c
             CROSS JOIN public.jobs j)
          WHERE (j.cluster_id = c.id)) v;
CREATE SEQUENCE public.jobs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.jobs_id_seq OWNED BY public.jobs.id;
CREATE TABLE public.leaders (
    cluster_id bigint NOT NULL,
    term bigint NOT NULL,
    holder text NOT NULL,
    since double precision NOT NULL,
    beat double precision NOT NULL
);
COMMENT ON TABLE public.leaders IS 'which companion of each cluster acts, or did last';
COMMENT ON COLUMN public.leaders.cluster_id IS 'cluster';
COMMENT ON COLUMN public.leaders.term IS 'how often the lead was taken; whoever has an older term writes no more';
COMMENT ON COLUMN public.leaders.holder IS 'who leads, as host:process id; empty once it gave the lead back';
COMMENT ON COLUMN public.leaders.since IS 'when it took the lead, Unix seconds';
COMMENT ON COLUMN public.leaders.beat IS 'when it was last heard of, Unix seconds';
CREATE TABLE public.node_changes (
    node_id bigint NOT NULL,
    "time" double precision NOT NULL,
    state text NOT NULL,
    usable boolean NOT NULL,
    gpus bigint NOT NULL,
    partitions text NOT NULL
);
COMMENT ON TABLE public.node_changes IS 'what a node was from a moment on, until its next change';
COMMENT ON COLUMN public.node_changes.node_id IS 'node';
COMMENT ON COLUMN public.node_changes."time" IS 'when it was seen, Unix seconds';
COMMENT ON COLUMN public.node_changes.state IS 'UP while it takes jobs, has it any or not; RESERVED; else what Slurm says of it';
COMMENT ON COLUMN public.node_changes.usable IS 'up, and neither drained, reserved, failing nor in maintenance';
COMMENT ON COLUMN public.node_changes.gpus IS 'GPUs it has; 0 where Slurm knows of none';
COMMENT ON COLUMN public.node_changes.partitions IS 'partitions it is in, separated by commas';
CREATE TABLE public.nodes (
    id bigint NOT NULL,
    cluster_id bigint NOT NULL,
    name text NOT NULL
);
COMMENT ON TABLE public.nodes IS 'nodes that the companion has seen';
COMMENT ON COLUMN public.nodes.id IS 'key of this table alone';
COMMENT ON COLUMN public.nodes.cluster_id IS 'cluster';
COMMENT ON COLUMN public.nodes.name IS 'its name, as Slurm has it';
CREATE SEQUENCE public.nodes_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.nodes_id_seq OWNED BY public.nodes.id;
CREATE VIEW public.resize_cost WITH (security_invoker='true') AS
 SELECT v.cluster,
    v.job_id,
    v.submit_time,
    v.name,
    v.user_name,
    v.start_time,
    to_char((to_timestamp(v.start_time) AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text) AS started,
    v.restart,
    v.old_gpus,
    v.new_gpus,
    v.old_batch,
    v.new_batch,
    v.state,
    v.pause_s,
    v.total_s,
    v.checkpoint_s,
    v.stall_s,
    v.queue_s,
    v.launch_s,
    v.import_s,
    v.group_s,
    v.load_s,
    v.first_step_s,
    v.attempts,
    v.outcome,
    v.outcome_code,
    v.outcome_arguments
   FROM ( SELECT c.name AS cluster,
            j.job_id,
            j.submit_time,
            j.name,
            j.user_name,
            z.started AS start_time,
            z.restart,
            (z.old_nodes * z.old_gpus_per_node) AS old_gpus,
            (z.new_nodes * z.new_gpus_per_node) AS new_gpus,
            z.old_batch,
            z.new_batch,
            z.state,
            z.pause_s,
            (z.ended - z.started) AS total_s,
            ( SELECT sum(k.seconds) AS sum
                   FROM (public.runs o
                     CROSS JOIN public.checkpoints k)
                  WHERE ((k.run_id = o.id) AND (o.job_id = z.job_id) AND (o.restart = z.restart) AND (k.order_number = z.order_number))) AS checkpoint_s,
            ( SELECT sum(k.stall_s) AS sum
                   FROM (public.runs o
                     CROSS JOIN public.checkpoints k)
                  WHERE ((k.run_id = o.id) AND (o.job_id = z.job_id) AND (o.restart = z.restart) AND (k.order_number = z.order_number))) AS stall_s,
            r.queue_s,
            r.launch_s,
            r.import_s,
            r.group_s,
            r.load_s,
            r.first_step_s,
            r.attempts,
            z.outcome,
            z.outcome_code,
            z.outcome_arguments
           FROM (((public.clusters c
             CROSS JOIN public.jobs j)
             CROSS JOIN public.resizes z)
             LEFT JOIN public.runs r ON (((r.job_id = z.job_id) AND (r.restart = (z.restart + 1)) AND (z.restart >= 0) AND (NOT (EXISTS ( SELECT 1
                   FROM public.resizes later
                  WHERE ((later.job_id = z.job_id) AND (later.restart = z.restart) AND (later.id > z.id))))))))
          WHERE ((j.cluster_id = c.id) AND (z.job_id = j.id) AND (z.ended IS NOT NULL))) v;
CREATE TABLE public.resize_steps (
    resize_id bigint NOT NULL,
    sequence bigint NOT NULL,
    state text NOT NULL,
    "time" double precision NOT NULL,
    detail text NOT NULL,
    detail_code text DEFAULT ''::text NOT NULL,
    detail_arguments text DEFAULT '{}'::text NOT NULL
);
COMMENT ON TABLE public.resize_steps IS 'every state a resize went through';
COMMENT ON COLUMN public.resize_steps.resize_id IS 'resize';
COMMENT ON COLUMN public.resize_steps.sequence IS 'from 0, in order';
COMMENT ON COLUMN public.resize_steps.state IS 'state it entered';
COMMENT ON COLUMN public.resize_steps."time" IS 'when, Unix seconds';
COMMENT ON COLUMN public.resize_steps.detail IS 'what was found or done, in words';
COMMENT ON COLUMN public.resize_steps.detail_code IS 'code of detail, by which causes are counted';
COMMENT ON COLUMN public.resize_steps.detail_arguments IS 'what detail names, as a JSON object';
CREATE SEQUENCE public.resizes_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.resizes_id_seq OWNED BY public.resizes.id;
CREATE TABLE public.rollups (
    run_id bigint NOT NULL,
    stretch_s double precision NOT NULL,
    number bigint NOT NULL
);
COMMENT ON TABLE public.rollups IS 'runs whose throughput samples were put together to longer ones';
COMMENT ON COLUMN public.rollups.run_id IS 'run';
COMMENT ON COLUMN public.rollups.stretch_s IS 'samples that ended in the same stretch of so many seconds are one';
COMMENT ON COLUMN public.rollups.number IS 'number of the run''s last report then';
CREATE VIEW public.run_timeline WITH (security_invoker='true') AS
 SELECT v.cluster,
    v.job_id,
    v.submit_time,
    v.name,
    v.user_name,
    v.restart,
    v.nodes,
    v.gpus_per_node,
    v.gpus,
    v.node_list,
    v.batch,
    v.start_time,
    to_char((to_timestamp(v.start_time) AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text) AS started,
    v.end_time,
    to_char((to_timestamp(v.end_time) AT TIME ZONE 'UTC'::text), 'YYYY-MM-DD HH24:MI:SS'::text) AS ended,
    v.running_s,
    v.gpu_hours,
    v.end_reason
   FROM ( SELECT c.name AS cluster,
            j.job_id,
            j.submit_time,
            j.name,
            j.user_name,
            r.restart,
            r.nodes,
            r.gpus_per_node,
                CASE
                    WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                    ELSE (0)::bigint
                END AS gpus,
            r.node_list,
            r.batch,
            r.start_time,
            COALESCE(r.end_time,
                CASE
                    WHEN (j.restart > r.restart) THEN COALESCE(r.report_time, r.start_time)
                    ELSE NULL::double precision
                END, j.end_time) AS end_time,
            GREATEST((0.0)::double precision, (COALESCE(COALESCE(r.end_time,
                CASE
                    WHEN (j.restart > r.restart) THEN COALESCE(r.report_time, r.start_time)
                    ELSE NULL::double precision
                END, j.end_time), GREATEST(r.start_time, COALESCE(r.report_time, r.start_time), COALESCE(( SELECT max(look."time") AS max
                   FROM public.decisions look
                  WHERE (look.cluster_id = j.cluster_id)), r.start_time))) - GREATEST(r.start_time, j.submit_time))) AS running_s,
            ((GREATEST((0.0)::double precision, (COALESCE(COALESCE(r.end_time,
                CASE
                    WHEN (j.restart > r.restart) THEN COALESCE(r.report_time, r.start_time)
                    ELSE NULL::double precision
                END, j.end_time), GREATEST(r.start_time, COALESCE(r.report_time, r.start_time), COALESCE(( SELECT max(look."time") AS max
                   FROM public.decisions look
                  WHERE (look.cluster_id = j.cluster_id)), r.start_time))) - GREATEST(r.start_time, j.submit_time))) * (
                CASE
                    WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                    ELSE (0)::bigint
                END)::double precision) / (3600.0)::double precision) AS gpu_hours,
            r.end_reason
           FROM ((public.clusters c
             CROSS JOIN public.jobs j)
             CROSS JOIN public.runs r)
          WHERE ((j.cluster_id = c.id) AND (r.job_id = j.id) AND (r.start_time IS NOT NULL))) v;
CREATE SEQUENCE public.runs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.runs_id_seq OWNED BY public.runs.id;
CREATE TABLE public.throughput (
    run_id bigint NOT NULL,
    number bigint NOT NULL,
    "time" double precision NOT NULL,
    epoch bigint NOT NULL,
    step bigint NOT NULL,
    cursor bigint NOT NULL,
    samples bigint NOT NULL,
    seconds double precision NOT NULL,
    batch bigint NOT NULL,
    lr_factor double precision NOT NULL,
    loss double precision,
    noise double precision,
    progress double precision,
    nonfinite bigint
);
COMMENT ON TABLE public.throughput IS 'samples used over a stretch of steps, at the shape of the run';
COMMENT ON COLUMN public.throughput.run_id IS 'run';
COMMENT ON COLUMN public.throughput.number IS 'number of the report';
COMMENT ON COLUMN public.throughput."time" IS 'end of the stretch, Unix seconds';
COMMENT ON COLUMN public.throughput.epoch IS 'epoch, from 0';
COMMENT ON COLUMN public.throughput.step IS 'optimizer steps since the job''s first run';
COMMENT ON COLUMN public.throughput.cursor IS 'samples of the epoch already used';
COMMENT ON COLUMN public.throughput.samples IS 'samples used in the stretch, over all ranks';
COMMENT ON COLUMN public.throughput.seconds IS 'length of the stretch, seconds';
COMMENT ON COLUMN public.throughput.batch IS 'global batch, samples';
COMMENT ON COLUMN public.throughput.lr_factor IS 'learning rate over the one set for the base batch';
COMMENT ON COLUMN public.throughput.loss IS 'mean training loss over the stretch';
COMMENT ON COLUMN public.throughput.noise IS 'gradient noise scale, samples';
COMMENT ON COLUMN public.throughput.progress IS 'progress since the job''s first run, samples of the base batch';
COMMENT ON COLUMN public.throughput.nonfinite IS 'steps with a loss that is not a finite number; they are not in the mean';
CREATE VIEW public.scaling WITH (security_invoker='true') AS
 SELECT v.cluster,
    v.job_id,
    v.submit_time,
    v.name,
    v.user_name,
    v.nodes,
    v.gpus_per_node,
    v.gpus,
    v.batch,
    v.reports,
    v.measured_s,
    v.samples_per_s,
    v.speed_up,
    v.gpu_efficiency,
    v.statistical_efficiency,
    v.goodput
   FROM ( SELECT m.cluster,
            m.job_id,
            m.submit_time,
            m.name,
            m.user_name,
            m.nodes,
            m.gpus_per_node,
            m.gpus,
            m.batch,
            m.reports,
            m.measured_s,
            m.samples_per_s,
            m.statistical_efficiency,
            (m.samples_per_s / first_value(m.samples_per_s) OVER smallest) AS speed_up,
            ((m.samples_per_s / (m.gpus)::double precision) / first_value((m.samples_per_s / (m.gpus)::double precision)) OVER smallest) AS gpu_efficiency,
            (m.samples_per_s * m.statistical_efficiency) AS goodput
           FROM ( SELECT c.name AS cluster,
                    j.job_id,
                    j.submit_time,
                    j.name,
                    j.user_name,
                    r.nodes,
                    r.gpus_per_node,
                        CASE
                            WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                            ELSE (0)::bigint
                        END AS gpus,
                    t.batch,
                    count(*) AS reports,
                    sum(t.seconds) AS measured_s,
                    ((sum((1.0 * (t.samples)::numeric)))::double precision / sum(t.seconds)) AS samples_per_s,
                    (sum(
                        CASE
                            WHEN (t.noise > (0)::double precision) THEN ((t.seconds * (t.noise + (j.base_batch)::double precision)) / (t.noise + (
                            CASE
                                WHEN (t.batch > j.base_batch) THEN t.batch
                                ELSE j.base_batch
                            END)::double precision))
                            ELSE NULL::double precision
                        END) / sum(
                        CASE
                            WHEN ((t.noise > (0)::double precision) AND (j.base_batch > 0)) THEN t.seconds
                            ELSE NULL::double precision
                        END)) AS statistical_efficiency
                   FROM (((public.clusters c
                     CROSS JOIN public.jobs j)
                     CROSS JOIN public.runs r)
                     CROSS JOIN public.throughput t)
                  WHERE ((j.cluster_id = c.id) AND (r.job_id = j.id) AND (t.run_id = r.id) AND (
                        CASE
                            WHEN ((r.nodes < 1000000) AND (r.gpus_per_node < 1000000)) THEN (r.nodes * r.gpus_per_node)
                            ELSE (0)::bigint
                        END > 0) AND (t.seconds > (0.000001)::double precision) AND (t.samples > 0))
                  GROUP BY c.name, j.job_id, j.submit_time, j.name, j.user_name, r.nodes, r.gpus_per_node, t.batch) m
          WINDOW smallest AS (PARTITION BY m.cluster, m.job_id, m.submit_time ORDER BY m.gpus, m.nodes, m.batch)) v;
CREATE VIEW public.what_if WITH (security_invoker='true') AS
 SELECT v.cluster,
    v.job_id,
    v.submit_time,
    v.name,
    v.user_name,
    v.requested_nodes,
    v.requested_gpus_per_node,
    v.batch,
    v.samples,
    v.measured_s,
    v.samples_per_s,
    v.wait_s,
    v.jct_s,
    v.predicted_jct_s,
    v.speed_up,
    v.resizes
   FROM ( SELECT w.cluster,
            w.job_id,
            w.submit_time,
            w.name,
            w.user_name,
            w.requested_nodes,
            w.requested_gpus_per_node,
            w.batch,
            w.samples,
            w.measured_s,
            w.samples_per_s,
            w.wait_s,
            w.jct_s,
            w.resizes,
            (w.wait_s + (w.samples / w.samples_per_s)) AS predicted_jct_s,
            ((w.wait_s + (w.samples / w.samples_per_s)) / w.jct_s) AS speed_up
           FROM ( SELECT c.name AS cluster,
                    j.job_id,
                    j.submit_time,
                    j.name,
                    j.user_name,
                    j.requested_nodes,
                    j.requested_gpus_per_node,
                    f.batch,
                    ( SELECT (((r.cursor)::numeric + ((r.epoch)::numeric *
                                CASE
                                    WHEN (j.dataset > 0) THEN (1.0 * (j.dataset)::numeric)
                                    ELSE ( SELECT avg(e.samples) AS avg
                                       FROM (public.runs o
                                         CROSS JOIN public.epochs e)
                                      WHERE ((o.job_id = j.id) AND (e.run_id = o.id)))
                                END)))::double precision AS float8
                           FROM public.runs r
                          WHERE ((r.job_id = j.id) AND (r.epoch IS NOT NULL))
                          ORDER BY r.restart DESC
                         LIMIT 1) AS samples,
                    ( SELECT sum(t.seconds) AS sum
                           FROM (public.runs r
                             CROSS JOIN public.throughput t)
                          WHERE ((r.job_id = j.id) AND (t.run_id = r.id) AND (r.nodes = j.requested_nodes) AND (r.gpus_per_node = j.requested_gpus_per_node) AND (t.batch = f.batch) AND (t.seconds > (0.000001)::double precision) AND (t.samples > 0))) AS measured_s,
                    ( SELECT ((sum((1.0 * (t.samples)::numeric)))::double precision / sum(t.seconds))
                           FROM (public.runs r
                             CROSS JOIN public.throughput t)
                          WHERE ((r.job_id = j.id) AND (t.run_id = r.id) AND (r.nodes = j.requested_nodes) AND (r.gpus_per_node = j.requested_gpus_per_node) AND (t.batch = f.batch) AND (t.seconds > (0.000001)::double precision) AND (t.samples > 0))) AS samples_per_s,
                    (f.hello_time - j.submit_time) AS wait_s,
                    (j.end_time - j.submit_time) AS jct_s,
                    ( SELECT count(*) AS count
                           FROM public.resizes z
                          WHERE ((z.job_id = j.id) AND (z.state = 'done'::text) AND (z.ended IS NOT NULL) AND (z.restart >= 0))) AS resizes
                   FROM ((public.clusters c
                     CROSS JOIN public.jobs j)
                     CROSS JOIN public.runs f)
                  WHERE ((j.cluster_id = c.id) AND (f.job_id = j.id) AND (f.restart = 0) AND (j.state = 'COMPLETED'::text) AND (j.end_time > j.submit_time))) w) v;
ALTER TABLE ONLY public.actions ALTER COLUMN id SET DEFAULT nextval('public.actions_id_seq'::regclass);
ALTER TABLE ONLY public.clusters ALTER COLUMN id SET DEFAULT nextval('public.clusters_id_seq'::regclass);
ALTER TABLE ONLY public.decisions ALTER COLUMN id SET DEFAULT nextval('public.decisions_id_seq'::regclass);
ALTER TABLE ONLY public.jobs ALTER COLUMN id SET DEFAULT nextval('public.jobs_id_seq'::regclass);
ALTER TABLE ONLY public.nodes ALTER COLUMN id SET DEFAULT nextval('public.nodes_id_seq'::regclass);
ALTER TABLE ONLY public.resizes ALTER COLUMN id SET DEFAULT nextval('public.resizes_id_seq'::regclass);
ALTER TABLE ONLY public.runs ALTER COLUMN id SET DEFAULT nextval('public.runs_id_seq'::regclass);
COPY public.accounting (job_id, time_limit_s, import_time) FROM stdin;
6	\N	1795347547.7026064
\.
COPY public.actions (id, cluster_id, "time", user_name, action, detail) FROM stdin;
1	1	2000	ops	run --act	
\.
COPY public.alembic_version (version_num) FROM stdin;
0009
\.
COPY public.batch_changes (run_id, number, "time", step, batch, lr_factor, order_number, passes, ramp) FROM stdin;
1	33	2611	22	128	2	9	2	100
\.
COPY public.checkpoints (run_id, number, "time", name, epoch, cursor, step, bytes, seconds, order_number, stall_s) FROM stdin;
1	32	2610	step-21	2	0	21	1099511627776	1.25	9	0.5
\.
COPY public.clusters (id, name) FROM stdin;
1	gres
\.
COPY public.decision_alternatives (decision_id, job_id, rank, nodes, gpus_per_node, batch, worth) FROM stdin;
2	1	0	1	4	256	2
2	1	1	0	0	0	1
\.
COPY public.decision_jobs (decision_id, job_id, nodes, gpus_per_node, batch, from_nodes, from_gpus_per_node, from_batch, reason, acted, outcome, reason_code, reason_arguments, outcome_code, outcome_arguments) FROM stdin;
1	1	1	4	256	1	1	64	reason 7	f		gains	{"gpus": 4}		{}
1	3	1	4	256	1	1	64	reason 8	f		gains	{"gpus": 4}		{}
2	1	1	4	256	1	1	64	reason 7	f		gains	{"gpus": 4}		{}
\.
COPY public.decisions (id, cluster_id, "time", policy, mode, score, seconds, generations) FROM stdin;
1	1	2400	ones	act	3.5	0.1	\N
2	1	2450	ones	act	3.5	0.1	\N
\.
COPY public.epochs (run_id, number, "time", epoch, step, samples, loss, accuracy, nonfinite) FROM stdin;
1	30	2030	0	30	1000	1	0.3	0
1	31	2031	1	31	1000	0.9	0.4	0
2	3	3500	2	30	1000	0.7	0.6	0
3	30	2030	0	30	1000	1	0.3	0
3	31	2031	1	31	1000	0.9	0.4	0
4	3	3500	2	30	1000	0.7	0.6	0
\.
COPY public.health (cluster_id, "time", mode, interval_s, tick_time, tick_s, running, waiting, gpus, error, error_time) FROM stdin;
1	2000	act	30	\N	\N	\N	\N	\N		\N
\.
COPY public.jobs (id, cluster_id, job_id, submit_time, name, user_name, account, partition, comment, work_dir, requested_nodes, requested_gpus_per_node, restart, elastic, refusal, state, end_time, exit_code, report_note, base_batch, max_batch, max_local_batch, dataset, epochs, deferred_until, max_passes, refusal_code, refusal_arguments) FROM stdin;
1	1	7	1007	job7	alice					1	2	1	t		RUNNING	\N	\N		64	512	128	1000	10	\N	1		{}
3	1	8	1008	job8	bob					1	2	1	t		RUNNING	\N	\N		64	512	128	1000	10	\N	1		{}
5	1	9	1009	Zoë	alice					1	2	0	f	no room	PENDING	\N	\N		\N	\N	\N	\N	\N	5000	\N		{}
6	1	11	100	job11	alice					1	2	0	t		COMPLETED	300	\N		\N	\N	\N	\N	\N	\N	\N		{}
\.
COPY public.leaders (cluster_id, term, holder, since, beat) FROM stdin;
1	1	host:1	2000	2000
\.
COPY public.node_changes (node_id, "time", state, usable, gpus, partitions) FROM stdin;
1	2000	UP	t	4	gpu
\.
COPY public.nodes (id, cluster_id, name) FROM stdin;
1	1	n1
\.
COPY public.resize_steps (resize_id, sequence, state, "time", detail, detail_code, detail_arguments) FROM stdin;
1	0	ordered	2500			{}
1	1	drained	2600	step 21		{}
1	2	done	3010	running at 1x4		{}
2	0	ordered	2500			{}
2	1	drained	2600	step 21		{}
2	2	done	3010	running at 1x4		{}
\.
COPY public.resizes (id, job_id, decision_id, restart, old_nodes, old_gpus_per_node, old_batch, new_nodes, new_gpus_per_node, new_batch, state, order_number, started, deadline, ended, outcome, pause_s, outcome_code, outcome_arguments) FROM stdin;
1	1	\N	0	1	1	64	1	4	256	done	9	2500	\N	3010	running at 1x4	410		{}
2	3	\N	0	1	1	64	1	4	256	done	9	2500	\N	3010	running at 1x4	410		{}
\.
COPY public.rollups (run_id, stretch_s, number) FROM stdin;
1	60	3
\.
COPY public.runs (id, job_id, restart, nodes, gpus_per_node, node_list, start_time, end_time, batch, lr_factor, checkpoint, launch_s, group_s, load_s, end_reason, exit_code, note, epoch, cursor, step, first_loss, hello_time, report_time, report_offset, report_number, noise, progress, queue_s, import_s, first_step_s, resizes, attempts, hello_number, nonfinite, nonfinite_step) FROM stdin;
2	1	1	1	4	n1	3000	\N	256	4	step-21	2	0.25	0.75	\N	\N	\N	3	0	30	2	3010	3500	50	4	\N	\N	105	1.5	0.5	1	0	1	\N	\N
3	3	0	1	1	n1	2000	2900	64	1		0	0	0	REQUEUED	\N	\N	2	0	31	2	2001	2031	100	31	\N	\N	0	0	\N	0	0	1	\N	\N
4	3	1	1	4	n1	3000	\N	256	4	step-21	2	0.25	0.75	\N	\N	\N	3	0	30	2	3010	3500	50	4	\N	\N	105	1.5	0.5	1	0	1	\N	\N
1	1	0	1	1	n1	2000	2900	64	1		0	0	0	REQUEUED	\N	\N	2	0	31	2	2001	2611	200	33	\N	\N	0	0	\N	0	0	1	\N	\N
5	6	0	1	1	n1	200	300	\N	\N	\N	\N	\N	\N	\N	\N	\N	\N	\N	\N	\N	\N	\N	0	0	\N	\N	\N	\N	\N	\N	\N	\N	\N	\N
\.
COPY public.throughput (run_id, number, "time", epoch, step, cursor, samples, seconds, batch, lr_factor, loss, noise, progress, nonfinite) FROM stdin;
1	2	2002	0	2	128	64	0.5	64	1	2	\N	\N	0
1	3	2003	0	3	192	64	0.5	64	1	2	\N	\N	0
1	4	2004	0	4	256	64	0.5	64	1	2	\N	\N	0
1	5	2005	0	5	320	64	0.5	64	1	2	\N	\N	0
1	6	2006	0	6	384	64	0.5	64	1	2	\N	\N	0
1	7	2007	0	7	448	64	0.5	64	1	2	\N	\N	0
1	8	2008	0	8	512	64	0.5	64	1	2	\N	\N	0
1	9	2009	0	9	576	64	0.5	64	1	2	\N	\N	0
1	10	2010	0	10	640	64	0.5	64	1	2	\N	\N	0
1	11	2011	0	11	704	64	0.5	64	1	2	\N	\N	0
1	12	2012	1	12	768	64	0.5	64	1	2	\N	\N	0
1	13	2013	1	13	832	64	0.5	64	1	2	\N	\N	0
1	14	2014	1	14	896	64	0.5	64	1	2	\N	\N	0
1	15	2015	1	15	960	64	0.5	64	1	2	\N	\N	0
1	16	2016	1	16	1024	64	0.5	64	1	2	\N	\N	0
1	17	2017	1	17	1088	64	0.5	64	1	2	\N	\N	0
1	18	2018	1	18	1152	64	0.5	64	1	2	\N	\N	0
1	19	2019	1	19	1216	64	0.5	64	1	2	\N	\N	0
1	20	2020	1	20	1280	64	0.5	64	1	2	\N	\N	0
1	21	2021	1	21	1344	64	0.5	64	1	2	\N	\N	0
2	2	3011	2	22	256	256	0.5	256	1	2	\N	\N	0
3	2	2002	0	2	128	64	0.5	64	1	2	\N	\N	0
3	3	2003	0	3	192	64	0.5	64	1	2	\N	\N	0
3	4	2004	0	4	256	64	0.5	64	1	2	\N	\N	0
3	5	2005	0	5	320	64	0.5	64	1	2	\N	\N	0
3	6	2006	0	6	384	64	0.5	64	1	2	\N	\N	0
3	7	2007	0	7	448	64	0.5	64	1	2	\N	\N	0
3	8	2008	0	8	512	64	0.5	64	1	2	\N	\N	0
3	9	2009	0	9	576	64	0.5	64	1	2	\N	\N	0
3	10	2010	0	10	640	64	0.5	64	1	2	\N	\N	0
3	11	2011	0	11	704	64	0.5	64	1	2	\N	\N	0
3	12	2012	1	12	768	64	0.5	64	1	2	\N	\N	0
3	13	2013	1	13	832	64	0.5	64	1	2	\N	\N	0
3	14	2014	1	14	896	64	0.5	64	1	2	\N	\N	0
3	15	2015	1	15	960	64	0.5	64	1	2	\N	\N	0
3	16	2016	1	16	1024	64	0.5	64	1	2	\N	\N	0
3	17	2017	1	17	1088	64	0.5	64	1	2	\N	\N	0
3	18	2018	1	18	1152	64	0.5	64	1	2	\N	\N	0
3	19	2019	1	19	1216	64	0.5	64	1	2	\N	\N	0
3	20	2020	1	20	1280	64	0.5	64	1	2	\N	\N	0
3	21	2021	1	21	1344	64	0.5	64	1	2	\N	\N	0
4	2	3011	2	22	256	256	0.5	256	1	2	\N	\N	0
\.
SELECT pg_catalog.setval('public.actions_id_seq', 1, true);
SELECT pg_catalog.setval('public.clusters_id_seq', 1, true);
SELECT pg_catalog.setval('public.decisions_id_seq', 2, true);
SELECT pg_catalog.setval('public.jobs_id_seq', 6, true);
SELECT pg_catalog.setval('public.nodes_id_seq', 1, true);
SELECT pg_catalog.setval('public.resizes_id_seq', 2, true);
SELECT pg_catalog.setval('public.runs_id_seq', 5, true);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.accounting
    ADD CONSTRAINT pk_accounting PRIMARY KEY (job_id);
ALTER TABLE ONLY public.actions
    ADD CONSTRAINT pk_actions PRIMARY KEY (id);
ALTER TABLE ONLY public.batch_changes
    ADD CONSTRAINT pk_batch_changes PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT pk_checkpoints PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.clusters
    ADD CONSTRAINT pk_clusters PRIMARY KEY (id);
ALTER TABLE ONLY public.decision_alternatives
    ADD CONSTRAINT pk_decision_alternatives PRIMARY KEY (decision_id, job_id, rank);
ALTER TABLE ONLY public.decision_jobs
    ADD CONSTRAINT pk_decision_jobs PRIMARY KEY (decision_id, job_id);
ALTER TABLE ONLY public.decisions
    ADD CONSTRAINT pk_decisions PRIMARY KEY (id);
ALTER TABLE ONLY public.epochs
    ADD CONSTRAINT pk_epochs PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.health
    ADD CONSTRAINT pk_health PRIMARY KEY (cluster_id);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY (id);
ALTER TABLE ONLY public.leaders
    ADD CONSTRAINT pk_leaders PRIMARY KEY (cluster_id);
ALTER TABLE ONLY public.node_changes
    ADD CONSTRAINT pk_node_changes PRIMARY KEY (node_id, "time");
ALTER TABLE ONLY public.nodes
    ADD CONSTRAINT pk_nodes PRIMARY KEY (id);
ALTER TABLE ONLY public.resize_steps
    ADD CONSTRAINT pk_resize_steps PRIMARY KEY (resize_id, sequence);
ALTER TABLE ONLY public.resizes
    ADD CONSTRAINT pk_resizes PRIMARY KEY (id);
ALTER TABLE ONLY public.rollups
    ADD CONSTRAINT pk_rollups PRIMARY KEY (run_id);
ALTER TABLE ONLY public.runs
    ADD CONSTRAINT pk_runs PRIMARY KEY (id);
ALTER TABLE ONLY public.throughput
    ADD CONSTRAINT pk_throughput PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.clusters
    ADD CONSTRAINT uq_clusters_name UNIQUE (name);
CREATE INDEX ix_decision_alternatives_job_id ON public.decision_alternatives USING btree (job_id);
CREATE INDEX ix_decision_jobs_job_id ON public.decision_jobs USING btree (job_id);
CREATE INDEX ix_jobs_cluster_id_end_time ON public.jobs USING btree (cluster_id, end_time);
CREATE INDEX ix_throughput_time ON public.throughput USING brin ("time");
CREATE UNIQUE INDEX uq_actions_cluster_id_time_user_name_action ON public.actions USING btree (cluster_id, "time", user_name, action);
CREATE UNIQUE INDEX uq_decisions_cluster_id_time_policy ON public.decisions USING btree (cluster_id, "time", policy);
CREATE UNIQUE INDEX uq_jobs_cluster_id_job_id_submit_time ON public.jobs USING btree (cluster_id, job_id, submit_time);
CREATE UNIQUE INDEX uq_nodes_cluster_id_name ON public.nodes USING btree (cluster_id, name);
CREATE UNIQUE INDEX uq_resizes_job_id_started ON public.resizes USING btree (job_id, started);
CREATE UNIQUE INDEX uq_resizes_open ON public.resizes USING btree (job_id) WHERE (ended IS NULL);
CREATE UNIQUE INDEX uq_runs_job_id_restart ON public.runs USING btree (job_id, restart);
ALTER TABLE ONLY public.accounting
    ADD CONSTRAINT fk_accounting_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.actions
    ADD CONSTRAINT fk_actions_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.batch_changes
    ADD CONSTRAINT fk_batch_changes_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT fk_checkpoints_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
ALTER TABLE ONLY public.decision_alternatives
    ADD CONSTRAINT fk_decision_alternatives_decision_id_decisions FOREIGN KEY (decision_id) REFERENCES public.decisions(id);
ALTER TABLE ONLY public.decision_alternatives
    ADD CONSTRAINT fk_decision_alternatives_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.decision_jobs
    ADD CONSTRAINT fk_decision_jobs_decision_id_decisions FOREIGN KEY (decision_id) REFERENCES public.decisions(id);
ALTER TABLE ONLY public.decision_jobs
    ADD CONSTRAINT fk_decision_jobs_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.decisions
    ADD CONSTRAINT fk_decisions_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.epochs
    ADD CONSTRAINT fk_epochs_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
ALTER TABLE ONLY public.health
    ADD CONSTRAINT fk_health_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT fk_jobs_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.leaders
    ADD CONSTRAINT fk_leaders_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.node_changes
    ADD CONSTRAINT fk_node_changes_node_id_nodes FOREIGN KEY (node_id) REFERENCES public.nodes(id);
ALTER TABLE ONLY public.nodes
    ADD CONSTRAINT fk_nodes_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.resize_steps
    ADD CONSTRAINT fk_resize_steps_resize_id_resizes FOREIGN KEY (resize_id) REFERENCES public.resizes(id);
ALTER TABLE ONLY public.resizes
    ADD CONSTRAINT fk_resizes_decision_id_decisions FOREIGN KEY (decision_id) REFERENCES public.decisions(id);
ALTER TABLE ONLY public.resizes
    ADD CONSTRAINT fk_resizes_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.rollups
    ADD CONSTRAINT fk_rollups_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
ALTER TABLE ONLY public.runs
    ADD CONSTRAINT fk_runs_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.throughput
    ADD CONSTRAINT fk_throughput_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
