-- renew_lease: node, life, era, length, asks (its agent is silent or cut off), late (for no other reason than that answers
-- come late there), standing? (of these jobs nothing runs here: uid to the number of the generation). Replies "served
-- unannounced" and the jobs that wait for this node. Such a node is marked as `mute`, until a join of its agent, or a beat
-- of one that has answers. With `late` it is only where a job waits: answers may come late everywhere, and each mark wakes
-- all agents. Its cost does not depend on the number of nodes or jobs. It does not compare views: if the store lost writes,
-- or went back to older ones, the agents restore them first, and until then this step renews nothing.
local found = redis.call('HMGET', P .. 'node:' .. A.node, 'life', 'lost', 'left', 'mute')
if not found[1] then
  return refuse('unknown', 'node ' .. A.node .. ' is not known to the store: its agent must join again')
end
if (found[1] ~= A.life or found[2] == '1' or found[3] == '1') and not as_written(A.node) then
  return distrust({ 'node:' .. A.node })
end
if found[1] ~= A.life or found[2] == '1' or found[3] == '1' then
  return refuse('lost', 'this life of node ' .. A.node .. ' is over: its agent must join with a new one')
end
if A.era ~= meta.era then
  return refuse('era', 'the store may have lost writes: its agents must agree on what it has first')
end
redis.call('ZADD', LEASE, int(served + A.length), A.node)
local waits = A.asks and jobs_that_wait(A.node, A.life, A.standing or {}) or ''
local marks = A.asks and (not A.late or waits ~= '') and found[4] ~= '1' and served >= recover
local node = marks and as_written(A.node) and node_read(A.node)
if node then
  local silent = copied(node)
  silent.mute = '1'
  node_save(silent)
  event({ kind = 'AgentSilent', node = A.node, by = A.node,
    text = 'the agent of node ' .. A.node .. ' is silent or cut off from the store: the node gets no new work until it is back' })
end
return { 1, int(served) .. ' ' .. (meta.unannounced or '0'), waits }
