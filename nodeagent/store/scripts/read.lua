-- read: uid. The whole record of a job, for an agent that has no record to add a difference to.
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
return job_reply(job)
