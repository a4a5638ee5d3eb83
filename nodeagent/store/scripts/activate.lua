-- activate: uid, token
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
local no = check_generation(job, A.token)
if no then
  return no
end
if job.generation_state == 'active' then
  return job_reply(job)
end
local name = 'generation ' .. job.generation_number .. ' of job ' .. job.name
if job.generation_state == 'ended' then
  return refuse('stale', name .. ' has ended: read it again')
end
local reason = not_ready(job)
if reason then
  return refuse('not_live', name .. ' cannot start: ' .. reason)
end
make_active(job, true)
return job_reply(job)
