-- request: ARGV[1] is a request id. The answer that it got before, if there is one, and the newest revision: its caller
-- waits again until that is on the disks of nodes. It has no prelude, and the served clock does not advance.
local P = KEYS[1]
local found = redis.call('HGET', P .. 'requests', ARGV[1])
if not found then
  return false
end
local rev = redis.call('HGET', P .. 'meta', 'rev') or '0'
redis.call('HSET', P .. 'meta', 'asked', rev)
return { found, rev }
