-- What was decided for a job, and why, where something was to change. Parameter job_id, Slurm's own.
--: job_id int
SELECT cluster, decided, policy, action, from_gpus, gpus, from_batch, batch, reason, outcome
FROM decisions_explained
WHERE job_id = :job_id AND action NOT IN ('keeps', 'waits')
ORDER BY cluster, time;
