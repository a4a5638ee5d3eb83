-- submit: jobs (list of {uid, name, spec, admission?, min, max, control, delay_ms, reason, array?, at_once?}), batch?,
-- owner, submitted, by, request, did, era (of the submitter's view, or ''), quota?, claims?. All of them or none. Of a
-- batch the reply is did, as the first call with this request had it.
local seen, other = request_seen(A.request, A.did)
if other then
  return other
end
local first = seen and string.match(seen, '^%S+') or A.jobs[1].uid
local job, ended = job_read(first), past.read(first)
if A.batch and (seen or job or ended) then
  ask_to_save()
  return { 1, seen and (string.match(seen, ' (.*)$') or '') or A.did }
end
if job or ended then
  ask_to_save()
  return job and job_reply(job) or { 1, flat(ended), 'whole', meta.era or '' }
end
if seen then
  return refuse('not_found', 'the job that this request submitted is not there any more: submit it anew, with another '
    .. 'request id')
end
-- A job in an emptied store makes it another cluster's: agents that know other jobs could not restore these any more.
if A.era ~= '' and A.era ~= meta.era and A.era ~= meta.parent then
  return refuse('stale', 'the store is not the one that this agent has read: it may have lost jobs; then try again')
end
local wanted, old = {}, {} -- by the jobs' records: the records behind names may have been removed by hand
for _, new in ipairs(A.jobs) do
  wanted[new.name] = true
end
for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
  if string.sub(record, 1, 4) == 'job:' then
    local uid, name = string.sub(record, 5), redis.call('HGET', P .. record, 'name')
    local found = wanted[name] and job_read(uid)
    if not name or (wanted[name] and not found) then
      return damaged(record)
    end
    if found then
      old[name] = (not old[name] or is_terminal(old[name])) and found or old[name]
    end
  end
end
for _, new in ipairs(A.jobs) do -- the name or the list of the records may have been written over by hand
  local namesake = redis.call('HGET', NAMES, new.name)
  if namesake and not old[new.name] and redis.call('EXISTS', P .. 'job:' .. namesake) == 1 then
    return damaged('job:' .. namesake)
  end
end
local ways = {}
for _, new in ipairs(A.jobs) do
  local found = old[new.name]
  if found then
    if not is_terminal(found) then
      return refuse('name_taken', 'a job named ' .. new.name .. ' is live (uid ' .. found.uid .. ', ' .. found.phase
        .. '): choose another name, or stop it first')
    end
    local held = still_held(found)
    if held then
      return refuse('stopping', 'the job named ' .. new.name .. ' (uid ' .. found.uid .. ', ' .. found.phase
        .. ') still stops its workers on node ' .. held)
    end
    ways['job:' .. found.uid] = true
  end
end
if A.quota then -- counts the owner's jobs, without those that are replaced
  local live, bytes = #A.jobs - 1, tonumber(redis.call('HGET', past.bytes, int(A.owner)) or '') or 0
  for _, new in ipairs(A.jobs) do
    bytes = bytes + #new.spec
  end
  for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    if string.sub(record, 1, 4) == 'job:' and not ways[record] then
      local about = redis.call('HMGET', P .. record, 'owner', 'phase')
      if about[1] == int(A.owner) then
        live = live + (is_terminal({ phase = about[2] }) and 0 or 1)
        bytes = bytes + redis.call('HSTRLEN', P .. record, 'spec')
      end
    end
  end
  if live >= A.quota.jobs then
    local others = live - #A.jobs + 1
    return refuse('limit', A.by .. ' has ' .. int(others) .. ' live jobs, ' .. (#A.jobs == 1 and 'as many as'
      or 'with these ' .. int(live + 1) .. ', more than') .. ' limits.jobs allows')
  end
  if bytes > A.quota.bytes then
    return refuse('limit', 'with this job, the stored jobs of ' .. A.by .. ' (ended ones too) would take '
      .. int(bytes) .. ' bytes, and limits.job_bytes allows ' .. int(A.quota.bytes))
  end
end
local no = check_quotas(A.claims)
if no then
  return no
end
for _, new in ipairs(A.jobs) do
  if old[new.name] then
    delete_job(old[new.name])
  end
  job = {
    version = VERSION, uid = new.uid, name = new.name, owner = int(A.owner), spec = new.spec, admission = new.admission,
    min = int(new.min), max = int(new.max), control = new.control, phase = 'queued', reason = new.reason,
    submitted = A.submitted, since = int(served), order = int(redis.call('HINCRBY', META, 'order', 1)),
    ran = '0', restart_done = '0', not_before = new.delay_ms > 0 and int(served + new.delay_ms) or '0',
    last_number = '0', restarts = '0', array = new.array, at_once = new.at_once and int(new.at_once),
  }
  job_save(job)
  redis.call('HSET', NAMES, new.name, new.uid)
  event({ kind = 'JobSubmitted', job = job, by = A.by, text = 'job ' .. new.name .. ' submitted' })
end
leave_quotas(A.claims, job.rev)
remember(A.request, A.jobs[1].uid, A.did, int(A.owner))
ask_to_save()
return A.batch and { 1, A.did } or job_reply(job)
