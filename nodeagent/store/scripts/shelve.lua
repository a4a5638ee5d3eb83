-- shelve: uids (list), before (Unix time), most. Moves ended jobs, on whose nodes nothing may run any more, into the
-- history. Deletes the oldest of the history: jobs that ended before that time, and those in excess of `most` of one
-- owner, of which those that never ran go first. If all owners together have still more than ALL_OWNERS times as many:
-- of those who have most.
local AT_ONCE, ALL_OWNERS = 64, 10
local function never_ran_first(lines)
  local sorted, ran = {}, {}
  for _, line in ipairs(lines) do
    local found = attempt('HGET', P .. 'past:' .. string.match(line, '^%S+'), 'first_active')
    local list = type(found) == 'string' and ran or sorted
    list[#list + 1] = line
  end
  for _, line in ipairs(ran) do
    sorted[#sorted + 1] = line
  end
  return sorted
end
local function in_excess()
  local lines, owners, of = redis.call('ZRANGE', past.lines, 0, -1), {}, {}
  for _, line in ipairs(lines) do
    local owner = string.match(line, ' (%S+) %S+$') or ''
    if not of[owner] then
      owners[#owners + 1], of[owner] = owner, {}
    end
    table.insert(of[owner], line)
  end
  local out, gone, total = {}, {}, 0
  local function take(owner)
    gone[owner] = gone[owner] + 1
    out[#out + 1] = of[owner][gone[owner]]
  end
  for _, owner in ipairs(owners) do
    gone[owner] = 0
    if #of[owner] > A.most then
      of[owner] = never_ran_first(of[owner])
      for _ = 1, #of[owner] - A.most do
        take(owner)
      end
    end
    total = total + #of[owner] - gone[owner]
  end
  for _ = 1, math.min(total - ALL_OWNERS * A.most, AT_ONCE - #out) do
    local most = owners[1]
    for _, owner in ipairs(owners) do
      most = #of[owner] - gone[owner] > #of[most] - gone[most] and owner or most
    end
    take(most)
  end
  return { unpack(out, 1, math.min(#out, AT_ONCE)) }
end
past.count_anew()
local before = A.before <= now / 1000 and string.format('%.3f', A.before) or '-inf' -- later: no such time can be right
for _, uid in ipairs(A.uids) do
  local job = job_read(uid)
  if job and is_terminal(job) and not still_held(job) then
    past.add(job)
    delete_job(job)
  end
end
local oldest = redis.call('ZCARD', past.lines) > A.most and in_excess() or {}
oldest = oldest[1] and oldest or redis.call('ZRANGEBYSCORE', past.lines, '-inf', '(' .. before, 'LIMIT', 0, AT_ONCE)
for _, line in ipairs(oldest) do
  local uid, name, owner = string.match(line, '^(%S+) (%S+) (%S+)')
  past.drop(line)
  event({ kind = 'JobDeleted', job = { uid = uid, name = name, owner = owner }, by = 'retention',
    text = 'job ' .. name .. ' deleted from the history (by retention)' })
end
return { 1, #oldest == AT_ONCE and 1 or 0 }
