-- remove: uid, by
local function tell(job)
  local who = A.by ~= '' and ' (by ' .. A.by .. ')' or ''
  event({ kind = 'JobDeleted', job = job, by = A.by, text = 'job ' .. job.name .. ' deleted' .. who })
end

local job = job_read(A.uid)
if not job then
  job = past.read(A.uid)
  if job then
    past.drop(past.line(job))
    tell(job)
  end
  return { 1 }
end
if not is_terminal(job) then
  return refuse('stale', 'job ' .. job.name .. ' has not ended (' .. job.phase .. '): stop it first')
end
local held = still_held(job)
if held then
  return refuse('stale', 'job ' .. job.name .. ' still stops its workers on node ' .. held)
end
delete_job(job)
tell(job)
return { 1 }
