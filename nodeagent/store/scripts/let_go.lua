-- let_go: node, life, era, uid, number. From a lease process whose agent is silent or cut off: of this job's generations up to this
-- number nothing runs on the node, nor will, and it lends them nothing any more. Replies "uid number".
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
local holder = job and job.active_number == int(A.number) and job['holder:' .. A.node]
if not holder or cjson.decode(holder).life ~= A.life then -- it has let go, or the job is not there any more
  return done
end
local text = A.node .. ' let go of it, since its agent is silent or cut off from the store'
if job['silent:' .. A.node] and cjson.decode(job['silent:' .. A.node]) == A.life then -- who judges waits for its word
  local faults = { last = 0 }
  for _, report in pairs(entries(job, 'last')) do
    faults.last = math.max(faults.last, tonumber(string.match(report, '^%d+')))
  end
  put_report(job, faults, 'last', A.node, 'fenced', cjson.encode({ state = 'fenced', reason = text }))
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
event({ kind = 'NodeLetGo', job = job, node = A.node, generation = job.active_number, by = A.node, text = text })
return done
