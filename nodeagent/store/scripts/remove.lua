-- remove: uid
local job = job_read(A.uid)
if not job then
  job = past.read(A.uid)
  if job then
    past.drop(past.line(job))
    event({ kind = 'JobDeleted', job = job, text = 'job ' .. job.name .. ' deleted' })
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
event({ kind = 'JobDeleted', job = job, text = 'job ' .. job.name .. ' deleted' })
return { 1 }
