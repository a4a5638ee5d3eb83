-- The nodes that may still run workers, and the devices that they hold.

-- The node's booked devices: device to the job's uid. Callers must not change it.
local booked_on = {}
local function booked(node)
  booked_on[node] = booked_on[node] or to_map(redis.call('HGETALL', P .. 'alloc:' .. node))
  return booked_on[node]
end

-- Gives the job exactly these devices (set) of a node.
local function book(node, uid, devices)
  local words, free = {}, {}
  for device, owner in pairs(booked(node)) do
    if owner == uid and not devices[device] then
      free[#free + 1] = device
    end
  end
  for device in pairs(devices) do
    if booked(node)[device] ~= uid then
      words[#words + 1] = device
      words[#words + 1] = uid
    end
  end
  if #words + #free > 0 then
    local key = P .. 'alloc:' .. node
    in_parts(free, 1, function(...) redis.call('HDEL', key, ...) end)
    in_parts(words, 2, function(...) redis.call('HSET', key, ...) end)
    booked_on[node] = nil
  end
end

-- The devices (set) that a job has by its record, by node: those of the current generation's members and holders.
local function devices_of(job)
  local found = {}
  local function take(map)
    for node, entry in pairs(map) do
      found[node] = found[node] or {}
      for _, device in ipairs(entry.devices) do
        found[node][device] = true
      end
    end
  end
  if job.generation_state ~= 'ended' then
    take(decoded(entries(job, 'member')))
  end
  take(decoded(entries(job, 'holder')))
  return found
end

-- Counts what the job has used until now, since it has other devices from now on: those of its record, where it had
-- those of `before` (node to set). What is booked is not asked: somebody may have removed that by hand.
local function count_devices(job, before, after)
  local changes, kinds = {}, {}
  local function count(devices, by)
    for node, set in pairs(devices) do
      local change = changes[node] or { gpus = 0, slots = 0 }
      for device in pairs(set) do
        local kind = kinds[device] or string.find(device, '^cpu%d+$') and 'slots' or 'gpus'
        kinds[device] = kind
        change[kind] = change[kind] + by
      end
      changes[node] = change
    end
  end
  count(before, -1)
  count(after, 1)
  count_changes(job, changes)
end

-- Books the devices of the current generation's members and holders; also on the nodes in `also` (set), which may hold
-- none now.
local function rebook(job, also)
  local wanted = devices_of(job)
  for node in pairs(also) do
    wanted[node] = wanted[node] or {}
  end
  for node, devices in pairs(wanted) do
    book(node, job.uid, devices)
  end
  count_devices(job, devices_of(jobs_before[job.uid] or {}), wanted)
end

-- Every node that the generation names (set).
local function named(job)
  local nodes = {}
  for node in pairs(entries(job, 'member')) do
    nodes[node] = true
  end
  for node in pairs(entries(job, 'holder')) do
    nodes[node] = true
  end
  return nodes
end

-- Phases that use up the time limit of a job that has run.
local USES_TIME = { forming = true, running = true, pausing = true }

local function enter_phase(job, phase, reason)
  if job.phase ~= phase then
    if USES_TIME[job.phase] and job.first_active then
      local from = math.max(tonumber(job.since), tonumber(job.first_active))
      job.ran = int(tonumber(job.ran) + math.max(0, served - from))
    end
    if job.phase == 'queued' or job.phase == 'holding' then
      add_over(job, tonumber(job.since), served, { waited_ms = 1 })
    end
    job.since = int(served)
    job.stands_since = (phase == 'holding' or phase == 'forming') and (job.stands_since or job.since) or nil
    if not USES_TIME[phase] then
      job.running_since = nil
    end
  end
  job.phase, job.reason = phase, reason
end

-- Writes the job. If the last holder is gone (held: false), a pausing job becomes paused. whole: as of job_save.
local function settle(job, held, whole)
  if job.phase ~= 'pausing' or not job.generation_id or held then
    job_save(job, whole)
    return
  end
  enter_phase(job, 'paused', job.reason)
  job_save(job, whole)
  event({ kind = 'JobPaused', job = job, generation = job.generation_number, text = job.reason })
end

-- A life of this node has ended: removes it from the holders of every job, except job `but`. lives_on: the life that
-- stays.
local function retire(node, lives_on, but)
  local uids = {}
  for _, uid in pairs(to_map(redis.call('HGETALL', P .. 'alloc:' .. node))) do
    uids[uid] = true
  end
  for _, uid in ipairs(sorted_keys(uids)) do
    local job = uid ~= but and job_read(uid)
    local holder = job and job['holder:' .. node]
    if holder and cjson.decode(holder).life ~= lives_on then
      job['holder:' .. node] = nil
      rebook(job, { [node] = true })
      settle(job, next(entries(job, 'holder')))
    end
  end
end

-- Whether a gang may wait for this member of its active generation: in this life, and it has not reported how it ended.
local function is_awaited(life, state, member, report)
  local reported = string.match(report or '', '^%d+ (%a+)')
  return state == 'active' and member and cjson.decode(member).life == life and (reported or 'running') == 'running'
end

-- The jobs that cannot go on before this life of the node has let go of them, as words: uid and number of the generation
-- that it holds, or of the active one of which nothing runs there (`standing`: uid to number); or ''. A node has few, and
-- the next call names those that this one has left out. A job that only misses its acknowledgement goes on without it: the
-- node is mute.
local function jobs_that_wait(node, life, standing)
  local MOST = 16
  local uids, words = {}, {}
  for _, uid in pairs(to_map(redis.call('HGETALL', P .. 'alloc:' .. node))) do
    uids[uid] = true
  end
  for _, uid in ipairs(sorted_keys(uids)) do
    local found = redis.call('HMGET', P .. 'job:' .. uid, 'holder:' .. node, 'active_number', 'generation_state', 'member:' .. node, 'report:' .. node)
    local waits = found[1] and cjson.decode(found[1]).life == life
      or standing[uid] and found[2] == int(standing[uid]) and is_awaited(life, found[3], found[4], found[5])
    if #words < 2 * MOST and found[2] and waits then
      words[#words + 1] = uid
      words[#words + 1] = found[2]
    end
  end
  return table.concat(words, ' ')
end

-- The first node that may still run workers of an ended job, or lend them time; or nil.
local function still_held(job)
  local holders = decoded(entries(job, 'holder'))
  for _, node in ipairs(sorted_keys(holders)) do
    if not gone(node, holders[node].life) then
      return node
    end
  end
  -- Since the job's end no member has renewed. So a member that has asked its failsafe members for time began before
  -- the end.
  local ended = tonumber(job.since) + lease_ms
  for _, node in ipairs(sorted_keys(entries(job, 'failsafe_member'))) do
    if math.max(lease_end(node), ended) > served - RELEASE * tonumber(meta.limit) then
      return node
    end
  end
end

-- This node will never lend again. So no failsafe member that shares a job with it can lend.
local function release_failsafe_members(node)
  for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    local uid = string.match(record, '^job:(.*)$')
    local concerned = uid and redis.call('HGET', P .. record, 'failsafe_member:' .. node) -- few are: read no other whole
    local job = concerned and job_read(uid)
    if job then
      put_entries(job, 'failsafe_member', {})
      job_save(job)
    end
  end
end

-- Deletes the record of a node that can run nothing any more; returns the revision of the removal. Its cordon stays.
local function delete_node(node)
  retire(node)
  release_failsafe_members(node)
  redis.call('DEL', P .. 'node:' .. node)
  redis.call('HDEL', NODES, node)
  redis.call('ZREM', LEASE, node)
  redis.call('ZREM', DEPARTED, node)
  redis.call('HDEL', SAVED, node)
  nodes_read[node], briefs_read[node] = nil, nil
  return bury('node:' .. node)
end

-- discarded: another view of the store is right, and it does not have the job.
local function delete_job(job, discarded)
  for node in pairs(named(job)) do
    book(node, job.uid, {})
  end
  if not discarded then
    count_devices(job, devices_of(job), {})
    keep_use(job)
  end
  drop('job:' .. job.uid)
  if redis.call('HGET', NAMES, job.name) == job.uid then
    redis.call('HDEL', NAMES, job.name)
  end
  bury('job:' .. job.uid)
end
