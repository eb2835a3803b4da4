-- What each finished resize cost: its pause, how long it took in all, the checkpoint that its order asked for, and
-- where the time of the start at the new size went, by phase, in seconds. Of several resizes of one run (the others
-- were rolled back) the last is the one that the start belongs to.
SELECT job_id, name, started, old_gpus, new_gpus, state, pause_s, total_s, checkpoint_s, stall_s,
       queue_s, launch_s, import_s, group_s, load_s, first_step_s, outcome
FROM resize_cost
ORDER BY start_time, job_id;
