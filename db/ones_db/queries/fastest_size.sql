-- The fastest size for a job, best first. Where it told its gradient noise scale, the fastest is what makes most
-- progress: goodput, its throughput times what a sample is worth at that batch. Sizes that were measured for less
-- than a few steps are little known: look at measured_s. Parameter job_id, Slurm's own.
--: job_id int
SELECT nodes, gpus_per_node, gpus, batch, measured_s, samples_per_s, goodput
FROM scaling
WHERE job_id = :job_id
ORDER BY goodput DESC NULLS LAST, samples_per_s DESC;
