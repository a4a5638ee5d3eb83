-- restore: uid, timing, lease, credit, gap, limit, era, rev, served, by, nodes (list of hashes), cordons (node
-- to JSON or ''), jobs (list of hashes), queues?, windows? (hashes), usage (list of hashes, each with its day), uids?
-- (list), numbers, regroup (ms), awaited (list), top, holds, key (digest).
if meta.timing and meta.timing ~= A.timing then
  return refuse('timing', meta.timing)
elseif (meta.key or '') ~= '' and meta.key ~= A.key then
  return refuse('key', 'node ' .. A.by .. ' has another cluster key than the cluster')
end
-- the same history: the uid was changed by hand
local mine = meta.cluster_uid == A.uid or (meta.era and A.era == meta.era)
if meta.timing and not mine and (tonumber(meta.order or '0') > 0 or meta.taken == '1' or (meta.taken and not A.holds)) then
  return refuse('foreign', 'the store belongs to another cluster and has jobs: this node comes too late to restore '
    .. 'what it knew')
end

local top = math.max(A.rev, A.top)
-- Numbers that the view has from what somebody wrote into META. Given back, they would grow to what counts as damage
-- there. A store that has them itself goes on with them: they leave room for years.
local FAR, FAR_SERVED = 9e14, 9e12
if (top > FAR and revision <= FAR) or (A.served > FAR_SERVED and served <= FAR_SERVED) then
  return refuse('far', 'this view has a revision or a served time that no step comes to: it must offer smaller ones')
end
if mine and meta.cluster_uid ~= A.uid then
  redis.call('HSET', META, 'cluster_uid', A.uid)
end
local has_all = mine and top <= revision and (A.era == meta.era or (A.era == meta.parent and top <= known))
local opens = not mine or top > revision
if opens then
  if not meta.timing then
    lease_ms, credit_ms = A.lease, A.credit
    redis.call('HSET', META, 'timing', A.timing, 'lease', int(A.lease), 'credit', int(A.credit), 'gap', int(A.gap),
      'limit', int(A.limit), 'version', VERSION, 'key', A.key)
  end
  redis.call('HSET', META, 'cluster_uid', A.uid)
  if not mine then
    redis.call('HSET', META, 'taken', A.holds and '1' or '0')
  end
  known = mine and revision or 0
  least = served + credit_ms + lease_ms
  recover = least
end
if meta.unattended then -- damage was found: a record that is missing counts as removed only when some view was read
  redis.call('HDEL', META, 'unattended')
  if served >= recover then
    least = served + credit_ms + lease_ms
    recover, amnesty = least, math.max(amnesty, least)
    redis.call('HSET', META, 'least', int(least), 'recover', int(recover), 'amnesty', int(amnesty))
  end
end
local late = served >= recover
local full = not late and not has_all and A.rev > known -- a complete view, newer than the store's
local brings = not late and not has_all and (#A.jobs > 0 or #A.nodes > 0 or #A.usage > 0 or A.queues or A.windows)
local found = opens or ((full or brings) and meta.parent ~= '')
if found then
  for _, record in ipairs(A.jobs) do
    top = math.max(top, tonumber(record.rev))
  end
  for _, record in ipairs(A.nodes) do
    top = math.max(top, tonumber(record.rev))
  end
  top = math.max(top, A.queues and tonumber(A.queues.rev) or 0, A.windows and tonumber(A.windows.rev) or 0)
  for _, record in ipairs(A.usage) do
    top = math.max(top, tonumber(record.rev))
  end
  -- META may be gone, and the newest records unread: they must not count as written by hand
  local newest = redis.call('ZREVRANGEBYSCORE', CHANGES, int(FAR), '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  begin_era('', math.max(top, tonumber(newest[2] or '0')))
  for _, record in ipairs(redis.call('ZRANGEBYSCORE', CHANGES, '(' .. int(revision), '+inf')) do
    if string.sub(record, 1, 5) == 'gone:' then -- no later revision may be this low
      redis.call('ZADD', CHANGES, int(revision), record)
    end
  end
  event({ kind = 'StoreRestored', by = A.by, text = 'the store lacked what node ' .. A.by
    .. ' knows: it is restored by the agents; nothing is decided meanwhile' })
end
if found or full then
  expect(found)
end
for name, number in pairs(A.numbers) do
  if not highest_of(P, name, int(number)) then
    redis.call('HSET', HIGHEST, name, int(number))
  end
end

if not late then
  local more = math.max(0, A.served - served)
  local running = more > 0 and redis.call('ZRANGEBYSCORE', LEASE, '(' .. int(served), '+inf', 'WITHSCORES') or {}
  for i = 1, #running, 2 do -- what the store has granted is not shorter for that
    redis.call('ZADD', LEASE, int(running[i + 1] + more), running[i])
  end
  local far = served + more <= FAR_SERVED and redis.call('ZRANGEBYSCORE', LEASE, '(' .. int(FAR_SERVED), '+inf') or {}
  for _, id in ipairs(far) do -- they were granted at a served time that is given up
    redis.call('ZADD', LEASE, int(served + more + lease_ms), id)
  end
  served, recover, least = served + more, recover + more, least + more
  amnesty = math.max(amnesty + more, recover)
  redis.call('HSET', META, 'served', int(served), 'recover', int(recover), 'amnesty', int(amnesty), 'least', int(least))
end

-- Returns whether the offered version replaces the stored one (revision or nil).
local function taken(stored, offered)
  stored = stored and not is_above(stored) and stored or nil
  if not full then
    return offered > known and (not stored or offered > stored)
  end
  return not stored or offered > stored or (stored <= A.rev and offered ~= stored)
end

local function put(key, record, rev)
  drop(key)
  for field, value in pairs(record) do
    redis.call('HSET', P .. key, field, value)
  end
  redis.call('ZADD', CHANGES, rev, key)
  redis.call('ZREM', CHANGES, 'gone:' .. key)
end

-- Restores the keys that the steps keep beside a record that is there.
local function listed(key, rev)
  local score = tonumber(redis.call('ZSCORE', CHANGES, key) or '-1')
  if score < tonumber(rev) and not is_above(tonumber(rev)) then -- it may be an older list
    redis.call('ZADD', CHANGES, rev, key)
  end
end

-- The newer view has declared a life lost that the store has granted a lease since: its workers may run as long.
local function outlast(ends)
  least = math.max(least, ends)
  recover = math.max(recover, least)
  amnesty = math.max(amnesty, recover)
  redis.call('HSET', META, 'least', int(least), 'recover', int(recover), 'amnesty', int(amnesty))
end

local function restore_node(new)
  local id, old = new.id, node_read(new.id)
  local same = old and old.life == new.life
  if same and new.lost == '1' and old.lost ~= '1' then
    local marked = copied(old)
    marked.lost = '1'
    node_save(marked)
    outlast(math.min(lease_end(id), served + lease_ms))
    depart(id, math.min(lease_end(id), served))
    old = node_read(id)
  end
  if old then
    listed('node:' .. id, old.rev)
    local as_offered = old.rev == new.rev and same and old.start == new.start and old.lost == new.lost and old.left == new.left
    if as_offered and not as_written(id) then -- only its copy is gone, or is another
      node_pack(old)
    end
    if old.lost ~= '1' and old.left ~= '1' then
      redis.call('ZADD', LEASE, 'NX', int(served), id)
    end
  end
  if not taken(old and tonumber(old.rev), tonumber(new.rev)) then
    return
  end
  if same and tonumber(old.start) > tonumber(new.start) then
    return -- the node has joined since
  end
  new.lost = (same and old.lost == '1') and '1' or new.lost
  new.seq = same and old.start == new.start and old.seq or '0'
  new.dead = old and old.dead or ''
  if old and not same then
    new.dead = new.dead == '' and old.life or new.dead .. ' ' .. old.life
  end
  put('node:' .. id, new, new.rev)
  node_pack(new)
  nodes_read[id], briefs_read[id] = nil, nil
  if new.lost == '1' or new.left == '1' then
    depart(id, math.min(redis.call('ZSCORE', LEASE, id) or redis.call('ZSCORE', DEPARTED, id) or served, served))
  else
    local before = redis.call('ZSCORE', DEPARTED, id)
    redis.call('ZREM', DEPARTED, id)
    redis.call('ZADD', LEASE, 'NX', before or int(served), id)
  end
  if A.cordons[id] ~= '' then
    redis.call('HSET', CORDONS, id, A.cordons[id])
  else
    redis.call('HDEL', CORDONS, id)
  end
end

local function raise_highest(job)
  local number = job.generation_number or '0'
  if not highest_of(P, job.name, number) then
    redis.call('HSET', HIGHEST, job.name, number)
  end
  local order = tonumber(job.order)
  if order <= FAR and order > tonumber(redis.call('HGET', META, 'order') or '0') then
    redis.call('HSET', META, 'order', int(order))
  end
end

-- The job's nodes have been silent for longer than their workers can live.
local function close_late(job)
  if job.generation_id then
    put_entries(job, 'holder', {})
    if job.generation_state == 'active' then
      close_generation(job)
    end
    job.generation_state, job.generation_deadline = 'ended', '0'
    put_entries(job, 'report', {})
    local held = count_up(job, math.min(served, A.served))
    held.gpus, held.slots = 0, 0
    put_held(job, held)
  end
  if job.phase == 'forming' or job.phase == 'running' or job.phase == 'pausing' then
    enter_phase(job, job.phase == 'pausing' and 'paused' or 'holding',
      'the store had lost the job; node ' .. A.by .. ' restored it')
  end
end

-- Whether the job may have its name. Of two jobs the newer one keeps it, but a job that was formed once wins over one
-- that never was.
local function named_so(job)
  local namesake = redis.call('HGET', NAMES, job.name)
  local other = namesake and namesake ~= job.uid and job_read(namesake)
  if other then
    local ran = job.generation_id and not other.generation_id
    if late or (other.generation_id and not job.generation_id) or (tonumber(other.rev) > tonumber(job.rev) and not ran) then
      return false
    end
    delete_job(other, true)
  end
  redis.call('HSET', NAMES, job.name, job.uid)
  return true
end

local function restore_job(new)
  if past.has(new.uid) then
    return -- an earlier view knows less
  end
  local old = job_read(new.uid) -- what was written over by hand is replaced, whatever it says
  raise_highest(new)
  local removed = late and not old and (buried('job:' .. new.uid) or redis.call('ZSCORE', CHANGES, 'job:' .. new.uid))
  if (late and old) or removed then
    return
  end
  if not taken(old and tonumber(old.rev), tonumber(new.rev)) then
    if old then
      listed('job:' .. new.uid, old.rev)
      raise_highest(old)
      if named_so(old) then
        rebook(old, named(old))
      end
    end
    return
  end
  if not named_so(new) then
    return
  end
  if late then
    close_late(new)
    new.rev = touch('job:' .. new.uid)
  end
  if new.generation_state == 'forming' then
    begin_acks(new) -- this view may have some acks without their sums: all members acknowledge again
  end
  put('job:' .. new.uid, new, new.rev)
  rebook(new, old and named(old) or {}) -- after the record is written, since its holdings are counted in it
end

-- The use of removed jobs. A view that comes late cannot add to what others have counted since.
local function restore_usage(new)
  local key = 'usage:' .. new.day
  local old = to_map(redis.call('HGETALL', P .. key))
  if taken(tonumber(old.rev or ''), tonumber(new.rev)) then
    new.day = nil
    put(key, new, new.rev)
  elseif old.rev then
    listed(key, old.rev)
  end
end

-- The queues, or the windows. A late view gives them only if no other view had them: without queues their jobs wait.
local function restore_shared(key, new)
  local old = redis.call('HGET', P .. key, 'rev')
  if late and not old then
    new.rev = touch(key)
    put(key, new, new.rev)
  elseif not late and taken(old and tonumber(old), tonumber(new.rev)) then
    put(key, new, new.rev)
  elseif old then
    listed(key, old)
  end
end

if not has_all then
  if A.queues then
    restore_shared('queues', A.queues)
  end
  if A.windows then
    restore_shared('windows', A.windows)
  end
  for _, node in ipairs(late and {} or A.nodes) do
    restore_node(node)
  end
  for _, day in ipairs(late and {} or A.usage) do
    restore_usage(day)
  end
  for _, job in ipairs(A.jobs) do
    restore_job(job)
  end
end
if A.uids and full then
  local there = {}
  for _, uid in ipairs(A.uids) do
    there[uid] = true
  end
  -- More than there are jobs (as in _look.lua): none is removed before the names have been made anew.
  local stored = redis.call('HLEN', NAMES) <= 65536 and redis.call('HVALS', NAMES) or {}
  table.sort(stored)
  for _, uid in ipairs(stored) do
    local job = not there[uid] and job_read(uid)
    if job and tonumber(job.rev) <= A.rev then
      delete_job(job, true)
    end
  end
  known = A.rev
  redis.call('HSET', META, 'known', int(known))
end
return { 1, meta.era or '', has_all and redis.call('HGET', META, 'rev') or int(known), late and 0 or 1 }
