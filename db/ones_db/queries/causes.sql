-- Reasons of decisions and of their outcomes, by code: the number of jobs, how often, and the first and last time.
-- Parameters since and until.
--: since time
--: until time
SELECT code, COUNT(DISTINCT job) AS jobs, COUNT(*) AS times, MIN(time) AS first_time, MAX(time) AS last_time
FROM (SELECT reason_code AS code, cluster || '/' || job_id || '/' || submit_time AS job, time
      FROM decisions_explained WHERE time >= :since AND time < :until
      UNION ALL
      SELECT outcome_code, cluster || '/' || job_id || '/' || submit_time, time
      FROM decisions_explained WHERE time >= :since AND time < :until) causes
WHERE code <> ''
GROUP BY code
ORDER BY jobs DESC, times DESC, code;
