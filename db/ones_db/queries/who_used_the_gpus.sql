-- GPU-hours by user and account since a day (UTC), that day included. Parameter since.
--: since day
SELECT user_name, account, SUM(gpu_hours) AS gpu_hours, COUNT(DISTINCT day) AS days
FROM gpu_hours
WHERE day >= :since
GROUP BY user_name, account
ORDER BY SUM(gpu_hours) DESC, user_name, account;
