-- set_failsafe_members: uid, token, node, life, start, expect (node to life), failsafe members (node to JSON life)
local job, no = job_of_caller(job_read)
if no then
  return no
end
local name = 'generation ' .. job.generation_number .. ' of job ' .. job.name
if job.generation_state ~= 'active' then
  return refuse('stale', name .. ' is ' .. job.generation_state .. ', not active: read it again')
end
local chosen = entries(job, 'failsafe_member')
local same = #sorted_keys(chosen) == #sorted_keys(A.expect)
for node, life in pairs(A.expect) do
  same = same and chosen[node] == life
end
if not same then
  return refuse('stale', 'the failsafe members of ' .. name .. ' have changed: read it again')
end
if not chosen[A.node] and (next(chosen) or not job['member:' .. A.node]) then
  return refuse('stale', 'node ' .. A.node .. ' may not choose the failsafe members of ' .. name)
end
put_entries(job, 'failsafe_member', A.failsafe_members)
job_save(job)
unannounced()
return job_reply(job)
