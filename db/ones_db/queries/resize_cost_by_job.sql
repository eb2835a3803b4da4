-- What resizing cost a user's jobs: how many there were, how long each job stood still for them in all, and what part
-- of its time that is. Resizes of a job that waited cost it nothing. Parameter user_name.
SELECT j.job_id, j.name, j.resizes, j.pause_s, j.pause_s / j.resizes AS pause_each_s, j.jct_s,
       j.pause_s / j.jct_s AS part_of_jct
FROM job_summary j
WHERE j.user_name = :user_name AND j.resizes > 0
ORDER BY j.pause_s DESC, j.job_id;
