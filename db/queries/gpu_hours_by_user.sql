-- Who used the GPUs: GPU-hours and runs by user between two moments (parameters since and until, Unix seconds).
-- A run that goes on counts up to until; one that was requeued, to its last report.
WITH spans AS (
    SELECT j.user_name, j.id AS job, r.nodes * r.gpus_per_node AS gpus, r.start_time AS began,
           COALESCE(r.end_time, CASE WHEN j.restart > r.restart THEN COALESCE(r.report_time, r.start_time) END,
                    j.end_time, :until) AS ended
    FROM runs r
    JOIN jobs j ON j.id = r.job_id
    WHERE r.start_time IS NOT NULL
), cut AS (
    SELECT user_name, job, gpus, CASE WHEN began < :since THEN :since ELSE began END AS began,
           CASE WHEN ended > :until THEN :until ELSE ended END AS ended
    FROM spans
)
SELECT user_name, COUNT(DISTINCT job) AS jobs, COUNT(*) AS runs, SUM(gpus * (ended - began)) / 3600.0 AS gpu_hours
FROM cut
WHERE ended > began
GROUP BY user_name
ORDER BY gpu_hours DESC, user_name;
