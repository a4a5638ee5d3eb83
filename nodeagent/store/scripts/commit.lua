-- commit: uid, token, node, life, start, checkpoint (JSON), instead? (JSON: a pointer that does not count), again? (the
-- pointer was committed before, and somebody wrote over it)
local no = not_current(A.node, A.life, A.start)
if no then
  return no
end
local job = job_lean(A.uid, A.node)
if not job then
  return no_job(A.uid)
end
if job.active_id ~= A.token.id or job.active_number ~= int(A.token.number) then
  local is = job.active_id and ('generation ' .. job.active_number) or 'none'
  return refuse('stale', 'generation ' .. int(A.token.number) .. ' of job ' .. job.name .. ' may commit nothing any more: '
    .. is .. ' is the newest that was active')
end
local new, old = cjson.decode(A.checkpoint), job.checkpoint and cjson.decode(job.checkpoint)
if not (A.again and new.number <= A.token.number or lives_of(job, A.node)[A.life]) then
  return refuse('stale', 'node ' .. A.node .. ' runs no workers of job ' .. job.name)
end
local void = old and A.instead and cjson.decode(A.instead)
if void and old.name == void.name and old.number == void.number and old.order == void.order
  and (old.signature or '') == void.signature then
  old = nil
end
if old and old.name == new.name then
  return job_reply(job)
end
if old and (old.number > new.number or (old.number == new.number and old.order >= new.order)) then
  return refuse('stale', 'checkpoint ' .. old.name .. ' of job ' .. job.name .. ' was committed after ' .. new.name)
end
job.checkpoint = A.checkpoint
if not A.again then
  local held = held_by(job)
  held.saved = served
  put_held(job, held)
end
job_save(job)
return job_reply(job)
