-- What resizes cost: each finished resize with its pause, how long it took in all, and where the time of the start
-- at the new size went (launching the ranks, building the process group, loading the checkpoint), in seconds.
SELECT j.job_id, j.name, z.state, z.old_nodes * z.old_gpus_per_node AS old_gpus,
       z.new_nodes * z.new_gpus_per_node AS new_gpus, z.old_batch, z.new_batch, z.pause_s, z.ended - z.started AS total_s,
       (SELECT SUM(c.seconds) FROM checkpoints c JOIN runs o ON o.id = c.run_id
        WHERE o.job_id = z.job_id AND o.restart = z.restart AND c.order_number = z.order_number) AS checkpoint_s,
       r.launch_s, r.group_s, r.load_s, z.outcome
FROM resizes z
JOIN jobs j ON j.id = z.job_id
LEFT JOIN runs r ON r.job_id = z.job_id AND r.restart = z.restart + 1
WHERE z.ended IS NOT NULL
ORDER BY z.started;
