-- Who used the GPUs: GPU-hours and runs by user between two moments (parameters since and until, Unix seconds).
-- A run that has not ended counts up to until.
WITH spans AS (
    SELECT j.user_name, j.id AS job, r.nodes * r.gpus_per_node AS gpus,
           CASE WHEN r.start_time < :since THEN :since ELSE r.start_time END AS began,
           CASE WHEN COALESCE(r.end_time, j.end_time, :until) > :until THEN :until
                ELSE COALESCE(r.end_time, j.end_time, :until) END AS ended
    FROM runs r
    JOIN jobs j ON j.id = r.job_id
    WHERE r.start_time IS NOT NULL
)
SELECT user_name, COUNT(DISTINCT job) AS jobs, COUNT(*) AS runs, SUM(gpus * (ended - began)) / 3600.0 AS gpu_hours
FROM spans
WHERE ended > began
GROUP BY user_name
ORDER BY gpu_hours DESC, user_name;
