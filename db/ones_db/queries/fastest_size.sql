-- The fastest size for a job, best first. Where it told its gradient noise scale, the fastest is what makes most
-- progress: goodput, its throughput times what a sample is worth at that batch. Sizes that were measured for less
-- than a few steps are little known: look at measured_s. Parameter job_id, Slurm's own; of ids that were used again it
-- is the newest job.
--: job_id int
SELECT cluster, nodes, gpus_per_node, gpus, batch, measured_s, samples_per_s, goodput
FROM scaling s
WHERE job_id = :job_id AND NOT EXISTS (SELECT 1 FROM scaling later WHERE later.cluster = s.cluster
                                          AND later.job_id = :job_id AND later.submit_time > s.submit_time)
ORDER BY cluster, goodput DESC NULLS LAST, samples_per_s DESC;
