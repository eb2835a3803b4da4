-- Written by slurm-ones plugin install. In slurmctld: checks and completes elastic jobs as they are submitted.
-- A job is accepted as it is if this file's part fails, so that no submission depends on it.
local loaded, ones = pcall(dofile, "@DIRECTORY@/slurm_ones.lua")
if not loaded then
    slurm.log_error("slurm-ones: %s", tostring(ones))
end

function slurm_job_submit(job_desc, part_list, submit_uid)
    if not loaded then
        return slurm.SUCCESS
    end
    local ran, refused, allowed = pcall(function() return ones.submitted(job_desc) end)
    if not ran then
        slurm.log_error("slurm-ones: %s", tostring(refused))
    elseif refused ~= nil then
        slurm.log_user("%s", "ones: " .. refused)
        return slurm.ERROR
    elseif allowed ~= nil then
        slurm.log_user("%s", "the job's comment is " .. allowed)
    end
    return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
