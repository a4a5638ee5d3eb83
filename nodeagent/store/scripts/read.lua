-- read: uid. The whole record of a job, for who lacks what a difference begins with.
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
return job_reply(job)
