-- How long jobs waited for their first start, by the GPUs that they asked for.
SELECT cluster, requested_gpus, COUNT(*) AS jobs, AVG(queueing_s) AS queueing_s, MAX(queueing_s) AS longest_s
FROM job_summary
WHERE start_time IS NOT NULL
GROUP BY cluster, requested_gpus
ORDER BY cluster, requested_gpus;
