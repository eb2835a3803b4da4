-- Time that jobs waited for their first start, by the number of GPUs that they requested.
SELECT cluster, requested_gpus, COUNT(*) AS jobs, AVG(queueing_s) AS queueing_s, MAX(queueing_s) AS longest_s
FROM job_summary
WHERE start_time IS NOT NULL
GROUP BY cluster, requested_gpus
ORDER BY cluster, requested_gpus;
