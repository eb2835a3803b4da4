-- Epochs of a job in order, with the GPUs at the end of each: loss and accuracy over time. An epoch that was repeated
-- after a lost checkpoint is there twice. Parameter job_id is Slurm's job id.
--: job_id int
SELECT c.name AS cluster, j.submit_time, r.restart,
       COALESCE((SELECT m.world FROM memberships m WHERE m.run_id = r.id AND m.number < e.number
                 ORDER BY m.number DESC LIMIT 1), r.nodes * r.gpus_per_node) AS gpus,
       e.epoch, e.time, e.time - j.submit_time AS since_s, e.loss, e.accuracy
FROM jobs j
JOIN clusters c ON c.id = j.cluster_id
JOIN runs r ON r.job_id = j.id
JOIN epochs e ON e.run_id = r.id
WHERE j.job_id = :job_id
ORDER BY c.name, j.submit_time, r.restart, e.number;
