-- GPU-hours by user between two moments, to the second. Parameters since and until. A run that goes on counts to its
-- newest report or decision, and one that was requeued to its last report. For jobs of blocks, the blocks count.
--: since time
--: until time
SELECT user_name, COUNT(*) AS runs,
       SUM(gpus * (CASE WHEN ended > :until THEN :until ELSE ended END
                   - CASE WHEN start_time < :since THEN :since ELSE start_time END)) / 3600.0 AS gpu_hours
FROM (SELECT user_name, gpus, start_time, start_time + running_s AS ended FROM run_timeline r
      WHERE NOT EXISTS (SELECT 1 FROM block_timeline b
                        WHERE b.cluster = r.cluster AND b.job_id = r.job_id AND b.submit_time = r.submit_time)
      UNION ALL SELECT user_name, gpus, start_time, start_time + running_s FROM block_timeline) spans
WHERE ended > :since AND start_time < :until
GROUP BY user_name
ORDER BY gpu_hours DESC, user_name;
