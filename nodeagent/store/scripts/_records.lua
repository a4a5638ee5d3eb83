-- Reading and writing records, revisions, requests and events.
-- A record is a flat hash of texts; only what changed is written, and only a change raises its revision.
local REQUESTS_KEPT, EVENTS_KEPT = 1024, 10000

local function touch(record)
  local rev = redis.call('HINCRBY', META, 'rev', 1)
  redis.call('ZADD', CHANGES, rev, record)
  return int(rev)
end

-- The record is no more, and this says that it was a step that removed it.
local function bury(record)
  redis.call('ZREM', CHANGES, record)
  return touch('gone:' .. record)
end

local function copied(map)
  local copy = {}
  for key, value in pairs(map) do
    copy[key] = value
  end
  return copy
end

-- Writes the difference; true if there was one.
local function write_changes(key, record, before, after)
  local set, del = {}, {}
  for field, value in pairs(after) do
    if before[field] ~= value then
      set[#set + 1] = field
    end
  end
  for field in pairs(before) do
    if after[field] == nil then
      del[#del + 1] = field
    end
  end
  if #set == 0 and #del == 0 then
    return
  end
  after.rev = touch(record)
  redis.call('ZREM', CHANGES, 'gone:' .. record)
  redis.call('HSET', key, 'rev', after.rev)
  for _, field in ipairs(set) do
    redis.call('HSET', key, field, after[field])
  end
  for _, field in ipairs(del) do
    redis.call('HDEL', key, field)
  end
end

local function node_save(node)
  local before = node_read(node.id) or {}
  write_changes(P .. 'node:' .. node.id, 'node:' .. node.id, before, node)
  nodes_read[node.id] = node
end

local jobs_before = {}
local function job_read(uid)
  local job = to_map(redis.call('HGETALL', P .. 'job:' .. uid))
  if not job.uid then
    return nil
  end
  jobs_before[uid] = copied(job)
  return job
end

local function job_save(job)
  write_changes(P .. 'job:' .. job.uid, 'job:' .. job.uid, jobs_before[job.uid] or {}, job)
  jobs_before[job.uid] = copied(job)
end

local function no_job(uid)
  return refuse('not_found', 'there is no job with uid ' .. uid .. ': list the jobs and try again')
end

local function flat(map)
  local out = {}
  for field, value in pairs(map) do
    out[#out + 1] = field
    out[#out + 1] = value
  end
  return out
end

local function job_reply(job)
  return { 1, flat(job) }
end

local function is_terminal(job)
  return job.phase == 'succeeded' or job.phase == 'failed' or job.phase == 'stopped'
end

-- The entries of one kind of a job ('member', 'holder', 'ack', 'report', 'last', 'spend'): key to text.
local function entries(job, kind)
  local found, prefix = {}, kind .. ':'
  for field, value in pairs(job) do
    if string.sub(field, 1, #prefix) == prefix then
      found[string.sub(field, #prefix + 1)] = value
    end
  end
  return found
end

local function put_entries(job, kind, map)
  for key in pairs(entries(job, kind)) do
    job[kind .. ':' .. key] = nil
  end
  for key, value in pairs(map) do
    job[kind .. ':' .. key] = value
  end
end

local function decoded(map)
  local out = {}
  for key, value in pairs(map) do
    out[key] = cjson.decode(value)
  end
  return out
end

local function request_seen(request)
  return request ~= '' and redis.call('HGET', REQUESTS, request) or nil
end

local function remember(request, answer)
  if request == '' then
    return
  end
  local order = P .. 'requests:order'
  redis.call('HSET', REQUESTS, request, answer)
  redis.call('ZADD', order, redis.call('HINCRBY', META, 'requests', 1), request)
  while redis.call('ZCARD', order) > REQUESTS_KEPT do
    local oldest = redis.call('ZRANGE', order, 0, 0)[1]
    redis.call('ZREM', order, oldest)
    redis.call('HDEL', REQUESTS, oldest)
  end
end

-- An operator wrote: somebody waits until everything up to now is on the disks of nodes.
local function ask_to_save()
  redis.call('HSET', META, 'asked', redis.call('HGET', META, 'rev') or '0')
end

-- A record or a key is not as the steps left it: nothing is decided until the agents have given back what they know.
-- Whatever is missing by then stays so.
local function distrust(damaged)
  local found = {}
  for _, key in ipairs(damaged) do
    found[#found + 1] = key
    if string.find(key, '^job:') or string.find(key, '^node:') then
      redis.call('DEL', P .. key)
    end
  end
  for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
    if string.sub(record, 1, 5) ~= 'gone:' and redis.call('EXISTS', P .. record) == 0 then
      bury(record)
    end
  end
  revision = tonumber(redis.call('HGET', META, 'rev') or '0')
  redis.call('DEL', AWAITED, HEARD)
  known, least = 0, served + credit_ms + lease_ms
  recover = least
  amnesty = math.max(amnesty, least)
  begin_era('', 0)
  redis.call('HSET', META, 'least', int(least), 'amnesty', int(amnesty), 'excused', '0')
  redis.call('XADD', EVENTS, 'MAXLEN', '~', EVENTS_KEPT, '*', 'kind', 'StoreDamaged', 'job', '', 'uid', '', 'node', '',
    'generation', '0', 'by', '', 'text', 'somebody removed or damaged ' .. table.concat(found, ', ', 1, math.min(#found, 5))
    .. ' in the store: the agents give it back; nothing is decided meanwhile')
  return refuse('behind', 'somebody removed or damaged ' .. found[1] .. ' in the store: the agents give it back')
end

-- what: kind, text and, where they apply, job (record), node, generation, by
local function event(what)
  local job = what.job or {}
  redis.call('XADD', EVENTS, 'MAXLEN', '~', EVENTS_KEPT, '*', 'kind', what.kind, 'job', job.name or '',
    'uid', job.uid or '', 'node', what.node or '', 'generation', what.generation or '0', 'by', what.by or '',
    'text', what.text)
end
