-- A job's epochs in order, with the size at which each ended: loss and accuracy over time and GPU-hours.
-- An epoch that was done again after a lost checkpoint is there twice. Parameter job_id, Slurm's own.
--: job_id int
SELECT j.submit_time, r.restart, r.nodes * r.gpus_per_node AS gpus, e.epoch, e.time, e.time - j.submit_time AS since_s,
       e.loss, e.accuracy
FROM jobs j
JOIN runs r ON r.job_id = j.id
JOIN epochs e ON e.run_id = r.id
WHERE j.job_id = :job_id
ORDER BY j.submit_time, r.restart, e.number;
