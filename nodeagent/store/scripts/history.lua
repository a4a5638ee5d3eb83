-- history: jobs of the history. Either ARGV[1] is 'of', ARGV[2] a uid, a name (of several jobs the last to end) or the
-- beginning of uids, and ARGV[3] the most jobs to return. Or ARGV[1] is 'after' and ARGV[2] the place of the previous
-- page's last job ('' at first): returns the jobs that ended next, the oldest first, each after its place; fewer where
-- they are large. It only reads: it has no prelude, and the served clock does not advance.
local PAGE_BYTES = 1048576
local P, found, bytes = KEYS[1], {}, 0
local HISTORY, most = P .. 'history', tonumber(ARGV[3])

local function take(uid, place)
  local job = redis.call('HGETALL', P .. 'past:' .. uid)
  if job[1] then
    found[#found + 1] = { place, job }
    for _, text in ipairs(job) do
      bytes = bytes + #text
    end
  end
end

if ARGV[1] == 'after' then
  local score, uid = string.match(ARGV[2], '^(%S+) (%S+)$')
  local same = score and redis.call('ZCOUNT', HISTORY, score, score) or 0
  local lines = redis.call('ZRANGEBYSCORE', HISTORY, score or '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, most + same)
  for i = 1, #lines, 2 do
    local this = string.match(lines[i], '^%S+')
    if #found < most and bytes < PAGE_BYTES and not (lines[i + 1] == score and this <= uid) then
      take(this, lines[i + 1] .. ' ' .. this)
    end
  end
  return found
end
local begins, named = {}, nil
for _, line in ipairs(redis.call('ZRANGE', HISTORY, 0, -1)) do
  local uid, name = string.match(line, '^(%S+) (%S+)')
  if uid == ARGV[2] then
    take(uid, '')
    return found
  end
  named = name == ARGV[2] and uid or named
  if string.sub(uid, 1, #ARGV[2]) == ARGV[2] and #begins < most then
    begins[#begins + 1] = uid
  end
end
for _, uid in ipairs(named and { named } or begins) do
  take(uid, '')
end
return found
