-- Checks and completes an elastic job as it is submitted. job_submit.lua and cli_filter.lua call it, and so
-- can a site's own. Part of slurm-ones, BSD-3-Clause.
--
-- A job that neither has options --elastic-… nor a comment that begins with "ones:" is left as it is. Python
-- defines what a comment means: here a wrong word is found early, and all else is handed on.

local ones = {}

local RANGE, STEPPED, ANY = 1, 2, 3
local KEYS = { gpus = STEPPED, nodes = RANGE, batch = RANGE, size = RANGE, resize = ANY, array = ANY, fuse = ANY,
               deadline = ANY, kinds = ANY, guests = ANY, cost = ANY, notify = ANY }
local KNOWN = "gpus=, nodes=, batch=, resize=, array=, size=, fuse=, deadline=, kinds=, guests=, cost= or notify="
local MOST, DIGITS = 1000, 12
local UNSET_32, UNSET_16 = 4294967294, 65534 -- Slurm's NO_VAL and NO_VAL16

-- A user's text as it is shown: printable and short.
local function shown(text)
    return "'" .. text:sub(1, 40):gsub("[^ -~]", "?") .. "'"
end

-- Tells whether the text is short, and has no byte whose meaning as space or letter only Python knows.
local function is_plain(text)
    return #text <= MOST and not text:find("[^\t-\r -~]")
end

-- The words after "ones:", nil if the comment does not begin so.
local function words_of(comment)
    local rest = comment:match("^%s*[oO][nN][eE][sS]:(.*)$")
    if rest == nil then
        return nil
    end
    local words = {}
    for word in rest:gmatch("[^%s,]+") do
        if #words > 0 and words[#words]:find("^kinds=") and not word:find("=") then
            words[#words] = words[#words] .. "," .. word -- another type of GPU
        else
            words[#words + 1] = word
        end
    end
    return words
end

-- The fault of a word's value, nil for none that is found here.
local function fault_of_value(key, value)
    local kind = KEYS[key]
    if kind == ANY then
        return value == "" and "it has no value" or nil
    end
    local range, step = value, nil
    if kind == STEPPED then
        local whole, after = value:match("^([^:]*):(.*)$")
        range, step = whole or value, after
    end
    if key == "batch" then
        range = range:match("^(%d+)%+%-%d%d?%%$") or range -- a band
    end
    local low, high = range:match("^(%d+)%-(%d+)$")
    low, high = low or range:match("^%d+$"), high
    if low == nil or #low > DIGITS or #(high or "") > DIGITS or (step ~= nil and not step:match("^[1-9]%d*$")) then
        return "expected a number or a range such as 1-16"
    end
    if tonumber(low) < 1 or (high ~= nil and tonumber(high) < tonumber(low)) then
        return "expected 1 <= first <= last"
    end
    return nil
end

-- Tells whether these words are a sentence that happens to follow "ones:", and ask for nothing.
local function is_prose(words)
    for _, word in ipairs(words) do
        if word:find("=", 1, true) or KEYS[word] ~= nil then
            return false
        end
    end
    return #words > 1
end

-- The fault of a comment that begins with "ones:", as a sentence; nil for none.
function ones.fault(comment)
    local words = is_plain(comment) and words_of(comment) or nil
    if words == nil or is_prose(words) then
        return nil
    end
    local found = {}
    for _, word in ipairs(words) do
        local key, value = word:match("^([^=]*)=?(.*)$")
        if KEYS[key] == nil then
            return shown(word) .. ": expected " .. KNOWN
        elseif found[key] then
            return shown(word) .. ": " .. key .. " is given twice"
        end
        local fault = fault_of_value(key, value)
        if fault ~= nil then
            return shown(word) .. ": " .. fault
        end
        found[key] = value
    end
    if found.gpus and found.nodes then
        return "gpus= and nodes= contradict each other: give one of them"
    elseif not found.gpus and not found.nodes and found.resize ~= "off" then
        return "neither gpus= nor nodes=: say how far the job may grow, such as gpus=1-16"
    end
    return nil
end

-- Tells whether a comment that does not opt in surely means to: "one: gpus=1-16", "ones gpus=1-16", and no other word.
-- "one batch=64" may be a note to oneself, and would opt in to nothing: a size is asked for after all but "ones".
function ones.near_miss(comment)
    if not is_plain(comment) or words_of(comment) ~= nil then
        return false
    end
    local text = comment:lower()
    local name, key = text:match("^%s*(ones?)%s*[^%w_%s]?%s*(%l+)=%d")
    for word in text:gsub("^%s*ones?%s*[^%w_%s]?", "", 1):gmatch("[^%s,]+") do
        if KEYS[word:match("^(%l+)=")] == nil then
            return false -- a note in which a size is named
        end
    end
    local size = text:find("%f[%w]gpus=%d") or text:find("%f[%w]nodes=%d")
    return key == "gpus" or key == "nodes" or (key == "batch" and (name == "ones" or size ~= nil))
end

-- The comment with these words in it, in place of those that it has of the same name; nil if it says something else.
function ones.merged(comment, words)
    local old = {}
    if comment ~= nil and comment:match("%S") then
        old = words_of(comment)
        if old == nil then
            return nil
        end
    end
    local new, keys = words_of("ones:" .. words), {}
    for _, word in ipairs(new) do
        keys[word:match("^[^=]*")] = true
    end
    -- A size in GPUs takes the place of one in nodes, and the other way round.
    keys.gpus, keys.nodes = keys.gpus or keys.nodes, keys.gpus or keys.nodes
    for _, word in ipairs(old) do
        if not keys[word:match("^[^=]*")] then
            new[#new + 1] = word
        end
    end
    -- Types of GPU last: a word without "=" that comes to stand after them would be read as one of them.
    local others, kinds = {}, {}
    for _, word in ipairs(new) do
        table.insert(word:find("^kinds=") and kinds or others, word)
    end
    for _, word in ipairs(kinds) do
        others[#others + 1] = word
    end
    return "ones: " .. table.concat(others, " ")
end

-- Tells whether a batch script starts ones-run in blocks.
function ones.runs_blocks(script)
    for line in script:gmatch("[^\n]+") do
        local command = line:match("^%s*([^#]*)")
        -- Two searches, since one pattern for both takes the square of a long line's length, in the controller.
        local _, run = command:find("ones%-run%s")
        if run ~= nil and command:find("--blocks", run + 1, true) or command:find("ONES_BLOCKS=1", 1, true) then
            return true
        end
    end
    return false
end

local function has(words, wanted)
    for _, word in ipairs(words) do
        if word == wanted then
            return true
        end
    end
    return false
end

-- The comment that a job shall have, and whether it is elastic; or nil, nil and a sentence that refuses it.
-- `job` has `comment`, `words` (of options), `array`, `script`; `no_requeue`, `tasks`, `per_job` if they are known.
function ones.check(job)
    local comment = job.comment
    if #(comment or "") + #(job.words or "") > MOST then
        if job.words ~= nil then
            return nil, nil, "the comment is too long: shorten --comment"
        end
        return nil, false
    elseif job.words ~= nil then
        comment = ones.merged(comment, job.words)
        if comment == nil then
            return nil, nil, "the options --elastic-... become the job's comment, so leave out --comment or begin it with ones:"
        end
    elseif comment == nil then
        return nil, false
    elseif words_of(comment) == nil then
        if ones.near_miss(comment) then
            return nil, nil, "this comment does not opt in, since it does not begin with ones: as in --comment=\"ones: gpus=1-16\""
        end
        return nil, false
    end
    if job.array ~= nil and job.script ~= nil and not comment:find("array=", 1, true) and ones.runs_blocks(job.script) then
        comment = comment .. " array=blocks"
    end
    if not is_plain(comment) then
        return comment, false
    end
    local fault, words = ones.fault(comment), words_of(comment)
    if is_prose(words) then
        return comment, false
    elseif fault ~= nil then
        return nil, nil, fault
    elseif has(words, "resize=off") then
        return comment, false
    elseif job.interactive then
        return nil, nil, "an elastic job is a batch job of one component: submit it with sbatch"
    elseif job.no_requeue then
        return nil, nil, "Slurm must be able to requeue an elastic job: leave out --no-requeue"
    elseif job.tasks then
        return nil, nil, "Slurm does not let a user change task counts: leave out --ntasks and --ntasks-per-..."
    elseif job.per_job then
        return nil, nil, "say how many GPUs a node takes, by --nodes and --gres=gpu:N, in place of --gpus or --gpus-per-task"
    elseif has(words, "array=blocks") then
        if job.array == nil then
            return nil, nil, "array=blocks needs a job array: add --array=0-7%1"
        elseif not job.array:find("%%1$") then
            return nil, nil, "blocks start one by one: end --array with %1"
        end
    end
    return comment, true
end

local function is_set(number, unset)
    return type(number) == "number" and number ~= 0 and number < unset
end

local function names_gpu(tres)
    return type(tres) == "string" and tres:find("gpu", 1, true) ~= nil
end

-- For job_submit.lua: checks and completes a job description of Slurm's. Returns a sentence if the job is refused,
-- else nil, and what the job may have if options of ours said that.
function ones.submitted(desc)
    local words
    for _, entry in pairs(desc.spank_job_env or {}) do
        words = words or entry:match("^ONES_ELASTIC=(.*)$")
    end
    if words == nil and desc.comment == nil then
        return nil
    end
    local comment, elastic, refused = ones.check({
        comment = desc.comment,
        words = words,
        array = desc.array_inx,
        script = desc.script,
        interactive = desc.script == nil,
        no_requeue = desc.requeue == 0,
        tasks = is_set(desc.num_tasks, UNSET_32) or is_set(desc.ntasks_per_node, UNSET_16)
            or is_set(desc.ntasks_per_tres, UNSET_16) or is_set(desc.ntasks_per_socket, UNSET_16),
        per_job = names_gpu(desc.tres_per_job) or names_gpu(desc.tres_per_task) or names_gpu(desc.tres_per_socket),
    })
    if refused ~= nil then
        return refused
    end
    if comment ~= nil and comment ~= desc.comment then
        desc.comment = comment
    end
    if elastic and desc.requeue ~= 1 then
        desc.requeue = 1
    end
    return nil, words ~= nil and comment or nil
end

-- For cli_filter.lua: the same for the options of sbatch, before they are sent, and what only sbatch can complete.
function ones.filtered(options)
    local given = (options["spank"] or {})["slurm_ones"] or {}
    local words = {}
    for _, key in ipairs({ "gpus", "nodes", "batch", "deadline" }) do
        local value = given["elastic-" .. key]
        if value ~= nil then
            words[#words + 1] = key .. "=" .. value
        end
    end
    local comment, elastic, refused = ones.check({
        comment = options["comment"],
        words = #words > 0 and table.concat(words, " ") or nil,
        array = options["array"],
        no_requeue = options["no-requeue"] == "no-requeue",
        per_job = options["gpus"] ~= nil or options["gpus-per-task"] ~= nil,
    })
    if refused ~= nil then
        return refused
    end
    if comment ~= nil and comment ~= options["comment"] then
        options["comment"] = comment
    end
    if elastic then
        options["requeue"] = "" -- newer releases take no other word here, older ones any
        if options["open-mode"] == nil then
            options["open-mode"] = "append"
        end
        if options["signal"] == "0@0" or options["signal"] == nil then
            options["signal"] = "B:USR2@120"
        end
    end
    return nil
end

return ones
