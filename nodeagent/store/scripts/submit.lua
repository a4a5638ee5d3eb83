-- submit: uid, name, owner, spec, admission?, min, max, control, submitted, by, request, quota?
local seen = request_seen(A.request)
local uid = seen and string.match(seen, '^%S+') or A.uid
local job, past = job_read(uid), past_read(uid)
if job or past then
  ask_to_save()
  return job and job_reply(job) or { 1, flat(past), 'whole', meta.era or '' }
end
if seen then
  return no_job(uid)
end
local old -- by the records themselves: what names say may have been removed by hand
for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
  if string.sub(record, 1, 4) == 'job:' then
    local name = redis.call('HGET', P .. record, 'name')
    if not name then
      distrust({ record })
      return refuse('recovering', 'somebody removed or damaged ' .. record .. ' in the store: the agents give it back, '
        .. 'and nothing is decided meanwhile; then try again')
    end
    if name == A.name then
      local found = job_read(string.sub(record, 5))
      old = (not old or is_terminal(old)) and found or old
    end
  end
end
if old then
  if not is_terminal(old) then
    return refuse('name_taken', 'a job named ' .. A.name .. ' is live (uid ' .. old.uid .. ', ' .. old.phase
      .. '): choose another name, or stop it first')
  end
  local held = still_held(old)
  if held then
    return refuse('stopping', 'the job named ' .. A.name .. ' (uid ' .. old.uid .. ', ' .. old.phase
      .. ') still stops its workers on node ' .. held)
  end
end
if A.quota then -- of the owner's jobs, without the one that gives way
  local live, bytes = 0, #A.spec
  local way = old and 'job:' .. old.uid
  for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    if string.sub(record, 1, 4) == 'job:' and record ~= way then
      local about = redis.call('HMGET', P .. record, 'owner', 'phase')
      if about[1] == int(A.owner) then
        live = live + (is_terminal({ phase = about[2] }) and 0 or 1)
        bytes = bytes + redis.call('HSTRLEN', P .. record, 'spec')
      end
    end
  end
  for _, line in ipairs(redis.call('ZRANGE', HISTORY, 0, -1)) do
    local owner, size = string.match(line, ' (%d+) (%d+)$')
    bytes = bytes + (owner == int(A.owner) and tonumber(size) or 0)
  end
  if live >= A.quota.jobs then
    return refuse('limit', A.by .. ' has ' .. int(live) .. ' live jobs, as many as limits.jobs allows')
  end
  if bytes > A.quota.bytes then
    return refuse('limit', 'with this one the jobs of ' .. A.by .. ' that are kept, ended ones too, would take '
      .. int(bytes) .. ' bytes, and limits.job_bytes allows ' .. int(A.quota.bytes))
  end
end
if old then
  delete_job(old)
end
job = {
  version = VERSION, uid = A.uid, name = A.name, owner = int(A.owner), spec = A.spec, admission = A.admission,
  min = int(A.min), max = int(A.max), control = A.control, phase = 'queued', reason = 'submitted, waits for nodes',
  submitted = A.submitted, since = int(served), order = int(redis.call('HINCRBY', META, 'order', 1)),
  ran = '0', restart_done = '0', not_before = '0', last_number = '0', restarts = '0',
}
job_save(job)
redis.call('HSET', NAMES, A.name, A.uid)
remember(A.request, A.uid)
ask_to_save()
event({ kind = 'JobSubmitted', job = job, by = A.by, text = 'job ' .. A.name .. ' submitted' })
return job_reply(job)
