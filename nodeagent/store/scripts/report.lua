-- report: uid, token, node, life, start, state, body, brief?, reason
-- A role with a round that this node had not promised before, and that round: others of its gang may wait for it.
local function further(new, old)
  for role, round in pairs(new or {}) do
    if round > (old[role] or 0) then
      return role, int(round)
    end
  end
end

local job, no, counts = job_of_caller(job_lean)
if no then
  return no
end
if job.generation_state ~= 'active' then
  return refuse('stale', 'generation ' .. job.generation_number .. ' of job ' .. job.name .. ' is '
    .. job.generation_state .. ', not active: read it again')
end
local member = job['member:' .. A.node]
if not member or cjson.decode(member).life ~= A.life then
  return refuse('stale', 'node ' .. A.node .. ' is no member of generation ' .. job.generation_number .. ' of job '
    .. job.name)
end
local body = cjson.decode(A.body)
local alone, last, rounds = body.alone or {}, -1, {}
local started = A.state == 'running' and not job['report:' .. A.node] and not body.completed and not next(body.ready or {})
  and not next(alone) and not next(body.rounds or {}) and not next(body.tasks or {}) and type(body.stall) ~= 'table'
if (next(alone) or next(body.rounds or {})) and job['report:' .. A.node] then
  local before = cjson.decode(string.match(job['report:' .. A.node], '{.*'))
  last = next(before.alone or {}) and before.alone[#before.alone].order or last
  rounds = before.rounds or {}
end
if started then
  count_started(job, body.started or 0)
end
for _, one in ipairs(alone) do
  if one.order > last then
    local whole = (one.round or 0) > 0
    event({ kind = whole and 'RoleFailed' or 'WorkerRestarted', job = job, node = A.node,
      generation = job.generation_number, by = A.node, text = one.text .. ' on ' .. A.node .. '; ' .. (whole and 'all of its role' or 'it')
        .. ' is to be started again while the gang goes on' })
  end
end
local role, round = further(body.rounds, rounds)
local before = succeeded(job['report:' .. A.node])
local first = put_report(job, counts, 'report', A.node, A.state, A.body, A.brief)
local well = succeeded(job['report:' .. A.node])
if well ~= before then
  counts.done, counts.undone = counts.done + (well and 1 or -1), counts.undone - (well and 1 or -1)
end
-- What follows from a success follows from the first or the last one: the others wake nobody. When the last has come,
-- one text stands for all of them, and who has not read them yet reads only that.
local quiet = well and counts.done > 1 and counts.undone > 0 and not body.completed
if well and not before and counts.undone == 0 then
  job = widened(job)
  job_save(job, true)
else
  job_save(job)
end
if first then
  local text = A.reason
  if text == '' then
    text = 'the pod of job ' .. job.name .. ' on node ' .. A.node .. ': ' .. A.state
  end
  event({ kind = A.state == 'failed' and 'WorkerFailed' or 'PodFailed', job = job, node = A.node,
    generation = job.generation_number, by = A.node, text = text, alone = true })
elseif role then
  event({ kind = 'RoleStopped', job = job, node = A.node, generation = job.generation_number, by = A.node, alone = true,
    text = 'no worker of ' .. role .. ' runs on ' .. A.node .. ': restart ' .. round .. ' of that role in this generation' })
elseif started then
  event({ kind = 'GenerationStarted', job = job, node = A.node, generation = job.generation_number, by = A.node,
    text = A.reason })
elseif not quiet then
  unannounced()
end
return well and own_reply(job) or job_reply(job)
