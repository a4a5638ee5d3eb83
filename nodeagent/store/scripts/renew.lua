-- renew: uid, expect (signature of the admission to replace), admission (JSON)
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
local no = check_open(job)
if no then
  return no
end
local now_signed = job.admission and cjson.decode(job.admission).signature
if now_signed ~= cjson.decode(A.admission).signature then
  if now_signed ~= A.expect then
    return refuse('stale', 'the admission of job ' .. job.name .. ' has changed: read it again')
  end
  job.admission = A.admission
  job_save(job)
end
return job_reply(job)
