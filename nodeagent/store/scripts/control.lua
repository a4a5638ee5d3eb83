-- control: uid, expect_rev, control (JSON), by, request, event, text
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
if request_seen(A.request) then
  return job_reply(job)
end
local old, new = cjson.decode(job.control), cjson.decode(A.control)
local only_delete = new.delete and new.desired == old.desired and new.target == old.target
  and new.restart == old.restart
if is_terminal(job) and not only_delete then
  return refuse('ended', 'job ' .. job.name .. ' has ended (' .. job.phase .. ')')
end
if old.rev ~= A.expect_rev then
  return refuse('stale', 'the control of job ' .. job.name .. ' has revision ' .. int(old.rev) .. ' by now, not '
    .. int(A.expect_rev))
end
job.control = A.control
job_save(job)
remember(A.request, job.uid)
event({ kind = A.event, job = job, by = A.by, text = A.text })
return job_reply(job)
