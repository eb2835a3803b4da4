-- Whether resizing paid, by user: the mean JCT of the resized jobs that completed, and what it would have been at the
-- requested size by each job's own measurement. Jobs that were never measured at that size are counted, not guessed.
SELECT user_name, COUNT(*) AS resized_jobs, COUNT(predicted_jct_s) AS predicted,
       AVG(CASE WHEN predicted_jct_s IS NOT NULL THEN jct_s END) AS jct_s, AVG(predicted_jct_s) AS predicted_jct_s,
       SUM(predicted_jct_s - jct_s) / 3600.0 AS saved_hours
FROM what_if
WHERE resizes > 0
GROUP BY user_name
ORDER BY user_name;
