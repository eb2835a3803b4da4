-- Decisions that were to change something for a job, with their reasons. Parameter job_id is Slurm's job id.
--: job_id int
SELECT cluster, decided, policy, action, from_gpus, gpus, from_batch, batch, reason, outcome
FROM decisions_explained
WHERE job_id = :job_id AND action NOT IN ('keeps', 'waits')
ORDER BY cluster, time;
