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
    outcome text NOT NULL
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
    max_passes bigint
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
CREATE SEQUENCE public.jobs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.jobs_id_seq OWNED BY public.jobs.id;
CREATE TABLE public.resize_steps (
    resize_id bigint NOT NULL,
    sequence bigint NOT NULL,
    state text NOT NULL,
    "time" double precision NOT NULL,
    detail text NOT NULL
);
COMMENT ON TABLE public.resize_steps IS 'every state a resize went through';
COMMENT ON COLUMN public.resize_steps.resize_id IS 'resize';
COMMENT ON COLUMN public.resize_steps.sequence IS 'from 0, in order';
COMMENT ON COLUMN public.resize_steps.state IS 'state it entered';
COMMENT ON COLUMN public.resize_steps."time" IS 'when, Unix seconds';
COMMENT ON COLUMN public.resize_steps.detail IS 'what was found or done, in words';
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
    pause_s double precision
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
CREATE SEQUENCE public.resizes_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.resizes_id_seq OWNED BY public.resizes.id;
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
)
PARTITION BY RANGE (run_id);
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
CREATE TABLE public.throughput_0 (
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
ALTER TABLE ONLY public.throughput ATTACH PARTITION public.throughput_0 FOR VALUES FROM (MINVALUE) TO ('16777216');
ALTER TABLE ONLY public.clusters ALTER COLUMN id SET DEFAULT nextval('public.clusters_id_seq'::regclass);
ALTER TABLE ONLY public.decisions ALTER COLUMN id SET DEFAULT nextval('public.decisions_id_seq'::regclass);
ALTER TABLE ONLY public.jobs ALTER COLUMN id SET DEFAULT nextval('public.jobs_id_seq'::regclass);
ALTER TABLE ONLY public.resizes ALTER COLUMN id SET DEFAULT nextval('public.resizes_id_seq'::regclass);
ALTER TABLE ONLY public.runs ALTER COLUMN id SET DEFAULT nextval('public.runs_id_seq'::regclass);
COPY public.alembic_version (version_num) FROM stdin;
0004
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
COPY public.decision_jobs (decision_id, job_id, nodes, gpus_per_node, batch, from_nodes, from_gpus_per_node, from_batch, reason, acted, outcome) FROM stdin;
1	1	1	4	256	1	1	64	reason 7	f	
1	2	1	4	256	1	1	64	reason 8	f	
\.
COPY public.decisions (id, cluster_id, "time", policy, mode, score, seconds, generations) FROM stdin;
1	1	2400	ones	act	3.5	0.1	\N
\.
COPY public.epochs (run_id, number, "time", epoch, step, samples, loss, accuracy, nonfinite) FROM stdin;
1	30	2030	0	30	1000	1	0.3	0
1	31	2031	1	31	1000	0.9	0.4	0
2	3	3500	2	30	1000	0.7	0.6	0
3	30	2030	0	30	1000	1	0.3	0
3	31	2031	1	31	1000	0.9	0.4	0
4	3	3500	2	30	1000	0.7	0.6	0
\.
COPY public.jobs (id, cluster_id, job_id, submit_time, name, user_name, account, partition, comment, work_dir, requested_nodes, requested_gpus_per_node, restart, elastic, refusal, state, end_time, exit_code, report_note, base_batch, max_batch, max_local_batch, dataset, epochs, deferred_until, max_passes) FROM stdin;
1	1	7	1007	job7	alice					1	2	1	t		RUNNING	\N	\N		64	512	128	1000	10	\N	1
2	1	8	1008	job8	bob					1	2	1	t		RUNNING	\N	\N		64	512	128	1000	10	\N	1
3	1	9	1009	Zoë	alice					1	2	0	f	no room	PENDING	\N	\N		\N	\N	\N	\N	\N	5000	\N
\.
COPY public.resize_steps (resize_id, sequence, state, "time", detail) FROM stdin;
1	0	ordered	2500	
1	1	drained	2600	step 21
1	2	done	3010	running at 1x4
2	0	ordered	2500	
2	1	drained	2600	step 21
2	2	done	3010	running at 1x4
\.
COPY public.resizes (id, job_id, decision_id, restart, old_nodes, old_gpus_per_node, old_batch, new_nodes, new_gpus_per_node, new_batch, state, order_number, started, deadline, ended, outcome, pause_s) FROM stdin;
1	1	\N	0	1	1	64	1	4	256	done	9	2500	\N	3010	running at 1x4	410
2	2	\N	0	1	1	64	1	4	256	done	9	2500	\N	3010	running at 1x4	410
\.
COPY public.runs (id, job_id, restart, nodes, gpus_per_node, node_list, start_time, end_time, batch, lr_factor, checkpoint, launch_s, group_s, load_s, end_reason, exit_code, note, epoch, cursor, step, first_loss, hello_time, report_time, report_offset, report_number, noise, progress, queue_s, import_s, first_step_s, resizes, attempts, hello_number, nonfinite, nonfinite_step) FROM stdin;
1	1	0	1	1	n1	2000	2900	64	1		0	0	0	REQUEUED	\N	\N	2	0	31	2	2001	2611	200	33	\N	\N	0	0	\N	0	0	1	\N	\N
2	1	1	1	4	n1	3000	\N	256	4	step-21	2	0.25	0.75	\N	\N	\N	3	0	30	2	3010	3500	50	4	\N	\N	105	1.5	0.5	1	0	1	\N	\N
3	2	0	1	1	n1	2000	2900	64	1		0	0	0	REQUEUED	\N	\N	2	0	31	2	2001	2031	100	31	\N	\N	0	0	\N	0	0	1	\N	\N
4	2	1	1	4	n1	3000	\N	256	4	step-21	2	0.25	0.75	\N	\N	\N	3	0	30	2	3010	3500	50	4	\N	\N	105	1.5	0.5	1	0	1	\N	\N
\.
COPY public.throughput_0 (run_id, number, "time", epoch, step, cursor, samples, seconds, batch, lr_factor, loss, noise, progress, nonfinite) FROM stdin;
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
SELECT pg_catalog.setval('public.clusters_id_seq', 2, false);
SELECT pg_catalog.setval('public.decisions_id_seq', 2, false);
SELECT pg_catalog.setval('public.jobs_id_seq', 4, false);
SELECT pg_catalog.setval('public.resizes_id_seq', 3, false);
SELECT pg_catalog.setval('public.runs_id_seq', 5, false);
ALTER TABLE ONLY public.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);
ALTER TABLE ONLY public.batch_changes
    ADD CONSTRAINT pk_batch_changes PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT pk_checkpoints PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.clusters
    ADD CONSTRAINT pk_clusters PRIMARY KEY (id);
ALTER TABLE ONLY public.decision_jobs
    ADD CONSTRAINT pk_decision_jobs PRIMARY KEY (decision_id, job_id);
ALTER TABLE ONLY public.decisions
    ADD CONSTRAINT pk_decisions PRIMARY KEY (id);
ALTER TABLE ONLY public.epochs
    ADD CONSTRAINT pk_epochs PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY (id);
ALTER TABLE ONLY public.resize_steps
    ADD CONSTRAINT pk_resize_steps PRIMARY KEY (resize_id, sequence);
ALTER TABLE ONLY public.resizes
    ADD CONSTRAINT pk_resizes PRIMARY KEY (id);
ALTER TABLE ONLY public.runs
    ADD CONSTRAINT pk_runs PRIMARY KEY (id);
ALTER TABLE ONLY public.throughput
    ADD CONSTRAINT pk_throughput PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.throughput_0
    ADD CONSTRAINT throughput_0_pkey PRIMARY KEY (run_id, number);
ALTER TABLE ONLY public.clusters
    ADD CONSTRAINT uq_clusters_name UNIQUE (name);
CREATE INDEX ix_decision_jobs_job_id ON public.decision_jobs USING btree (job_id);
CREATE INDEX ix_jobs_cluster_id_end_time ON public.jobs USING btree (cluster_id, end_time);
CREATE INDEX ix_throughput_time ON ONLY public.throughput USING brin ("time");
CREATE INDEX throughput_0_time_idx ON public.throughput_0 USING brin ("time");
CREATE UNIQUE INDEX uq_decisions_cluster_id_time_policy ON public.decisions USING btree (cluster_id, "time", policy);
CREATE UNIQUE INDEX uq_jobs_cluster_id_job_id_submit_time ON public.jobs USING btree (cluster_id, job_id, submit_time);
CREATE UNIQUE INDEX uq_resizes_job_id_started ON public.resizes USING btree (job_id, started);
CREATE UNIQUE INDEX uq_resizes_open ON public.resizes USING btree (job_id) WHERE (ended IS NULL);
CREATE UNIQUE INDEX uq_runs_job_id_restart ON public.runs USING btree (job_id, restart);
ALTER INDEX public.pk_throughput ATTACH PARTITION public.throughput_0_pkey;
ALTER INDEX public.ix_throughput_time ATTACH PARTITION public.throughput_0_time_idx;
ALTER TABLE ONLY public.batch_changes
    ADD CONSTRAINT fk_batch_changes_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT fk_checkpoints_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
ALTER TABLE ONLY public.decision_jobs
    ADD CONSTRAINT fk_decision_jobs_decision_id_decisions FOREIGN KEY (decision_id) REFERENCES public.decisions(id);
ALTER TABLE ONLY public.decision_jobs
    ADD CONSTRAINT fk_decision_jobs_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.decisions
    ADD CONSTRAINT fk_decisions_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.epochs
    ADD CONSTRAINT fk_epochs_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT fk_jobs_cluster_id_clusters FOREIGN KEY (cluster_id) REFERENCES public.clusters(id);
ALTER TABLE ONLY public.resize_steps
    ADD CONSTRAINT fk_resize_steps_resize_id_resizes FOREIGN KEY (resize_id) REFERENCES public.resizes(id);
ALTER TABLE ONLY public.resizes
    ADD CONSTRAINT fk_resizes_decision_id_decisions FOREIGN KEY (decision_id) REFERENCES public.decisions(id);
ALTER TABLE ONLY public.resizes
    ADD CONSTRAINT fk_resizes_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE ONLY public.runs
    ADD CONSTRAINT fk_runs_job_id_jobs FOREIGN KEY (job_id) REFERENCES public.jobs(id);
ALTER TABLE public.throughput
    ADD CONSTRAINT fk_throughput_run_id_runs FOREIGN KEY (run_id) REFERENCES public.runs(id);
