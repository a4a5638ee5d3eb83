-- judge: uid, expect?, expect_state, control_rev, number, spend (JSON), text, by
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
local key = 'spend:' .. int(A.number)
if job[key] == A.spend then
  return job_reply(job)
end
-- Of a job that has ended only what costs nothing is put right: a lost node was the cause.
local no = (cjson.decode(A.spend).counts and check_open(job)) or check_expected(job)
if no then
  return no
end
if job.last_number ~= int(A.number) or not job[key] then
  return refuse('stale', 'generation ' .. int(A.number) .. ' of job ' .. job.name .. ' is not the last that ended')
end
job[key] = A.spend
put_entries(job, 'silent', {})
job_save(job)
event({ kind = 'FaultJudged', job = job, generation = job.last_number, by = A.by, text = A.text, alone = true })
return job_reply(job)
