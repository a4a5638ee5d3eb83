-- settle: uid, expect?, expect_state, control_rev, control (JSON), event, text, by
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
if job.control == A.control then
  return job_reply(job)
end
local no = check_decision(job)
if no then
  return no
end
job.control = A.control
if A.event == 'JobAfterMet' then -- it waits for nodes from now on
  job.not_before = int(math.max(served, tonumber(job.not_before)))
end
job_save(job)
event({ kind = A.event, job = job, generation = job.generation_number, by = A.by, text = A.text })
if A.event == 'JobAfterMet' then -- a thousand jobs may follow one job: the agent that settles them continues by itself
  unannounced()
end
return job_reply(job)
