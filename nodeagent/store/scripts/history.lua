-- history: jobs of the history. Either ARGV[1] is 'of', ARGV[2] a uid, a name (of several jobs the last to end) or the
-- beginning of uids, and ARGV[3] the most jobs to return. Or ARGV[1] is 'after' and ARGV[2] the place of the previous
-- page's last job ('' at first): returns the jobs that ended next, the oldest first; fewer where they are large. Each is
-- its place ('exact' if it has this very uid or name, '' if its uid begins so), its uid and its record, or of a record
-- that cannot be read nothing, and why. It only reads: it has no prelude, and the served clock does not advance.
local PAGE_BYTES = 262144
local P, found, bytes = KEYS[1], {}, 0
local HISTORY, most = P .. 'history', tonumber(ARGV[3])

local function take(uid, place)
  local job = redis.pcall('HGETALL', P .. 'past:' .. uid)
  if job[1] then
    found[#found + 1] = { place, uid, job }
    for _, text in ipairs(job) do
      bytes = bytes + #text
    end
  else
    found[#found + 1] = { place, uid, {}, job.err or 'there is no such key' }
  end
end

if ARGV[1] == 'after' then
  local score, uid = string.match(ARGV[2], '^(%S+) (%S+)$')
  local same = score and redis.call('ZCOUNT', HISTORY, score, score) or 0
  local lines = redis.call('ZRANGEBYSCORE', HISTORY, score or '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, most + same)
  for i = 1, #lines, 2 do
    local this = string.match(lines[i], '^[%w._-]+') or '-' -- no step wrote such a line
    if #found < most and bytes < PAGE_BYTES and not (lines[i + 1] == score and this <= uid) then
      take(this, lines[i + 1] .. ' ' .. this)
    end
  end
  return found
end
local INDEX, which = P .. 'history:index', ARGV[2]
if redis.call('ZSCORE', INDEX, 'uid ' .. which) then
  take(which, 'exact')
  return found
end
local named = redis.call('ZREVRANGEBYLEX', INDEX, '(name ' .. which .. '!', '[name ' .. which .. ' ', 'LIMIT', 0, 1)
if not string.find(which, ' ', 1, true) and named[1] then
  take(string.match(named[1], '%S+$'), 'exact')
  return found
end
for _, line in ipairs(redis.call('ZRANGEBYLEX', INDEX, '[uid ' .. which, '(uid ' .. which .. '~', 'LIMIT', 0, most)) do
  take(string.sub(line, #'uid ' + 1), '')
end
return found
