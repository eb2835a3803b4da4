-- Sizes and batches of a job, the fastest first. If the job reports its gradient noise scale, the fastest has the
-- highest goodput: throughput times statistical efficiency. Sizes that were measured for only a few steps are
-- uncertain: see measured_s. Parameter job_id is Slurm's job id; if the id was used again, it means the newest job.
--: job_id int
SELECT cluster, nodes, gpus_per_node, gpus, batch, measured_s, samples_per_s, goodput
FROM scaling s
WHERE job_id = :job_id AND NOT EXISTS (SELECT 1 FROM scaling later WHERE later.cluster = s.cluster
                                          AND later.job_id = :job_id AND later.submit_time > s.submit_time)
ORDER BY cluster, goodput DESC NULLS LAST, samples_per_s DESC;
