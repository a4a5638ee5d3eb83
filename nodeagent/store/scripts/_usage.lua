-- Counts what jobs use: devices and for how long, how much of that was lost to faults, and how much was overhead. In a
-- job's record, `held` is what the job holds and since when, and `used:<day>` the use before that, by the UTC day of
-- the server's clock. `usage:<day>` is the use of jobs that were removed from the view, by owner and queue. Times are
-- of the served clock. Must never decide anything.
local USE_DAY, USE_DAYS_KEPT, USE_ROWS_KEPT, OTHERS = 86400000, 400, 256, '-2'
local AMOUNTS = { 'gpu_ms', 'slot_ms', 'lost_gpu_ms', 'lost_slot_ms', 'overhead_gpu_ms', 'overhead_slot_ms', 'waited_ms',
  'restarts' }
-- Causes of a generation that are faults; people or new nodes are the other causes.
local FAULTS = { worker_failed = true, hang = true, pod_failed = true, node_lost = true, collective = true,
  reform = true, fenced = true, port_taken = true, crowded = true, runtime_failed = true,
  join_failed = true, hardware = true }

local function amounts_text(amounts, of)
  local parts = {}
  for i, name in ipairs(AMOUNTS) do
    parts[i] = string.format('"%s":%.0f', name, (amounts[name] or 0) + (of[name] or 0))
  end
  return table.concat(parts, ',')
end

local function add_on(job, day, amounts)
  local field = 'used:' .. int(day)
  if not job[field] and counts_of[job.uid] then -- the job was read lean
    job[field] = redis.call('HGET', P .. 'job:' .. job.uid, field) or nil
    jobs_before[job.uid][field] = job[field]
  end
  job[field] = '{' .. amounts_text(amounts, job[field] and cjson.decode(job[field]) or {}) .. '}'
end

-- Adds `each` (amounts for each ms) from one served time to another, at most up to now.
local function add_over(job, from, to, each)
  local left, at = to - from, now - (served - to)
  for i = 1, USE_DAYS_KEPT do
    if left <= 0 then
      return
    end
    local into = (at - 1) % USE_DAY + 1 -- a day ends at midnight
    local part = i < USE_DAYS_KEPT and math.min(left, into) or left
    local amounts = {}
    for name, per_ms in pairs(each) do
      amounts[name] = per_ms * part
    end
    add_on(job, math.floor((at - 1) / USE_DAY), amounts)
    left, at = left - part, at - part
  end
end

local function held_by(job)
  local held = job.held and cjson.decode(job.held)
    or { at = served, gpus = 0, slots = 0, saved = 0, stands = 0, started = 0 }
  held.idle = held.idle or 0
  return held
end

local function put_held(job, held)
  job.held = string.format('{"at":%.0f,"gpus":%.0f,"slots":%.0f,"saved":%.0f,"stands":%.0f,"started":%.0f,"idle":%.0f}',
    held.at, held.gpus, held.slots, held.saved, held.stands, held.started, held.idle)
end

-- Counts what the job holds up to `to`, or up to now.
local function count_up(job, to)
  local held = held_by(job)
  if held.gpus > 0 or held.slots > 0 then
    local lost = held.stands > 0 and 1 or 0
    local idle = held.idle > 0 and 1 - lost or 0
    add_over(job, held.at, to or served, { gpu_ms = held.gpus, slot_ms = held.slots,
      lost_gpu_ms = lost * held.gpus, lost_slot_ms = lost * held.slots,
      overhead_gpu_ms = idle * held.gpus, overhead_slot_ms = idle * held.slots })
  end
  held.at = math.max(held.at, served)
  return held
end

-- When a node lost the devices that are taken from it now: a lost node, when its lease ended.
local function had_until(id)
  local node = node_brief(id)
  if node and node.left == '1' then
    return math.min(served, lease_end(id))
  end
  if node and node.lost == '1' then
    return math.min(served, math.max(lease_end(id), shelter()))
  end
  return served
end

-- changes: node to the increase of each kind of device that the job holds there ({gpus, slots}).
local function count_changes(job, changes)
  local held
  for node, change in pairs(changes) do
    if change.gpus ~= 0 or change.slots ~= 0 then
      held = held or count_up(job)
      held.gpus, held.slots = held.gpus + change.gpus, held.slots + change.slots
      local from = had_until(node)
      if from < served then
        add_over(job, from, served, { gpu_ms = change.gpus, slot_ms = change.slots })
        local kind, since = 'lost', held.stands
        if since == 0 then
          kind, since = 'overhead', held.idle
        end
        if since > 0 then
          add_over(job, math.max(from, since), served,
            { [kind .. '_gpu_ms'] = change.gpus, [kind .. '_slot_ms'] = change.slots })
        end
      end
    end
  end
  if held then
    put_held(job, held)
  end
end

-- A fault ends the active generation (spend entry): notes since when time is lost; it is lost until the successor runs.
-- redo: the work since the last checkpoint must be repeated. lost: nodes.
local function count_fault(job, entry, redo, lost)
  local cause = entry and job.generation_state == 'active' and cjson.decode(entry)
  if not cause or not FAULTS[cause.kind] then
    return
  end
  local held, from = count_up(job), served - math.floor(1000 * (cause.stalled or 0))
  for _, id in ipairs(lost) do
    local ends = lease_end(id)
    from = ends > 0 and math.min(from, ends - lease_ms) or from -- the node's last renewal
  end
  if redo and job.checkpoint then
    from = math.min(from, held.saved)
  end
  from = math.max(from, tonumber(job.generation_since), held.started)
  add_over(job, from, served, { lost_gpu_ms = held.gpus, lost_slot_ms = held.slots })
  held.stands = math.max(1, from)
  put_held(job, held)
end

-- From now on the job has no active generation. Until it has one, its devices' time is overhead, unless it is lost.
local function count_idle(job)
  local held = count_up(job)
  held.idle = held.idle > 0 and held.idle or math.max(1, served)
  put_held(job, held)
end

-- The job's next generation is active. Its workers report later how long they took to their first step.
local function count_active(job)
  local held = held_by(job)
  if held.stands > 0 or held.idle > 0 then
    held = count_up(job)
    held.stands, held.idle = 0, 0
    put_held(job, held)
  end
end

-- The job's workers run since `ago` seconds, in an active generation: until then the time was lost if a fault was its
-- cause, else overhead.
local function count_started(job, ago)
  local cause = redis.call('HGET', P .. 'job:' .. job.uid, 'generation_cause')
  local since = tonumber(redis.call('HGET', P .. 'job:' .. job.uid, 'generation_since'))
  local kind, held = FAULTS[cjson.decode(cause).kind] and 'lost' or 'overhead', count_up(job)
  held.started = math.min(served, math.max(since, served - math.floor(1000 * ago)))
  add_over(job, since, held.started, { [kind .. '_gpu_ms'] = held.gpus, [kind .. '_slot_ms'] = held.slots })
  put_held(job, held)
end

-- Forgets the days up to `oldest`, and those to come, which no step has written.
local function forget_usage(oldest)
  for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    local day = tonumber(string.match(record, '^usage:(%d+)$') or '')
    if day and (day <= oldest or day > math.floor(now / USE_DAY) + 1) then
      drop(record)
      bury(record)
    end
  end
end

-- The job is removed from the view: its use is kept, in the sums of its owner and queue.
local function keep_use(job)
  local named = cjson.decode(job.spec).queue or ''
  local queue = named ~= '' and named or 'default'
  local days, submitted = entries(job, 'used'), int(math.floor(tonumber(job.submitted) * 1000 / USE_DAY))
  days[submitted] = days[submitted] or '{}'
  local oldest = math.floor(now / USE_DAY) - USE_DAYS_KEPT
  for _, day in ipairs(sorted_keys(days)) do
    local key = P .. 'usage:' .. day
    local before = tonumber(day) > oldest and to_map(redis.call('HGETALL', key))
    if before then
      if not next(before) then
        forget_usage(oldest)
      end
      local after, row = copied(before), 'row:' .. job.owner .. ' ' .. queue
      if not before[row] and #sorted_keys(before) > USE_ROWS_KEPT then
        row = 'row:' .. OTHERS .. ' ' .. queue
      end
      local sum = before[row] and cjson.decode(before[row]) or { jobs = 0 }
      after[row] = string.format('{"jobs":%.0f,%s}', sum.jobs + (day == submitted and 1 or 0),
        amounts_text(cjson.decode(days[day]), sum))
      write_changes(key, 'usage:' .. day, before, after)
    end
  end
end
