-- request: ARGV[1] is a request id. The answer that it got before, if there is one: its caller waits again until that is
-- on the disks of nodes, with all that was written since. It has no prelude, and the served clock does not advance.
local P = KEYS[1]
local found = redis.call('HGET', P .. 'requests', ARGV[1])
if found then
  redis.call('HSET', P .. 'meta', 'asked', redis.call('HGET', P .. 'meta', 'rev') or '0')
end
return found
