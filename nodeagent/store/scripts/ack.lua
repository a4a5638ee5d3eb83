-- ack: uid, token, node, life, start, ack (JSON), last? ({state, body, brief?})
local job, no, counts = job_of_caller(job_lean)
if no then
  return no
end
local member = job['member:' .. A.node] and cjson.decode(job['member:' .. A.node])
if member and member.life ~= A.life then
  member = nil
end
local failsafe_member = job['failsafe_member:' .. A.node] and job.generation_state ~= 'active'
if not member and not failsafe_member and not job['holder:' .. A.node] then
  return job_reply(job)
end
local ack = cjson.decode(A.ack)
if ack.ended ~= (job.generation_state == 'ended') then
  return job_reply(job)
end
if #ack.down > 0 then -- the node stays a holder; those that these workers came after may stop now
  local holder = job['holder:' .. A.node]
  if holder and cjson.decode(holder).life == A.life then
    local down = '"down":' .. cjson.encode(ack.down)
    job['holder:' .. A.node] = string.gsub(holder, '"down":%[[^%]]*%]', function() return down end)
    settle(job, true)
    wake('job:' .. job.uid, '*', wake_news(job))
  end
  return own_reply(job)
end
if A.last and job.last_number ~= '0' then
  if A.last.state == 'left' and not string.match(job['last:' .. A.node] or '', '^%d+ left ') then
    event({ kind = 'WorkersLeft', job = job, node = A.node, generation = job.last_number, by = A.node,
      text = A.node .. ': ' .. (cjson.decode(A.last.body).reason or '') })
  end
  put_report(job, counts, 'last', A.node, A.last.state, A.last.body, A.last.brief)
end
local last_holder = job['holder:' .. A.node] and counts.holding == 1
local had = {}
if job['holder:' .. A.node] then
  for _, device in ipairs(cjson.decode(job['holder:' .. A.node]).devices) do
    had[device] = true
  end
  job['holder:' .. A.node] = nil
  counts.holding = counts.holding - 1
  counts.freed = member and counts.freed or 1
end
if job['silent:' .. A.node] and cjson.decode(job['silent:' .. A.node]) == A.life then
  job['silent:' .. A.node] = nil
end
if job.generation_state == 'forming' then
  if member and take_ack(job, member, ack) then
    counts.missing = counts.missing - 1
  end
  if failsafe_member and not ack.lends then
    job.generation_released = '1'
  end
elseif failsafe_member and not ack.lends then
  job = widened(job)
  put_entries(job, 'failsafe_member', {})
end
local devices = {}
if member and job.generation_state ~= 'ended' then
  for _, device in ipairs(member.devices) do
    had[device], devices[device] = true, true
  end
end
book(A.node, job.uid, devices)
count_devices(job, { [A.node] = had }, { [A.node] = devices })
if job.generation_state == 'forming' and counts.missing == 0 and counts.holding == 0 then
  job = widened(job)
  if not not_ready(job) then
    local freed = counts.freed == 1
    counts.freed = 0
    make_active(job, freed)
    return job_reply(job)
  end
end
-- one text then stands for all that the others have changed
local all_let_go = last_holder and job.generation_state == 'ended'
settle(all_let_go and widened(job) or job, counts.holding > 0, all_let_go)
if job.generation_state ~= 'forming' then
  unannounced()
end
return job.generation_state == 'active' and job_reply(job) or own_reply(job)
