-- Scaling of a job: throughput at each shape and global batch, and the speed-up over its smallest size. Parameter
-- job_id is Slurm's job id; if the id was used again, submit_time distinguishes the jobs.
--: job_id int
SELECT cluster, submit_time, name, nodes, gpus_per_node, gpus, batch, measured_s, samples_per_s, speed_up,
       gpu_efficiency
FROM scaling
WHERE job_id = :job_id
ORDER BY cluster, submit_time, gpus, nodes, batch;
