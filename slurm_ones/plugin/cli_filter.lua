-- Written by slurm-ones plugin install. In sbatch: checks and completes elastic jobs before they are sent.
-- A job is sent as it is if this file's part fails, so that no submission depends on it.
local loaded, ones = pcall(dofile, "@DIRECTORY@/slurm_ones.lua")
if not loaded then
    slurm.log_debug("slurm-ones: %s", tostring(ones))
end

function slurm_cli_setup_defaults(options, early_pass)
    return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
    if not loaded or options["type"] ~= "sbatch" then
        return slurm.SUCCESS
    end
    local ran, refused = pcall(function() return ones.filtered(options) end)
    if not ran then
        slurm.log_debug("slurm-ones: %s", tostring(refused))
    elseif refused ~= nil then
        slurm.log_error("%s", "ones: " .. refused)
        return slurm.ERROR
    end
    return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
    return slurm.SUCCESS
end

return slurm.SUCCESS
