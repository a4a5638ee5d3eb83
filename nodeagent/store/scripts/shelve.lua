-- shelve: uids (list), before (Unix time), most. Moves ended jobs, on whose nodes nothing may run any more, into the
-- history. Deletes the oldest of the history: jobs that ended before that time, and those in excess of `most`.
local AT_ONCE = 64
local before = A.before <= now / 1000 and string.format('%.3f', A.before) or '-inf' -- later: no such time can be right
for _, uid in ipairs(A.uids) do
  local job = job_read(uid)
  if job and is_terminal(job) and not still_held(job) then
    redis.call('DEL', P .. 'past:' .. uid)
    in_parts(flat(job), 2, function(...) redis.call('HSET', P .. 'past:' .. uid, ...) end)
    redis.call('ZADD', HISTORY, tonumber(job.ended or '') or 0, past_line(job))
    delete_job(job)
  end
end
local too_many = redis.call('ZCARD', HISTORY) - A.most
local oldest = too_many > 0 and redis.call('ZRANGE', HISTORY, 0, math.min(too_many, AT_ONCE) - 1)
  or redis.call('ZRANGEBYSCORE', HISTORY, '-inf', '(' .. before, 'LIMIT', 0, AT_ONCE)
for _, line in ipairs(oldest) do
  local uid, name = string.match(line, '^(%S+) (%S+)')
  past_drop(line)
  event({ kind = 'JobDeleted', job = { uid = uid, name = name }, text = 'job ' .. name .. ' deleted from the history' })
end
return { 1, #oldest == AT_ONCE and 1 or 0 }
