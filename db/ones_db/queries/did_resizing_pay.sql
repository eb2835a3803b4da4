-- Whether resizing paid, by user and mechanism (requeue, blocks, or both in one job): the mean JCT of the resized jobs
-- that completed, and the JCT predicted for them at the requested size. The prediction uses each job's own measurement
-- at that size. Jobs that were never measured there are counted, but have no prediction.
SELECT cluster, user_name, mechanism, COUNT(*) AS resized_jobs, COUNT(predicted_jct_s) AS predicted,
       AVG(CASE WHEN predicted_jct_s IS NOT NULL THEN jct_s END) AS jct_s, AVG(predicted_jct_s) AS predicted_jct_s,
       SUM(predicted_jct_s - jct_s) / 3600.0 AS saved_hours
FROM (SELECT w.*, CASE WHEN by_blocks = 0 THEN 'requeue' WHEN by_blocks = resizes THEN 'blocks' ELSE 'both' END
             AS mechanism
      FROM what_if w WHERE resizes > 0) resized
GROUP BY cluster, user_name, mechanism
ORDER BY cluster, user_name, mechanism;
