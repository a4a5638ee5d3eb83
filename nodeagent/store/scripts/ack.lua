-- ack: uid, token, node, life, start, ack (JSON), last? ({state, body})
local job, no = job_of_caller()
if no then
  return no
end
local member = job['member:' .. A.node] and cjson.decode(job['member:' .. A.node])
if member and member.life ~= A.life then
  member = nil
end
local keeper = job['keeper:' .. A.node] and job.head_state ~= 'active'
if not member and not keeper and not job['holder:' .. A.node] then
  return job_reply(job)
end
local ack = cjson.decode(A.ack)
if ack.ended ~= (job.head_state == 'ended') then
  return job_reply(job)
end
if A.last and job.last_number ~= '0' then
  if A.last.state == 'left' and not string.match(job['last:' .. A.node] or '', '^%d+ left ') then
    event({ kind = 'WorkersLeft', job = job, node = A.node, generation = job.last_number, by = A.node,
      text = A.node .. ': ' .. cjson.decode(A.last.body).reason })
  end
  put_report(job, 'last', A.node, A.last.state, A.last.body)
end
job['holder:' .. A.node] = nil
if job['silent:' .. A.node] and cjson.decode(job['silent:' .. A.node]) == A.life then
  job['silent:' .. A.node] = nil
end
if (member or keeper) and job.head_state == 'forming' then
  job['ack:' .. A.node] = A.ack
elseif keeper and not ack.lends then
  put_entries(job, 'keeper', {})
end
local devices = {}
if member and job.head_state ~= 'ended' then
  for _, device in ipairs(member.devices) do
    devices[device] = true
  end
end
book(A.node, job.uid, devices)
if job.head_state == 'forming' and not not_ready(job) then
  make_active(job)
else
  settle(job)
end
return job_reply(job)
