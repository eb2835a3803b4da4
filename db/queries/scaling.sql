-- How one job scales: throughput at each shape and global batch, and the speed-up over its smallest size.
-- Parameter job_id, Slurm's own; of ids that were used again, every submission is a line of its own.
WITH measured AS (
    SELECT j.id AS job, j.name, r.nodes, r.gpus_per_node, r.nodes * r.gpus_per_node AS gpus, t.batch,
           SUM(t.seconds) AS measured_s, SUM(t.samples) / SUM(t.seconds) AS samples_per_s
    FROM jobs j
    JOIN runs r ON r.job_id = j.id
    JOIN throughput t ON t.run_id = r.id
    WHERE j.job_id = :job_id AND r.nodes > 0 AND r.gpus_per_node > 0
    GROUP BY j.id, j.name, r.nodes, r.gpus_per_node, t.batch
    HAVING SUM(t.seconds) > 0
)
SELECT name, nodes, gpus_per_node, gpus, batch, measured_s, samples_per_s,
       samples_per_s / FIRST_VALUE(samples_per_s) OVER smallest AS speed_up,
       samples_per_s / gpus / FIRST_VALUE(samples_per_s / gpus) OVER smallest AS efficiency_per_gpu
FROM measured
WINDOW smallest AS (PARTITION BY job ORDER BY gpus, nodes, batch)
ORDER BY job, gpus, nodes, batch;
