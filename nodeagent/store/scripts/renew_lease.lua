-- renew_lease: node, life, era, length, asks. Replies "served unannounced" and who waits for this node.
-- Constant in nodes and jobs. It says nothing of what this node knows: what the store lost, or went back to, is for the
-- agents to settle, and until then there is no renewal.
local found = redis.call('HMGET', P .. 'node:' .. A.node, 'life', 'lost', 'left')
if not found[1] then
  return refuse('unknown', 'node ' .. A.node .. ' is not known to the store: its agent must join again')
end
if found[1] ~= A.life or found[2] == '1' or found[3] == '1' then
  return refuse('lost', 'this life of node ' .. A.node .. ' is over: its agent must join with a new one')
end
if A.era ~= meta.era then
  return refuse('era', 'the store may have lost writes: its agents must agree on what it has first')
end
redis.call('ZADD', LEASE, int(served + A.length), A.node)
local waits = ''
if A.asks then
  waits = who_waits_for(A.node, A.life) or ''
end
return { 1, int(served) .. ' ' .. (meta.unannounced or '0'), waits }
