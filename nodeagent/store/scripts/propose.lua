-- propose: uid, expect?, expect_state, control_rev, id, members (node to JSON), listed (members as words), lost
-- (sorted), cause, reason, spend?, planned, steps_saved, grace (JSON), form_ms, outside, failsafe members
-- (node to JSON life), by, claims (queues), read
local WAKE_EACH, CORDON_BYTES = 64, 4194304

-- In an array that limits the jobs that run at once, a job that has no nodes yet adds one.
local function check_array(job)
  local most = tonumber(job.at_once or '0')
  if most == 0 or USES_TIME[job.phase] then
    return
  end
  local running = 0
  for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    if string.sub(record, 1, 4) == 'job:' then
      local about = redis.call('HMGET', P .. record, 'array', 'phase')
      running = running + (about[1] == job.array and USES_TIME[about[2]] and 1 or 0)
    end
  end
  if running >= most then
    return refuse('busy', 'the array of job ' .. job.name .. ' runs at most ' .. int(most) .. ' jobs at once, and '
      .. int(running) .. ' run now')
  end
end

-- A device is booked for a job that does not have it by its record: somebody removed that record, or wrote over the
-- bookings. Books on all these nodes what the records say. The agents restore what is missing, and its bookings, before
-- the next decision.
local function book_anew(nodes, wrong)
  for _, node in ipairs(nodes) do
    drop('alloc:' .. node)
    booked_on[node] = nil
  end
  for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    local uid = string.match(record, '^job:(.*)$')
    local owner = uid and job_read(uid)
    local devices = owner and devices_of(owner)
    for _, node in ipairs(owner and nodes or {}) do
      book(node, uid, devices[node] or {})
    end
  end
  return damaged('alloc:' .. wrong)
end

local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
if job.generation_id == A.id then
  return job_reply(job)
end
local no = check_decision(job)
if no then
  return no
end
if not highest_of(P, job.name, job.generation_number) then
  return damaged('highest', 'job:' .. job.uid)
end
local members = decoded(A.members)
local order = sorted_keys(members)
if #order < tonumber(job.min) or #order > tonumber(job.max) then
  return refuse('unsupported', 'job ' .. job.name .. ' takes ' .. job.min .. ' to ' .. job.max .. ' nodes, not '
    .. int(#order))
end
no = check_lost(job, A.lost) or check_unfinished(job) or check_array(job)
if no then
  return no
end
-- The proposer has counted what other jobs of the queue hold. Each job that came to hold more has left its revision
-- here.
for _, queue in ipairs(A.claims) do
  if claimed(queue) > A.read then
    return refuse('stale', 'another job of queue ' .. queue .. ' has been given nodes meanwhile')
  end
end
local cordoned = redis.call('HLEN', CORDONS) > 0
for _, id in ipairs(order) do
  if not_live(id, members[id].life) then
    return refuse('not_live', 'node ' .. id .. ' is not live in the life that was proposed')
  end
  local size = cordoned and redis.call('HSTRLEN', CORDONS, id) or 0
  if size > 0 then
    if tonumber(redis.call('ZSCORE', CHANGES, 'node:' .. id) or '0') <= A.read then -- by hand: no agent has read it
      node_touch(node_read(id))
    end
    local cordon = size <= CORDON_BYTES and cjson.decode(redis.call('HGET', CORDONS, id))
      or { reason = 'somebody wrote one of ' .. int(size) .. ' bytes' }
    return refuse('not_live', 'node ' .. id .. ' is cordoned: ' .. cordon.reason)
  end
  local taken = booked(id)
  for _, device in ipairs(members[id].devices) do
    if taken[device] and taken[device] ~= job.uid then
      local owner = job_read(taken[device])
      if not owner or not (devices_of(owner)[id] or {})[device] then
        return book_anew(order, id)
      end
      return refuse('busy', 'device ' .. device .. ' of node ' .. id .. ' belongs to job ' .. taken[device])
    end
  end
end

local holders, unknown = next_holders(job, A.lost)
if unknown then
  return damaged_holder(job, unknown)
end
local before = leave_generation(job, true)
put_entries(job, 'member', A.members)
put_entries(job, 'holder', holders)
begin_acks(job)
put_entries(job, 'report', {})
put_entries(job, 'generation_failsafe_member', A.failsafe_members)
job.generation_number, job.generation_id = int(redis.call('HINCRBY', HIGHEST, job.name, 1)), A.id
job.generation_state, job.generation_cause, job.generation_planned = 'forming', A.cause, A.planned and '1' or '0'
job.generation_grace = A.grace
job.generation_since, job.generation_deadline, job.generation_outside = int(served), int(served + A.form_ms), A.outside
job.generation_control_rev = int(A.control_rev)
job.restart_done, job.not_before = int(cjson.decode(job.control).restart), '0'
enter_phase(job, 'forming', A.reason)
rebook(job, before)
job_save(job, true, #A.listed == 2 * #order and A.listed)
for _, queue in ipairs(A.claims) do
  redis.call('HSET', CLAIMS, queue, job.rev)
end
local new = {}
for _, id in ipairs(order) do
  if not before[id] then
    new[#new + 1] = id
  end
end
local made = event({ kind = 'GenerationForming', job = job, generation = job.generation_number, by = A.by,
  text = A.reason, everybody = #new > WAKE_EACH, alone = #A.lost == 0 })
for i = 1, #new <= WAKE_EACH and #new or 0 do -- these nodes do not wait on this job yet
  wake('node:' .. new[i], made)
end
return job_reply(job)
