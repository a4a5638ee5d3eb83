-- beat: node, life, start, seq, rev, era, facts?, address?, pid?, readiness?, pods (list of {uid, body}), saved?,
--     notes (list of {kind, text}), top, looks (number of its look for damage; 0: it does not look),
--     runs (list of {uid, rev, generation}), damaged (list of records), silent,
--     nodes (the agent has read their records up to this revision, or is about to), ahead (jobs by uid that the agent
--     has read up to this later revision of its era), anew? (the store's revision when the agent began to read
--     everything), seen? (of one of runs: uid, rev, and texts, by field; '' where there is none), unanswered? (the
--     agent had no answer to its last call, and may get none to this one: a mute node stays so), room? (bytes of records
--     that the reply may have)
local PAGE, MANY, PAGE_BYTES, SAVES_KEPT = 256, 8192, A.room or 1048576, 1000
local RECORD_BYTES, TEXT_BYTES = 20971520, 4194304 -- codec.py: MOST_OF_RECORD, MOST_CHARACTERS
local MOST_SEQ = 1e13 -- of the ms since the boot, by which agents number their beats
local id = A.node
local top = math.max(A.rev, A.top)
local node = node_brief(id)
local continued = A.era == meta.parent and top <= known -- this era has all that the agent has read
if A.rev > 0 and math.max(A.rev, A.anew or 0) < tonumber(meta.horizon or '0') then
  return refuse('behind', 'records were removed since node ' .. id .. ' has read the store, and the marks of these '
    .. 'removals are gone too: it must read everything anew')
end
if meta.timing and A.rev > 0 and A.era == meta.era and not node and not buried('node:' .. id)
  and served >= recover then
  return distrust({ 'node:' .. id })
end
if not node or top > revision or (A.era ~= '' and A.era ~= meta.era and not continued) then
  return refuse('behind', 'the store may have lost what node ' .. id .. ' knows: it must offer that, and join again')
end
local no = not_current(id, A.life, A.start, node)
if no then
  return no
end
if A.seq <= tonumber(node.seq) then
  if tonumber(node.seq) > MOST_SEQ then
    return distrust({ 'node:' .. id })
  end
  return refuse('stale', 'beat ' .. int(A.seq) .. ' of node ' .. id .. ' came after beat ' .. node.seq, node.seq)
end
-- The steps would count by other values than those of `timing`, which all agents compare with their own.
local _, timing = pcall(cjson.decode, meta.timing or '0')
for field, name in pairs({ lease = 'lease', credit = 'credit', gap = 'gap', limit = 'failsafe_limit' }) do
  local seconds = type(timing) == 'table' and tonumber(timing[name])
  if seconds and math.abs(tonumber(meta[field]) - 1000 * seconds) > 1 then
    redis.call('DEL', META)
    return refuse('behind', 'somebody wrote another ' .. field .. ' into meta: the agents restore it')
  end
end
local strays = shortened() and clear_leases('(' .. meta.floor) -- while there are some, no node lapses, and none is named
if served >= recover then
  local damaged = A.damaged
  local key, or_key = nil, nil
  if not strays and shortened() then
    key = 'lease'
  elseif A.rev < revision and revision % ERA_REVISIONS > 0
    and redis.call('ZCOUNT', CHANGES, int(revision), int(revision)) == 0 then
    key = 'changes' -- an older list, without the last change: this agent would read that nothing has changed
  elseif A.looks > 0 then
    key, or_key = look_once(A, P, A.era == meta.era)
  end
  damaged[#damaged + 1] = key
  damaged[#damaged + 1] = or_key
  for uid, rev in pairs(A.era == meta.era and A.ahead or {}) do -- replies and wakes said so: the record was put back
    if (tonumber(redis.call('HGET', P .. 'job:' .. uid, 'rev') or '') or rev) < rev then
      damaged[#damaged + 1] = 'job:' .. uid
    end
  end
  if damaged[1] then
    return distrust(damaged)
  end
end
has_called(id)
redis.call('HSET', P .. 'node:' .. id, 'seq', int(A.seq))
local rev, more = int(revision), 0
local is_back = node.mute and not A.unanswered
if A.facts or A.readiness or is_back then
  local new = copied(node_read(id))
  if A.facts then
    new.facts, new.address, new.pid = A.facts, A.address, int(A.pid)
  end
  new.readiness = A.readiness or new.readiness
  new.mute = not is_back and new.mute or nil
  node_save(new)
  unannounced()
  if is_back then
    agent_back(id)
  end
  rev = redis.call('HGET', META, 'rev')
end
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
    append(P .. 'saves', '~', SAVES_KEPT, '*', 'node', id)
  end
end

-- Of what has changed, a page: without what the agent has read in another way, nodes by plain commands, and jobs with
-- the replies of its own steps or with a wake.
local records, changed = {}, {}
if served < recover then
  rev = int(A.rev)
else
  local most, ahead = A.nodes and MANY or PAGE + 1, A.era == meta.era and A.ahead or {}
  local listed = {}
  if A.nodes and A.rev == 0 then -- a newcomer reads all nodes by itself: their revisions are most of what this would list
    local names = redis.call('ZRANGE', CHANGES, 0, most - 1)
    for i, record in ipairs(names) do
      if i == most or not string.find(record, 'node:', 1, true) then
        listed[#listed + 1] = record
        listed[#listed + 1] = redis.call('ZSCORE', CHANGES, record)
      end
    end
    more = #names == most and 1 or 0
  else
    listed = redis.call('ZRANGEBYSCORE', CHANGES, '(' .. int(A.rev), '+inf', 'WITHSCORES', 'LIMIT', 0, most)
    more = #listed == 2 * most and 1 or 0
  end
  rev = more == 1 and listed[#listed] or rev
  for i = 1, #listed, 2 do
    local job = string.match(listed[i], '^job:(.*)$')
    local read = job and ahead[job] or string.find(listed[i], 'node:', 1, true) and A.nodes or 0
    if tonumber(listed[i + 1]) > read then
      changed[#changed + 1] = listed[i]
      changed[#changed + 1] = listed[i + 1]
    end
  end
end
if #changed > 2 * PAGE then
  rev, more = changed[2 * PAGE], 1
end
local bytes, cordons = 0, nil
for i = 1, math.min(#changed, 2 * PAGE), 2 do
  local record, body, cordon, kind = changed[i], {}, '', 'whole'
  if string.sub(record, 1, 5) == 'gone:' then
    record = string.sub(record, 6)
    if is_above(tonumber(changed[i + 1])) or redis.call('ZSCORE', CHANGES, record) then -- no step leaves both
      return distrust({ 'changes' })
    end
  else
    if string.sub(record, 1, 4) == 'job:' then
      body, kind = job_news(string.sub(record, 5), A.rev, A.era)
    else
      body = redis.call('HGETALL', P .. record)
    end
    local has, size, longest = -1, 0, 0
    for at, text in ipairs(body) do
      size = size + (text and #text or 0)
      if text and not (at % 2 == 0 and string.sub(body[at - 1], -1) == ':') then -- a packed map may be longer
        longest = math.max(longest, #text)
      end
      has = at % 2 == 1 and text == 'rev' and tonumber(body[at + 1] or '') or has
    end
    -- No step removed it, or left an older one, or one above the store's revision: this agent must not take it for
    -- removed, nor read such a one, and offer its view like that.
    has = is_above(has) and -1 or has
    if has < tonumber(changed[i + 1]) then
      return distrust({ record })
    end
    if string.sub(record, 1, 5) == 'node:' then
      local node = string.sub(record, 6)
      cordons = cordons or redis.call('HLEN', CORDONS)
      if cordons > 0 and redis.call('HSTRLEN', CORDONS, node) > TEXT_BYTES then
        kind = 'large'
      elseif cordons > 0 then
        cordon = redis.call('HGET', CORDONS, node) or ''
      end
    end
    if kind == 'large' or size > RECORD_BYTES or longest > TEXT_BYTES then -- no step writes such
      body, cordon, kind, size = {}, '', 'large', 0
    end
    bytes = bytes + size
    if bytes > PAGE_BYTES and i > 1 then -- the next beat sends the rest
      rev, more = changed[i - 1], 1
      break
    end
  end
  records[#records + 1] = { record, body, cordon, kind }
end
if not string.find(rev, '^%d+$') then -- no step writes a revision like this
  return distrust({ 'changes' })
end

-- Nodes whose lease has ended: lapsed, unless an amnesty protects them. The reply has all of them, or nothing if this
-- agent has the same list: the count and the last name identify the list.
local gone_now, sheltered = {}, {}
local protected = served < shelter()
local function count_silent()
  local count = redis.call('ZCOUNT', LEASE, '-inf', int(served))
  local last = count > 0
    and redis.call('ZREVRANGEBYSCORE', LEASE, int(served), '-inf', 'WITHSCORES', 'LIMIT', 0, 1) or {}
  return count, int(count) .. ' ' .. (last[2] or '') .. ' ' .. (protected and 'sheltered ' or '') .. (meta.era or '')
end
local count, silent = count_silent()
if count > 0 and silent ~= A.silent then
  strays = clear_leases(int(served)) or strays
  count, silent = count_silent()
end
silent = strays and A.silent or silent
local same = silent == A.silent
if count > 0 and not same then
  local all = redis.call('ZREVRANGEBYSCORE', LEASE, int(served), '-inf')
  if protected then
    sheltered = all
  else
    gone_now = all
  end
end
-- `floor` (see `shortened`), of which `count` leases end before, follows the next end. A step back of the server's clock
-- may take up to a quarter of credit_ms from an end.
local function move_floor(first_end)
  local floor = first_end and math.min(tonumber(first_end), served + lease_ms) - credit_ms or 0
  if not protected and not strays and floor > served and floor >= tonumber(meta.floor or '0') + credit_ms then
    redis.call('HSET', META, 'floor', int(floor), 'floored', int(count))
  end
end
local next_end = protected and count > 0 and shelter() or nil
if not next_end then
  local later = redis.call('ZRANGEBYSCORE', LEASE, '(' .. int(served), '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
  local first = later[1] == id and 3 or 1
  next_end = later[first] and math.max(tonumber(later[first + 1]), shelter()) or nil
  move_floor(later[2])
end
-- Of the stream itself only where nobody has noted it: an entry of any length may be there.
local newest = redis.call('HGET', META, 'event')
if not newest then
  local entry = redis.call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)[1]
  newest = entry and entry[1] or '0-0'
  redis.call('HSET', META, 'event', newest)
end
return { 1, meta.cluster_uid, int(served), gone_now, next_end and int(next_end - served) or '', rev, more,
  newest, records, meta.era or '', served < recover and 1 or 0,
  int(asked), int(math.max(0, recover - served)), served < recover and redis.call('ZRANGE', AWAITED, 0, NAMED - 1) or {}, sheltered,
  served < recover and redis.call('ZCARD', AWAITED) or 0,
  silent, same and 1 or 0, int(revision) }
