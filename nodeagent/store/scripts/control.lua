-- control: uid, expect_rev, control? (JSON), by?, request, event, text, did, claims?
local job = job_read(A.uid)
if not job then
  return no_job(A.uid)
end
local seen, other = request_seen(A.request, A.did)
if other then
  return other
end
if seen then
  ask_to_save()
  return job_reply(job)
end
local old, new = cjson.decode(job.control), A.control and cjson.decode(A.control) or {}
local only_delete = new.delete and new.desired == old.desired and new.target == old.target
  and new.restart == old.restart
if is_terminal(job) and not only_delete then
  return refuse('ended', 'job ' .. job.name .. ' has ended (' .. job.phase .. ')')
end
if old.rev ~= A.expect_rev then
  return refuse('stale', 'the control of job ' .. job.name .. ' has revision ' .. int(old.rev) .. ' by now, not '
    .. int(A.expect_rev))
end
local no = check_quotas(A.claims)
if no then
  return no
end
remember(A.request, job.uid, A.did, job.owner, not A.control)
if not A.control then
  ask_to_save()
  return job_reply(job) -- the control is so already
end
job.control = A.control
job_save(job)
leave_quotas(A.claims, job.rev)
ask_to_save()
event({ kind = A.event, job = job, by = A.by, text = A.text })
return job_reply(job)
