-- Cost of each finished resize, in seconds: its pause, its total time, the checkpoint that its order asked for, and
-- each phase of the start at the new size. If a run had several resizes, the start belongs to the last: the others
-- were rolled back. A resize by blocks has no such start. Its new blocks were ready after ready_s, while the job
-- trained; transfer_s is the part of the pause in which they got the state.
SELECT cluster, job_id, name, started, mechanism, old_gpus, new_gpus, state, pause_s, total_s, checkpoint_s, stall_s,
       queue_s, launch_s, import_s, group_s, load_s, first_step_s, ready_s, transfer_s, bytes, outcome
FROM resize_cost
ORDER BY cluster, start_time, job_id;
