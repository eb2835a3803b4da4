-- What each finished resize cost: its pause, how long it took in all, the checkpoint that its order asked for, and
-- where the time of the start at the new size went, by phase, in seconds. Of several resizes of one run (the others
-- were rolled back) the last is the one that the start belongs to. A resize by blocks has no such start: its new blocks
-- were ready after ready_s while the job trained, and of the pause transfer_s went into sending them the state.
SELECT cluster, job_id, name, started, mechanism, old_gpus, new_gpus, state, pause_s, total_s, checkpoint_s, stall_s,
       queue_s, launch_s, import_s, group_s, load_s, first_step_s, ready_s, transfer_s, bytes, outcome
FROM resize_cost
ORDER BY cluster, start_time, job_id;
