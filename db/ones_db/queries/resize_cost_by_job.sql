-- Cost of resizing a user's jobs, by mechanism: the resizes that took effect while the job ran, its pauses for them,
-- and their share of the JCT. Resizes of a job that waited cost it nothing and are left out. Parameter user_name.
--: user_name text
SELECT j.cluster, j.job_id, j.name, z.mechanism, COUNT(CASE WHEN z.state = 'done' THEN 1 END) AS resizes,
       COALESCE(SUM(z.pause_s), 0.0) AS pause_s,
       COALESCE(SUM(z.pause_s), 0.0) / COUNT(CASE WHEN z.state = 'done' THEN 1 END) AS pause_each_s, j.jct_s,
       COALESCE(SUM(z.pause_s), 0.0) / j.jct_s AS part_of_jct
FROM job_summary j JOIN resize_cost z
     ON z.cluster = j.cluster AND z.job_id = j.job_id AND z.submit_time = j.submit_time AND z.restart >= 0
WHERE j.user_name = :user_name
GROUP BY j.cluster, j.job_id, j.submit_time, j.name, z.mechanism, j.jct_s
HAVING COUNT(CASE WHEN z.state = 'done' THEN 1 END) > 0
ORDER BY COALESCE(SUM(z.pause_s), 0.0) DESC, j.job_id, z.mechanism;
