-- end: uid, expect?, expect_state, control_rev, phase, reason, outcome?, spend?, lost (sorted), planned, grace,
-- steps_saved, delay_ms, control? (JSON), by_policy, wall, by

local SKEW = 7200 -- seconds; as in plan/queueing/dependencies.py

-- Some list of policies, the job's or a role's, has one that completes the job.
local function may_complete(spec)
  local lists = { spec.policies or {} }
  for _, role in ipairs(spec.roles) do
    lists[#lists + 1] = type(role.policies) == 'table' and role.policies or nil
  end
  for _, list in ipairs(lists) do
    for _, policy in ipairs(list) do
      if policy['do'] == 'CompleteJob' then
        return true
      end
    end
  end
  return false
end

local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end

local same_generation
if A.expect then
  same_generation = job.generation_id == A.expect.id and job.generation_number == int(A.expect.number)
else
  same_generation = not job.generation_id
end
if same_generation and (job.phase == A.phase or (A.phase == 'pausing' and job.phase == 'paused'))
  and (is_terminal(job) or (job.generation_state == 'ended' and A.expect_state ~= 'ended')) then
  return job_reply(job) -- this ending was done before
end

local no = check_decision(job)
if no then
  return no
end
if A.phase == 'succeeded' and A.by_policy then
  if not may_complete(cjson.decode(job.spec)) then
    return refuse('unsupported', 'no policy of job ' .. job.name .. ' says CompleteJob')
  end
elseif A.phase == 'succeeded' then
  if job.generation_state ~= 'active' then
    return refuse('unsupported', 'job ' .. job.name .. ' has no active generation that could have succeeded')
  end
  local node = first_unfinished(job)
  if node then
    return refuse('unsupported', 'node ' .. node .. ' has not reported success of generation ' .. job.generation_number
      .. ' of job ' .. job.name)
  end
end
no = check_lost(job, A.lost) or (A.spend and A.phase ~= 'succeeded' and check_unfinished(job))
if no then
  return no
end

local holders, unknown = next_holders(job, A.lost)
if unknown then
  return damaged_holder(job, unknown)
end
local before = leave_generation(job, job.generation_id)
local ends, old_phase, old_reason = job.generation_id and job.generation_state ~= 'ended', job.phase, job.reason
if job.generation_id then
  put_entries(job, 'holder', holders)
end
if ends then
  put_entries(job, 'report', {})
  job.generation_state, job.generation_planned = 'ended', A.planned and '1' or '0'
  job.generation_grace = A.grace
  job.generation_since, job.generation_deadline = int(served), '0'
end
local earliest = job.generation_id and 0 or tonumber(job.not_before) -- from a job that begins later
job.control = A.control or job.control
job.outcome, job.not_before = A.outcome, int(math.max(served + A.delay_ms, earliest))
enter_phase(job, A.phase == 'pausing' and not next(holders) and 'paused' or A.phase, A.reason)
if is_terminal(job) then
  local off = math.abs(tonumber(A.wall) - now / 1000) -- far off: every other node would count the job as old, or as new
  job.ended = off <= SKEW and A.wall or string.format('%.3f', now / 1000)
end
rebook(job, before)
job_save(job, true)
if ends or job.phase ~= old_phase or job.reason ~= old_reason then
  local kind = 'Job' .. string.upper(string.sub(job.phase, 1, 1)) .. string.sub(job.phase, 2)
  event({ kind = kind, job = job, generation = job.generation_number, by = A.by, text = A.reason })
end
return job_reply(job)
