-- beat: node, life, start, seq, length, rev, era, facts?, address?, pid?, readiness?, pods (list of {uid, body}), saved?,
--   notes (list of {kind, text}), top
local PAGE, PAGE_BYTES, SAVES_KEPT = 256, 1048576, 1000
local id = A.node
local top = math.max(A.rev, A.top)
local continued = A.era == meta.parent and top <= known -- all that it has read is in this era too
if not node_read(id) or top > revision or (A.era ~= '' and A.era ~= meta.era and not continued) then
  return refuse('behind', 'the store may have lost what node ' .. id .. ' knows: it must offer that, and join again')
end
local no = not_current(id, A.life, A.start)
if no then
  return no
end
local node = node_read(id)
if A.seq <= tonumber(node.seq) then
  return refuse('stale', 'beat ' .. int(A.seq) .. ' of node ' .. id .. ' came after beat ' .. node.seq)
end
hear(id)
redis.call('HSET', P .. 'node:' .. id, 'seq', int(A.seq))
redis.call('ZADD', LEASE, int(served + A.length), id)
node.seq = int(A.seq)
local new = copied(node)
if A.facts then
  new.facts, new.address, new.pid = A.facts, A.address, int(A.pid)
end
new.readiness = A.readiness or new.readiness
node_save(new)
for _, pod in ipairs(A.pods) do
  redis.call('SET', P .. 'pod:' .. pod.uid .. ':' .. id, pod.body, 'PX', int(math.max(10 * lease_ms, 30000)))
end
for _, note in ipairs(A.notes) do
  event({ kind = note.kind, node = id, by = id, text = note.text })
end

local asked = tonumber(meta.asked or '0')
if A.saved then
  local before = tonumber(string.match(redis.call('HGET', SAVED, id) or '0', '^%d+'))
  redis.call('HSET', SAVED, id, int(A.saved.rev) .. ' ' .. A.saved.era)
  if before < asked and A.saved.rev >= asked then
    redis.call('XADD', P .. 'saves', 'MAXLEN', '~', SAVES_KEPT, '*', 'node', id)
  end
end

local records, changed = {}, {}
local rev, more = redis.call('HGET', META, 'rev'), 0
if served < recover then
  rev = int(A.rev)
else
  changed = redis.call('ZRANGEBYSCORE', CHANGES, '(' .. int(A.rev), '+inf', 'WITHSCORES', 'LIMIT', 0, PAGE + 1)
end
if #changed > 2 * PAGE then
  rev, more = changed[2 * PAGE], 1
end
local bytes = 0
for i = 1, math.min(#changed, 2 * PAGE), 2 do
  local body = redis.call('HGETALL', P .. changed[i])
  for _, text in ipairs(body) do
    bytes = bytes + #text
  end
  if bytes > PAGE_BYTES and i > 1 then -- the rest travels with the next beat
    rev, more = changed[i - 1], 1
    break
  end
  local cordon = ''
  if string.sub(changed[i], 1, 5) == 'node:' then
    cordon = redis.call('HGET', CORDONS, string.sub(changed[i], 6)) or ''
  end
  records[#records + 1] = { changed[i], body, cordon }
end

-- Those whose lease ended by now: lapsed, unless an amnesty protects them.
local gone_now, sheltered = {}, {}
for _, other in ipairs(redis.call('ZREVRANGEBYSCORE', LEASE, int(served), '-inf')) do
  if served >= shelter() then
    gone_now[#gone_now + 1] = other
  elseif lapsed(other) then
    gone_now[#gone_now + 1] = other
  elseif other ~= id and #sheltered < PAGE then
    sheltered[#sheltered + 1] = other
  end
  if #gone_now == PAGE then
    break
  end
end
local next_end = sheltered[1] and shelter() or nil
if not next_end then
  local later = redis.call('ZRANGEBYSCORE', LEASE, '(' .. int(served), '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
  local first = later[1] == id and 3 or 1
  if later[first] then
    next_end = math.max(tonumber(later[first + 1]), shelter())
  end
end
local newest = redis.call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)[1]
return { 1, meta.cluster_uid, int(served), gone_now, next_end and int(next_end - served) or '', rev, more,
  newest and newest[1] or '0-0', records, meta.era or '', served < recover and 1 or 0,
  int(asked), int(math.max(0, recover - served)), served < recover and redis.call('ZRANGE', AWAITED, 0, NAMED - 1) or {}, sheltered,
  served < recover and redis.call('ZCARD', AWAITED) or 0 }
