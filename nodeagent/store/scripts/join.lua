-- join: node, life, start, address, pid, facts, timing, lease, credit, gap, limit, regroup, uid (of the
-- cluster, if it is new), key (its digest)
local DAY_MS, FORGET_AT_ONCE, DEAD_KEPT = 86400000, 8, 16
local id = A.node

-- No other node is there, nor another life of this one, and all jobs have ended: nothing here needs the former key.
local function may_bring_key()
  if served < recover then
    return false
  end
  for _, other in ipairs(redis.call('ZRANGE', LEASE, 0, -1)) do
    if not lapsed(other) and (other ~= id or node_brief(other).life ~= A.life) then
      return false
    end
  end
  for _, uid in ipairs(redis.call('HVALS', NAMES)) do
    local phase = redis.call('HGET', P .. 'job:' .. uid, 'phase')
    if phase and not is_terminal({ phase = phase }) then
      return false
    end
  end
  return true
end

if not meta.timing then
  -- if only META is gone, its revision must not fall behind the records that are there
  local newest = redis.call('ZREVRANGEBYSCORE', CHANGES, '900000000000000', '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  revision = math.max(revision, math.floor(tonumber(newest[2] or '0')))
  redis.call('HSET', META, 'timing', A.timing, 'lease', int(A.lease), 'credit', int(A.credit), 'gap', int(A.gap),
    'limit', int(A.limit), 'cluster_uid', A.uid, 'version', VERSION, 'key', A.key, 'rev', int(revision),
    'era', RUN .. '@' .. int(now) .. '/' .. int(revision))
  meta.cluster_uid, meta.limit, lease_ms = A.uid, A.limit, A.lease
elseif meta.timing ~= A.timing then
  return refuse('timing', meta.timing)
elseif meta.key ~= A.key then
  if (meta.key or '') ~= '' and not may_bring_key() then
    return refuse('key', 'node ' .. id .. ' has another cluster key than the cluster')
  end
  redis.call('HSET', META, 'key', A.key)
end
local waits = tonumber(meta.regroup or '0')
if A.regroup > waits or (A.regroup < waits and served >= recover) then -- the recovery that began with it goes on
  redis.call('HSET', META, 'regroup', int(A.regroup))
end
has_called(id)
local old = node_read(id)
if old and not as_written(id) then
  return distrust({ 'node:' .. id })
elseif shortened() and not clear_leases('(' .. meta.floor) and shortened() then
  return distrust({ 'lease' })
end
local same = old and old.life == A.life
local dead = {}
for life in string.gmatch(old and old.dead or '', '%S+') do
  dead[#dead + 1] = life
  if life == A.life then
    dead.mine = true
  end
end
if same and old.lost == '1' or dead.mine and not same then -- no step leaves the present life among the dead
  return refuse('lost', 'this life of node ' .. id .. ' was declared lost: it must come back with a new one')
end
if same and A.start < tonumber(old.start) then
  return refuse('not_current', 'a newer agent of node ' .. id .. ' has started (start ' .. old.start .. ', at '
    .. old.address .. '): this one must stop')
end
if old and not same and not lapsed(id) and lease_end(id) > served then
  local left = math.max(lease_end(id), shelter()) - served
  return refuse('lease_held', 'node id ' .. id .. ' is held by an agent at ' .. old.address .. ' (pid ' .. old.pid
    .. ') for another ' .. string.format('%.1f', left / 1000) .. ' s at least; this agent is at ' .. A.address
    .. ': give it another node id, or stop the other agent', string.format('%.3f', left / 1000))
end
if old and not same and (not lapsed(id) or served < recover) then
  return refuse('recovering', 'node id ' .. id .. ' was held by an agent at ' .. old.address
    .. ', and the store has been disturbed: this one may join in '
    .. string.format('%.1f', (shelter() - served) / 1000) .. ' s, if the other does not come back')
end

local since = int(served - math.max(DAY_MS, RELEASE * tonumber(meta.limit)))
for _, set in ipairs({ LEASE, DEPARTED }) do
  for _, silent in ipairs(redis.call('ZRANGEBYSCORE', set, '-inf', since, 'LIMIT', 0, FORGET_AT_ONCE)) do
    if lapsed(silent) then
      delete_node(silent)
    end
  end
end

redis.call('ZREM', DEPARTED, id)
redis.call('ZADD', LEASE, int(served + lease_ms), id)
local node = {
  id = id, life = A.life, start = int(A.start), joined = same and old.joined or int(served), facts = A.facts,
  address = A.address, pid = int(A.pid), readiness = same and old.readiness or '{}', lost = '0', left = '0',
  seq = same and old.start == int(A.start) and old.seq or '0', dead = same and old.dead or '', rev = old and old.rev,
}
if old and not same then
  dead[#dead + 1] = old.life
  node.dead = table.concat(dead, ' ', math.max(1, #dead - DEAD_KEPT + 1))
end
node_save(node)
if not same then
  event({ kind = 'NodeJoined', node = id, by = id, text = 'node ' .. id .. ' joined from ' .. A.address })
  retire(id, A.life)
elseif old.mute then
  agent_back(id)
end
return { 1, meta.cluster_uid, int(served) }
