-- let_go: node, life, era, uid, number. From a lease process whose agent is silent or cut off: of this job's generations up to this
-- number nothing runs on the node, nor will, and it lends them nothing any more. A member of the active one counts as one
-- whose workers were fenced: the gang forms anew, and the node is a holder then, which lets go as any other. Replies
-- "uid number".
local node = node_read(A.node)
if not node then
  return refuse('unknown', 'node ' .. A.node .. ' is not known to the store: its agent must join again')
end
if meta.era ~= A.era then
  return refuse('era', 'the store may have lost writes: its agents must agree on what it has first')
end
if node.life ~= A.life or node.lost == '1' or node.left == '1' then
  return as_written(A.node) and refuse('lost', 'this life of node ' .. A.node .. ' is over') or distrust({ 'node:' .. A.node })
end
local done = { 1, A.uid .. ' ' .. int(A.number) }
local job = job_read(A.uid)
if not job or job.active_number ~= int(A.number) then -- the job is not there any more, or an older generation's word is late
  return done
end
local text = A.node .. ' let go of it, since its agent is silent or cut off from the store'
local function answered(kind)
  local faults = { [kind] = 0 }
  for _, report in pairs(entries(job, kind)) do
    faults[kind] = math.max(faults[kind], tonumber(string.match(report, '^%d+')))
  end
  put_report(job, faults, kind, A.node, 'fenced', cjson.encode({ state = 'fenced', reason = text }))
end
local function noted()
  event({ kind = 'NodeLetGo', job = job, node = A.node, generation = job.active_number, by = A.node, text = text })
  return done
end
if is_awaited(A.life, job.generation_state, job['member:' .. A.node], job['report:' .. A.node]) then
  answered('report')
  job_save(job)
  return noted()
end
local holder = job['holder:' .. A.node]
if not holder or cjson.decode(holder).life ~= A.life then -- it has let go
  return done
end
local known = string.find(job['last:' .. A.node] or '', text, 1, true) -- it let go as a member, and that is in the log
if job['silent:' .. A.node] and cjson.decode(job['silent:' .. A.node]) == A.life then -- who judges waits for its word
  answered('last')
  job['silent:' .. A.node] = nil
end
job['holder:' .. A.node] = nil
if job['failsafe_member:' .. A.node] and job.generation_state == 'forming' then
  job.generation_released = '1'
elseif job['failsafe_member:' .. A.node] then
  put_entries(job, 'failsafe_member', {})
end
rebook(job, { [A.node] = true })
settle(job, next(entries(job, 'holder')))
return known and done or noted()
