-- submit: uid, name, owner, spec, admission?, min, max, control, submitted, by, request
local seen = request_seen(A.request)
if seen then
  local uid = string.match(seen, '^%S+')
  local job = job_read(uid)
  if not job then
    return no_job(uid)
  end
  ask_to_save()
  return job_reply(job)
end
local known = job_read(A.uid)
if known then
  ask_to_save()
  return job_reply(known)
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
    return refuse('name_taken', 'the job named ' .. A.name .. ' (uid ' .. old.uid .. ', ' .. old.phase
      .. ') still stops its workers on node ' .. held .. ': try again in a moment')
  end
  delete_job(old)
end
local job = {
  version = VERSION, uid = A.uid, name = A.name, owner = int(A.owner), spec = A.spec, admission = A.admission,
  min = int(A.min), max = int(A.max), control = A.control, phase = 'queued', reason = 'submitted, waits for nodes',
  submitted = A.submitted, since = int(served), order = int(redis.call('HINCRBY', META, 'order', 1)),
  restart_done = '0', not_before = '0', last_number = '0', restarts = '0',
}
job_save(job)
redis.call('HSET', NAMES, A.name, A.uid)
remember(A.request, A.uid)
ask_to_save()
event({ kind = 'JobSubmitted', job = job, by = A.by, text = 'job ' .. A.name .. ' submitted' })
return job_reply(job)
