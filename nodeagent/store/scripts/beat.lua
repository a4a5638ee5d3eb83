-- beat: node, life, start, seq, rev, era, facts?, address?, pid?, readiness?, pods (list of {uid, body}), saved?,
--     notes (list of {kind, text}), top, runs (list of {uid, rev, generation}), damaged (list of records), silent,
--     nodes (the agent has read their records up to this revision, or is about to), ahead (jobs by uid that the agent
--     has read up to this later revision of its era), anew? (the store's revision when the agent began to read
-- everything)
local PAGE, MANY, PAGE_BYTES, SAVES_KEPT, LOOKED_AT = 256, 8192, 1048576, 1000, 2
local SEQ_MAX = 1e15 -- no agent counts so far: written by hand
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
  if tonumber(node.seq) > SEQ_MAX then
    return distrust({ 'node:' .. id })
  end
  return refuse('stale', 'beat ' .. int(A.seq) .. ' of node ' .. id .. ' came after beat ' .. node.seq)
end
-- Looks for damage that no step would cause, in a job that runs on this node: the first damaged key, and another if
-- either may be at fault; or nil.
local function damage_of(own)
  local uid, record = own.uid, 'job:' .. own.uid
  local job = redis.call('HMGET', P .. record, 'uid', 'name', 'rev', 'generation_number', 'holder:' .. id,
    'member:' .. id, 'generation_state', 'generation_id')
  if not job[1] and buried(record) then
    return -- this beat sends the record
  end
  if job[1] ~= uid or not job[2] or not tonumber(job[3]) then
    return record
  end
  local score = tonumber(redis.call('ZSCORE', CHANGES, record) or '-1')
  if score ~= tonumber(job[3]) then
    return score > tonumber(job[3]) and record or 'changes'
  end
  -- each step that changes the generation writes a new revision
  local read = A.era == meta.era and own.rev <= A.rev and own.rev == tonumber(job[3])
  if read and own.generation ~= table.concat({ job[4] or '', job[8] or '', job[7] or '' }, ' ') then
    return record
  end
  if redis.call('HGET', NAMES, job[2]) ~= uid then
    return 'names'
  end
  if tonumber(redis.call('HGET', HIGHEST, job[2]) or '0') < tonumber(job[4] or '0') then
    return 'highest', record
  end
  local entry, booked = job[5] or (job[7] ~= 'ended' and job[6]), true
  in_parts(entry and cjson.decode(entry).devices or {}, 1, function(...)
    for _, by in ipairs(redis.call('HMGET', P .. 'alloc:' .. id, ...)) do
      booked = booked and by == uid
    end
  end)
  return not booked and 'alloc:' .. id or nil
end

-- The record is there, and `changes` does not list it: who reads everything anew would take it for removed.
local function unlisted(record)
  local rev = redis.call('HGET', P .. record, 'rev')
  return rev and tonumber(redis.call('ZSCORE', CHANGES, record) or '-1') ~= tonumber(rev)
end

-- Some record is there and not listed: who reads everything anew now would take it for removed, and offer that as the
-- newest view. Each is looked at only if the numbers differ, as they also do while a lost job's name is left.
local function cut_short()
  local copies = redis.pcall('HLEN', NODES)
  if redis.call('ZCARD', CHANGES) >= (tonumber(copies) or 0) + redis.call('HLEN', NAMES) then
    return false
  end
  local ids = { job = redis.call('HVALS', NAMES), node = tonumber(copies) and redis.call('HKEYS', NODES) or {} }
  for _, kind in ipairs({ 'job', 'node' }) do
    for _, id in ipairs(ids[kind]) do
      local record = kind .. ':' .. id
      if redis.call('EXISTS', P .. record) == 1 and not redis.call('ZSCORE', CHANGES, record) then
        return true
      end
    end
  end
  return false
end

-- Looks at the next few of all records: a missing one may belong to no node that could report it.
local function damage_anywhere()
  for _, shared in ipairs({ 'queues', 'windows' }) do
    if unlisted(shared) then
      local score = tonumber(redis.call('ZSCORE', CHANGES, shared) or '-1')
      return score > (tonumber(redis.call('HGET', P .. shared, 'rev')) or -1) and shared or 'changes'
    end
  end
  local from = redis.call('HINCRBY', META, 'looked', LOOKED_AT) % math.max(1, redis.call('ZCARD', CHANGES))
  local listed = redis.call('ZRANGE', CHANGES, from, from + LOOKED_AT - 1, 'WITHSCORES')
  for i = 1, #listed, 2 do
    local record = listed[i]
    local kind, name = string.match(record, '^(%a+):(.*)$')
    local field = kind == 'job' and 'uid' or kind == 'node' and 'id'
    if field then
      local about = redis.call('HMGET', P .. record, field, 'rev', 'lost', 'left')
      if about[1] ~= name or (tonumber(about[2] or '') or -1) < tonumber(listed[i + 1]) then
        return record
      end
      if kind == 'node' and about[3] ~= '1' and about[4] ~= '1' and not redis.call('ZSCORE', LEASE, name) then
        return 'lease'
      end
    elseif kind ~= 'gone' and redis.call('EXISTS', P .. record) == 0 then
      return record
    end
  end
end

-- Each beat checks one thing, its own jobs and other records in turn, so its cost does not grow with the number of
-- jobs.
local function damage()
  if not redis.call('ZSCORE', LEASE, id) or shortened() then
    return 'lease'
  end
  if unlisted('node:' .. id) or ((A.rev == 0 or A.anew) and cut_short()) then
    return 'changes'
  end
  local own = A.runs[A.seq % (#A.runs + 1)]
  if own then
    return damage_of(own)
  end
  return damage_anywhere()
end
if served >= recover then
  local damaged = A.damaged
  local key, or_key = damage()
  damaged[#damaged + 1] = key
  damaged[#damaged + 1] = or_key
  if damaged[1] then
    return distrust(damaged)
  end
end
has_called(id)
redis.call('HSET', P .. 'node:' .. id, 'seq', int(A.seq))
local rev, more = int(revision), 0
if A.facts or A.readiness then
  local new = copied(node_read(id))
  if A.facts then
    new.facts, new.address, new.pid = A.facts, A.address, int(A.pid)
  end
  new.readiness = A.readiness or new.readiness
  node_save(new)
  unannounced()
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
    redis.call('XADD', P .. 'saves', 'MAXLEN', '~', SAVES_KEPT, '*', 'node', id)
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
local bytes = 0
for i = 1, math.min(#changed, 2 * PAGE), 2 do
  local record, body, cordon, kind = changed[i], {}, '', 'whole'
  if string.sub(record, 1, 5) == 'gone:' then
    record = string.sub(record, 6)
  else
    if string.sub(record, 1, 4) == 'job:' then
      body, kind = job_news(string.sub(record, 5), A.rev, A.era)
    else
      body = redis.call('HGETALL', P .. record)
    end
    local has = -1
    for at, text in ipairs(body) do
      bytes = bytes + (text and #text or 0)
      has = at % 2 == 1 and text == 'rev' and tonumber(body[at + 1] or '') or has
    end
    -- No step removed it, or left an older one: this agent must not take it for removed, nor read the older one, and
    -- offer its view like that.
    if has < tonumber(changed[i + 1]) then
      return distrust({ record })
    end
    if bytes > PAGE_BYTES and i > 1 then -- the next beat sends the rest
      rev, more = changed[i - 1], 1
      break
    end
    if string.sub(record, 1, 5) == 'node:' then
      cordon = redis.call('HGET', CORDONS, string.sub(record, 6)) or ''
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
local count = redis.call('ZCOUNT', LEASE, '-inf', int(served))
local last = count > 0
  and redis.call('ZREVRANGEBYSCORE', LEASE, int(served), '-inf', 'WITHSCORES', 'LIMIT', 0, 1) or {}
local protected = served < shelter()
local silent = int(count) .. ' ' .. (last[2] or '') .. ' ' .. (protected and 'sheltered ' or '') .. (meta.era or '')
local same = silent == A.silent
if count > 0 and not same then
  local all = redis.call('ZREVRANGEBYSCORE', LEASE, int(served), '-inf')
  if protected then
    sheltered = all
  else
    gone_now = all
  end
end
local next_end = protected and count > 0 and shelter() or nil
if not next_end then
  local later = redis.call('ZRANGEBYSCORE', LEASE, '(' .. int(served), '+inf', 'WITHSCORES', 'LIMIT', 0, 2)
  local first = later[1] == id and 3 or 1
  if later[first] then
    next_end = math.max(tonumber(later[first + 1]), shelter())
  end
  -- a step back of the server's clock may take up to a quarter of credit_ms from an end
  local floor = later[1] and math.min(tonumber(later[2]), served + lease_ms) - credit_ms or 0
  if not protected and floor > served and floor >= tonumber(meta.floor or '0') + credit_ms then
    redis.call('HSET', META, 'floor', int(floor), 'floored', int(count))
  end
end
local newest = redis.call('XREVRANGE', EVENTS, '+', '-', 'COUNT', 1)[1]
return { 1, meta.cluster_uid, int(served), gone_now, next_end and int(next_end - served) or '', rev, more,
  newest and newest[1] or '0-0', records, meta.era or '', served < recover and 1 or 0,
  int(asked), int(math.max(0, recover - served)), served < recover and redis.call('ZRANGE', AWAITED, 0, NAMED - 1) or {}, sheltered,
  served < recover and redis.call('ZCARD', AWAITED) or 0,
  silent, same and 1 or 0, int(revision) }
