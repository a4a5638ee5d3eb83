-- submit: jobs (list of {uid, name, spec, admission?, min, max, control, delay_ms, reason, array?, at_once?}), owner,
-- submitted, by, request, did, era (of the submitter's view, or ''), quota?, room, claims?. All of them or none.
-- The reply is the uid of the first job, that of the first call with this request, and the revision that it is written
-- by. room: how many jobs, of how many bytes, agents read (read), may be there with these (most), and with those of a
-- user who has little (few, little).
local function written(first)
  ask_to_save()
  return { 1, first, redis.call('HGET', META, 'rev') or '0' }
end
local seen, other = request_seen(A.request, A.did)
if other then
  return other
end
local first = seen and string.match(seen, '^%S+') or A.jobs[1].uid
if seen or job_read(first) or past.read(first) then
  return written(first)
end
-- A job in an emptied store makes it another cluster's: agents that know other jobs could not restore these any more.
if A.era ~= '' and A.era ~= meta.era and A.era ~= meta.parent then
  return refuse('stale', 'the store is not the one that this agent has read: it may have lost jobs; then try again')
end
local wanted, old, owners = {}, {}, {} -- by the jobs' records: no count beside them can be wrong
for _, new in ipairs(A.jobs) do
  wanted[new.name] = true
end
local function owned_by(owner)
  owners[owner] = owners[owner] or { owner = owner, jobs = 0, live = 0, spec = 0, bytes = 0 }
  return owners[owner]
end
-- A job counts for its owner (by: 1), or not any more (-1): the bytes of its spec, and about those of the entries of a
-- gang, where they are many.
local ENTRY_BYTES, FEW_ENTRIES = 256, 64
local function count(record, owner, phase, formed, by)
  local held, spec = owned_by(owner or ''), redis.call('HSTRLEN', P .. record, 'spec')
  local entries = formed and math.max(0, redis.call('HLEN', P .. record) - FEW_ENTRIES) or 0
  held.jobs, held.live = held.jobs + by, held.live + (is_terminal({ phase = phase }) and 0 or by)
  held.spec, held.bytes = held.spec + by * spec, held.bytes + by * (spec + ENTRY_BYTES * entries)
end
for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
  if string.sub(record, 1, 4) == 'job:' then
    local uid, about = string.sub(record, 5), redis.call('HMGET', P .. record, 'name', 'owner', 'phase',
      'generation_number')
    local name = about[1]
    local found = wanted[name] and job_read(uid)
    if not name or (wanted[name] and not found) then
      return damaged(record)
    end
    count(record, about[2], about[3], about[4], 1)
    if found then
      old[name] = (not old[name] or is_terminal(old[name])) and found or old[name]
    end
  end
end
for _, new in ipairs(A.jobs) do -- the name or the list of the records may have been written over by hand
  local namesake = redis.call('HGET', NAMES, new.name)
  if namesake and not old[new.name] and redis.call('EXISTS', P .. 'job:' .. namesake) == 1 then
    return damaged('job:' .. namesake)
  end
end
for _, new in ipairs(A.jobs) do
  local found = old[new.name]
  if found then
    if not is_terminal(found) then
      return refuse('name_taken', 'a job named ' .. new.name .. ' is live (uid ' .. found.uid .. ', ' .. found.phase
        .. '): choose another name, or stop it first')
    end
    local held = still_held(found)
    if held then
      return refuse('stopping', 'the job named ' .. new.name .. ' (uid ' .. found.uid .. ', ' .. found.phase
        .. ') still stops its workers on node ' .. held)
    end
    count('job:' .. found.uid, found.owner, found.phase, found.generation_number, -1) -- it is replaced
  end
end
local mine, new_bytes, with = owned_by(int(A.owner)), 0, #A.jobs == 1 and 'this job' or 'these ' .. #A.jobs .. ' jobs'
for _, new in ipairs(A.jobs) do
  new_bytes = new_bytes + #new.spec
end
if A.quota then
  local live, bytes = mine.live + #A.jobs - 1, mine.spec + new_bytes
  bytes = bytes + (tonumber(redis.call('HGET', past.bytes, int(A.owner)) or '') or 0)
  if live >= A.quota.jobs then
    return refuse('limit', A.by .. ' has ' .. int(mine.live) .. ' live jobs, ' .. (#A.jobs == 1 and 'as many as'
      or 'with these ' .. int(live + 1) .. ', more than') .. ' limits.jobs allows')
  end
  if bytes > A.quota.bytes then
    return refuse('limit', 'with this job, the stored jobs of ' .. A.by .. ' (ended ones too) would take '
      .. int(bytes) .. ' bytes, and limits.job_bytes allows ' .. int(A.quota.bytes))
  end
end
do
  local function exceeds(held, room)
    return held.jobs + #A.jobs > room.jobs or held.bytes + new_bytes > room.bytes
  end
  local function amount(held)
    return int(held.jobs) .. (held.jobs == 1 and ' job of ' or ' jobs of ') .. int(held.bytes) .. ' bytes'
  end
  local function share(held)
    return math.max(held.jobs / A.room.read.jobs, held.bytes / A.room.read.bytes)
  end
  local together, most = { jobs = 0, bytes = 0 }, {}
  for _, held in pairs(owners) do
    together.jobs, together.bytes = together.jobs + held.jobs, together.bytes + held.bytes
    most[#most + 1] = held
  end
  local few = A.quota and not exceeds(mine, A.room.little)
  local room = few and A.room.few or A.room.most
  if exceeds(together, room) then
    table.sort(most, function(one, other)
      return share(one) > share(other) or (share(one) == share(other) and one.owner < other.owner)
    end)
    local named = {}
    for i = 1, math.min(3, #most) do
      named[i] = 'uid ' .. most[i].owner .. ' (' .. amount(most[i]) .. ')'
    end
    return refuse('full', 'all users together have ' .. amount(together) .. ', and with ' .. with .. ' more than '
      .. int(room.jobs) .. ' jobs or ' .. int(room.bytes) .. ' bytes, which is what '
      .. (A.quota and 'users' or 'operators') .. ' may fill of the '
      .. amount(A.room.read) .. ' that agents read. Most have ' .. table.concat(named, ', '))
  end
end
local no = check_quotas(A.claims)
if no then
  return no
end
local shelved = {} -- the ended jobs of other owners: not the submitter's to remove
for name, found in pairs(old) do
  if found.owner ~= int(A.owner) and not cjson.decode(found.control).delete then
    shelved[name] = found
  end
end
if next(shelved) then
  past.count_anew() -- before anything is written: it fails where somebody has put a key of another type there
end
local job
for _, new in ipairs(A.jobs) do
  if shelved[new.name] then
    past.add(shelved[new.name])
  end
  if old[new.name] then
    delete_job(old[new.name])
  end
  job = {
    version = VERSION, uid = new.uid, name = new.name, owner = int(A.owner), spec = new.spec, admission = new.admission,
    min = int(new.min), max = int(new.max), control = new.control, phase = 'queued', reason = new.reason,
    submitted = A.submitted, since = int(served), order = int(redis.call('HINCRBY', META, 'order', 1)),
    ran = '0', restart_done = '0', not_before = new.delay_ms > 0 and int(served + new.delay_ms) or '0',
    last_number = '0', restarts = '0', array = new.array, at_once = new.at_once and int(new.at_once),
  }
  job_save(job)
  redis.call('HSET', NAMES, new.name, new.uid)
  event({ kind = 'JobSubmitted', job = job, by = A.by, text = 'job ' .. new.name .. ' submitted' })
end
leave_quotas(A.claims, job.rev)
remember(A.request, first, A.did, int(A.owner))
return written(first)
