-- What resizes cost: each finished resize with its pause, how long it took in all, the checkpoint that its order asked
-- for and how long training stood still for that, and where the time of the start at the new size went, in seconds:
-- waiting in the queue, launching the ranks (import_s of it for imports), building the process group, loading the
-- checkpoint, and the first step. Where ranks were started again within that run (attempts), their last start is told.
-- Of several resizes of one run (the others were rolled back) the last is the one that the start belongs to.
SELECT j.job_id, j.name, z.state, z.old_nodes * z.old_gpus_per_node AS old_gpus,
       z.new_nodes * z.new_gpus_per_node AS new_gpus, z.old_batch, z.new_batch, z.pause_s, z.ended - z.started AS total_s,
       (SELECT SUM(c.seconds) FROM checkpoints c JOIN runs o ON o.id = c.run_id
        WHERE o.job_id = z.job_id AND o.restart = z.restart AND c.order_number = z.order_number) AS checkpoint_s,
       (SELECT SUM(c.stall_s) FROM checkpoints c JOIN runs o ON o.id = c.run_id
        WHERE o.job_id = z.job_id AND o.restart = z.restart AND c.order_number = z.order_number) AS stall_s,
       r.queue_s, r.launch_s, r.import_s, r.group_s, r.load_s, r.first_step_s, r.attempts, z.outcome
FROM resizes z
JOIN jobs j ON j.id = z.job_id
LEFT JOIN runs r ON r.job_id = z.job_id AND r.restart = z.restart + 1 AND z.restart >= 0 AND NOT EXISTS
     (SELECT 1 FROM resizes later WHERE later.job_id = z.job_id AND later.restart = z.restart AND later.id > z.id)
WHERE z.ended IS NOT NULL
ORDER BY z.started;
