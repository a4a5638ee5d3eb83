-- Reading and writing records, revisions, requests and events.
-- A record is a flat hash of texts; only what changed is written, and only a change raises its revision.
local REQUESTS_KEPT, EVENTS_KEPT, MARKS_KEPT, AT_ONCE = 1024, 10000, 65536, 2000

local touch, is_above
do
  local written = 0

  function touch(record)
    written = redis.call('HINCRBY', META, 'rev', 1)
    redis.call('ZADD', CHANGES, written, record)
    return int(written)
  end

  -- No step has left this revision: it is above the store's own. Where META is gone, nothing shows that.
  function is_above(rev)
    return meta.era and rev > math.max(revision, written)
  end
end

-- Marks the last write as one that wakes no agent. Agents outside its job may have to act on it: their renewals report
-- it.
local function unannounced()
  redis.call('HSET', META, 'unannounced', redis.call('HGET', META, 'rev'))
end

local function copied(map)
  local copy = {}
  for key, value in pairs(map) do
    copy[key] = value
  end
  return copy
end

-- A command with any number of words: a script can pass only so many at once. step: words that must stay together.
local function in_parts(words, step, call)
  local most = AT_ONCE - AT_ONCE % step
  for i = 1, #words, most do
    call(unpack(words, i, math.min(i + most - 1, #words)))
  end
end

-- Removes leases of nodes that have no record, of those that end by then: no step leaves any, and who writes here by
-- hand adds some without end. Of the first few; whether there may be more.
local function clear_leases(upto)
  local strays = {}
  local ended = redis.call('ZRANGEBYSCORE', LEASE, '-inf', upto, 'LIMIT', 0, AT_ONCE)
  for _, id in ipairs(ended) do
    if redis.call('EXISTS', P .. 'node:' .. id) == 0 then
      strays[#strays + 1] = id
    end
  end
  in_parts(strays, 1, function(...) redis.call('ZREM', LEASE, ...) end)
  return strays[1] and #ended == AT_ONCE or false
end

-- The record is removed; the mark shows that a step removed it.
local bury
do
  -- Removes the oldest marks of removals. An agent that has not read as far as the newest of these reads everything
  -- anew.
  local GONE_KEPT, GONE_EACH = 1024, 64
  local function forget_marks()
    local listed, marks, revs = redis.call('ZRANGE', CHANGES, 0, -1, 'WITHSCORES'), {}, {}
    for i = 1, #listed, 2 do
      if string.sub(listed[i], 1, 5) == 'gone:' then
        marks[#marks + 1], revs[#revs + 1] = listed[i], listed[i + 1]
      end
    end
    local old = {}
    for i = 1, #marks - GONE_KEPT do
      old[i] = marks[i]
    end
    if old[1] then
      redis.call('HSET', META, 'horizon', int(math.min(revs[#old], revision))) -- a mark may be written by hand
      in_parts(old, 1, function(...) redis.call('ZREM', CHANGES, ...) end)
    end
  end

  function bury(record)
    redis.call('ZREM', CHANGES, record)
    if redis.call('HINCRBY', META, 'buried', 1) % GONE_EACH == 0 then
      forget_marks()
    end
    return touch('gone:' .. record)
  end
end

local PACK_FROM = 32
-- Kinds of which almost every member of the current generation may have an entry: the member's own text, its life, or
-- the same text for all of them.
local LIKE_MEMBERS = { holder = 'member', missing = 'life', silent = 'life', report = 'same', last = 'same' }

local function kind_of(field)
  return string.match(field, '^(.-):.')
end

-- Notes which fields of a job changed, and when, also fields that were removed. So an agent that has read the job gets
-- only these fields. '' is the revision from which on the marks are complete; `rev`, which each write changes, shows
-- whether the last writer of the record kept them. packs: kinds of entries for which one mark will stand.
local function mark(uid, before, after, fields, packs)
  local key = P .. 'marks:' .. uid
  local marked = redis.call('ZSCORE', key, 'rev')
  if not marked or not before or tonumber(marked) ~= tonumber(before) or redis.call('ZCARD', key) > MARKS_KEPT then
    redis.call('DEL', key)
    redis.call('ZADD', key, before or after, '')
  end
  local words = { after, 'rev' }
  for _, field in ipairs(fields) do
    if not packs[kind_of(field) or ''] then
      words[#words + 1] = after
      words[#words + 1] = field
    end
  end
  in_parts(words, 2, function(...) redis.call('ZADD', key, ...) end)
end

-- Deletes the record, and the keys that only help to read it.
local function drop(record)
  local uid = string.match(record, '^job:(.*)$')
  redis.call('DEL', P .. record)
  if uid then
    redis.call('DEL', P .. 'marks:' .. uid, P .. 'packed:' .. uid, P .. 'counts:' .. uid)
  end
end

-- Which entries of each kind a job has, made once a step: kind to key to field. A record over a thousand nodes has six
-- thousand fields, and a step asks for its members, holders and others again and again. Fields that come later are
-- added by the job's own table; those that go are still listed.
local entries
do
  local kinds_of = {}
  local function kinds_in(job)
    local kinds = {}
    local function add(field)
      local kind, key = string.match(field, '^([^:]+):(.*)$')
      if kind then
        kinds[kind] = kinds[kind] or {}
        kinds[kind][key] = field
      end
    end
    for field in pairs(job) do
      add(field)
    end
    setmetatable(job, { __newindex = function(_, field, value)
      rawset(job, field, value)
      add(field)
    end })
    return kinds
  end

  -- The entries of one kind of a job ('member', 'holder', 'missing', 'report', 'last', 'spend'): key to text.
  function entries(job, kind)
    kinds_of[job] = kinds_of[job] or kinds_in(job)
    local found = {}
    for key, field in pairs(kinds_of[job][kind] or {}) do
      found[key] = job[field]
    end
    return found
  end
end

-- Writes the difference; true if there was one. packs: kinds of entries for which one mark will stand; the function
-- adds kinds of which many entries have changed.
local function write_changes(key, record, before, after, packs)
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
  local words = { 'rev', after.rev }
  for _, field in ipairs(set) do
    words[#words + 1] = field
    words[#words + 1] = after[field]
  end
  in_parts(words, 2, function(...) redis.call('HSET', key, ...) end)
  in_parts(del, 1, function(...) redis.call('HDEL', key, ...) end)
  if string.sub(record, 1, 4) == 'job:' then
    for _, field in ipairs(del) do
      set[#set + 1] = field
    end
    local changed = {}
    for _, field in ipairs(packs and set or {}) do
      local kind = kind_of(field) or ''
      changed[kind] = (changed[kind] or 0) + 1
      packs[kind] = kind ~= '' and changed[kind] > PACK_FROM or nil
    end
    mark(string.sub(record, 5), before.rev, after.rev, set, packs or {})
  end
  return true
end

-- The fields of a node that agents read, as one text, so that a new agent can read all nodes with one plain command. It
-- is only a copy: a reader compares its revision with the one in `changes`.
local function node_pack(node)
  local lines = {}
  for i, field in ipairs({ 'id', 'life', 'start', 'lost', 'left', 'joined', 'rev', 'facts', 'readiness', 'mute' }) do
    lines[i] = node[field] or ''
  end
  redis.call('HSET', NODES, node.id, table.concat(lines, '\n'))
end

local function node_save(node)
  local before = node_read(node.id) or {}
  if write_changes(P .. 'node:' .. node.id, 'node:' .. node.id, before, node) then
    node_pack(node)
  end
  nodes_read[node.id] = node
end

-- A new revision of a node of which only the cordon changed, which is kept apart: so agents read both.
local function node_touch(node)
  node.rev = touch('node:' .. node.id)
  redis.call('HSET', P .. 'node:' .. node.id, 'rev', node.rev)
  node_pack(node)
end

-- What somebody wrote over a job's record by hand counts as missing: another job's record, or an older one of its own,
-- or one that is newer than the store.
local function is_record_of(uid, job)
  local rev = tonumber(job.rev or '') or -1
  return job.uid == uid and rev >= tonumber(redis.call('ZSCORE', CHANGES, 'job:' .. uid) or '0') and not is_above(rev)
end

local jobs_before = {}
local function job_read(uid)
  local job = to_map(redis.call('HGETALL', P .. 'job:' .. uid))
  if not is_record_of(uid, job) then
    return nil
  end
  jobs_before[uid] = copied(job)
  return job
end

-- The decoded text. Callers must not change it, since each text is decoded once and shared.
local parsed_before = {}
local function parsed(text)
  local found = parsed_before[text]
  if found == nil then
    found = cjson.decode(text)
    parsed_before[text] = found
  end
  return found
end

local function decoded(map)
  local out = {}
  for key, value in pairs(map) do
    out[key] = parsed(value)
  end
  return out
end

-- The text that most entries have.
local function most_frequent(found)
  local times, most = {}, nil
  for _, text in pairs(found) do
    times[text] = (times[text] or 0) + 1
    if not most or times[text] > times[most] then
      most = text
    end
  end
  return most
end

-- Entries of a kind that follow from the members' place in the gang: the rule, and each member's text by the rule.
-- Nothing if the rule fits fewer than half of the members.
local function ruled(kind, found, members)
  local rule, text_of = LIKE_MEMBERS[kind], nil
  if rule == 'same' then
    local most = most_frequent(found)
    rule = most and not string.find(most, '\n', 1, true) and '=' .. most
    text_of = function() return most end
  elseif rule == 'life' then
    text_of = function(member) return cjson.encode(parsed(member).life) end
  else
    text_of = function(member) return member end
  end
  if not rule then
    return '', {}
  end
  local by_rule, as_ruled, all = {}, 0, 0
  for node, member in pairs(members) do
    by_rule[node] = text_of(member)
    as_ruled = as_ruled + (found[node] == by_rule[node] and 1 or 0)
    all = all + 1
  end
  if 2 * as_ruled <= all then
    return '', {}
  end
  return rule, by_rule
end

-- The packed text of members that the proposer has listed (store/roster.py): its rule has a digest of their texts,
-- since these follow from what a reader knows of the nodes.
local function listed_members(job, listed)
  local words = {}
  for i = 1, #listed, 2 do
    words[i], words[i + 1] = listed[i], job['member:' .. listed[i]] or ''
  end
  return job.rev .. '\nlisted ' .. redis.sha1hex(table.concat(words, '\n')) .. '\n' .. table.concat(listed, '\n')
end

-- If many entries of a kind have changed, one mark stands for them all ('holder:') and one text for the whole map: each
-- member of a gang of a thousand then reads one text, not a thousand fields. The first line is the text's revision; the
-- second is a rule for the entries of all members of the current generation, if there is one. Then come keys and texts
-- of the entries that differ from the rule ('' if there is no entry). So the text must be made anew when the members
-- change. packs: kinds that have no marks of their own since this write. listed: as of job_save.
local function pack(job, packs, listed)
  local marks, packed, marked = P .. 'marks:' .. job.uid, P .. 'packed:' .. job.uid, {}
  for _, field in ipairs(redis.call('ZRANGE', marks, 0, -1)) do
    local kind, key = string.match(field, '^(.-):(.*)$')
    if kind then
      marked[kind] = marked[kind] or {}
      if key == '' then
        packs[kind] = packs[kind] or LIKE_MEMBERS[kind]
      else
        marked[kind][#marked[kind] + 1] = field
      end
      packs[kind] = packs[kind] or (#marked[kind] > PACK_FROM or nil)
    end
  end
  local members = entries(job, 'member')
  for _, kind in ipairs(sorted_keys(packs)) do
    local found = entries(job, kind)
    local rule, by_rule = ruled(kind, found, members)
    local lines = { job.rev, rule }
    for key, text in pairs(found) do
      if by_rule[key] ~= text then
        lines[#lines + 1] = key
        lines[#lines + 1] = text
      end
    end
    for key in pairs(by_rule) do
      if not found[key] then
        lines[#lines + 1] = key
        lines[#lines + 1] = ''
      end
    end
    local text = kind == 'member' and listed and listed_members(job, listed) or table.concat(lines, '\n')
    redis.call('HSET', packed, kind, text)
    in_parts(marked[kind] or {}, 1, function(...) redis.call('ZREM', marks, ...) end)
    redis.call('ZADD', marks, job.rev, kind .. ':')
  end
end

local function succeeded(report)
  return string.match(report or '', '^%d+ (%a+) ') == 'succeeded'
end

-- The number of members that have yet to acknowledge, the number of holders, the last place in the order of faults, how
-- many members have reported success (done) and how many have not (undone), and (only from the kept counts) whether a
-- node that is no member has let go. It always counts the whole record: `counts:<uid>` only saves the counting.
local function counted(job)
  local counts = { missing = 0, holding = 0, report = 0, last = 0, done = 0, undone = 0, freed = 0 }
  for field, value in pairs(job) do
    local kind, node = string.match(field, '^(%a+):(.*)$')
    if kind == 'holder' then
      counts.holding = counts.holding + 1
    elseif kind == 'missing' then
      counts.missing = counts.missing + 1
    elseif kind == 'member' then
      local well = succeeded(job['report:' .. node]) and 'done' or 'undone'
      counts[well] = counts[well] + 1
    elseif kind == 'report' or kind == 'last' then
      counts[kind] = math.max(counts[kind], tonumber(string.match(value, '^%d+')))
    end
  end
  return counts
end

local COUNTS = { 'missing', 'holding', 'report', 'last', 'done', 'undone', 'freed' }
local counts_of = {} -- of jobs that were read lean
-- whole: this step begins, activates or ends a generation, or completes it, and has read the whole record. listed: the
-- members that it begins with, as a list of words.
local function job_save(job, whole, listed)
  local packs = whole and {}
  local changed = write_changes(P .. 'job:' .. job.uid, 'job:' .. job.uid, jobs_before[job.uid] or {}, job, packs)
  if packs then
    pack(job, packs, listed)
  end
  jobs_before[job.uid] = copied(job)
  local counts = counts_of[job.uid] or whole and counted(job)
  if changed and counts then
    local words = { 'rev', job.rev }
    for _, name in ipairs(COUNTS) do
      words[#words + 1] = name
      words[#words + 1] = counts[name]
    end
    redis.call('HSET', P .. 'counts:' .. job.uid, unpack(words))
  end
end

-- The changes of a job's record since this revision of this era: fields and values (none for a removed field), 'since'.
-- Or the whole record, 'whole'.
local function job_news(uid, since, era)
  local key, marks = P .. 'job:' .. uid, P .. 'marks:' .. uid
  local whole_from = since and since > 0 and era == meta.era and redis.call('ZSCORE', marks, '')
  if not whole_from or tonumber(whole_from) > since
    or tonumber(redis.call('ZSCORE', marks, 'rev') or '-1') ~= tonumber(redis.call('HGET', key, 'rev') or '') then
    return redis.call('HGETALL', key), 'whole'
  end
  local single, news = {}, {}
  for _, field in ipairs(redis.call('ZRANGEBYSCORE', marks, '(' .. int(since), '+inf')) do
    local kind = string.match(field, '^(.+):$')
    if kind then -- a packed text comes before the changes that came after it
      local text = redis.call('HGET', P .. 'packed:' .. uid, kind)
      local at = text and string.match(text, '^%d+')
      if not at or tonumber(at) ~= tonumber(redis.call('ZSCORE', marks, field)) then
        return redis.call('HGETALL', key), 'whole'
      end
      news[#news + 1] = field
      news[#news + 1] = text
    else
      single[#single + 1] = field
    end
  end
  in_parts(single, 1, function(...)
    local names = { ... }
    for i, value in ipairs(redis.call('HMGET', key, ...)) do
      news[#news + 1] = names[i]
      news[#news + 1] = value
    end
  end)
  return news, 'since'
end

local LEAN = { 'uid', 'name', 'owner', 'phase', 'reason', 'since', 'ran', 'first_active', 'running_since',
  'stands_since', 'rev', 'generation_id', 'generation_number', 'generation_state', 'last_number', 'active_number', 'active_id', 'checkpoint',
  'generation_address', 'generation_store_hosted', 'generation_seal', 'generation_released', 'generation_stopped',
  'generation_ready', 'held' }
local OF_NODE = { 'member:', 'holder:', 'failsafe_member:', 'missing:', 'host:', 'ports:', 'silent:', 'report:', 'last:' }

-- Reads only the fields of a job that concern one node, and the job's counts: reading and saving then cost the same
-- however many nodes there are. The caller must not iterate over the entries. The counts must have the record's own
-- revision: another writer (an earlier version, or a person) does not update them.
local function job_lean(uid, node)
  local fields, job = { unpack(LEAN) }, {}
  for _, kind in ipairs(OF_NODE) do
    fields[#fields + 1] = kind .. node
  end
  for i, value in ipairs(redis.call('HMGET', P .. 'job:' .. uid, unpack(fields))) do
    job[fields[i]] = value or nil
  end
  if not is_record_of(uid, job) then
    return nil
  end
  local kept, counts = redis.call('HMGET', P .. 'counts:' .. uid, 'rev', unpack(COUNTS)), {}
  local whole = kept[1] == job.rev
  for i, name in ipairs(COUNTS) do
    counts[name] = tonumber(kept[i + 1] or '')
    whole = whole and counts[name]
  end
  if not whole then
    counts = counted(job_read(uid))
  end
  jobs_before[uid], counts_of[uid] = copied(job), counts
  return job, counts
end

-- The whole record, with the changes of this lean one.
local function widened(job)
  local before = jobs_before[job.uid]
  local whole = job_read(job.uid)
  for field in pairs(before) do
    whole[field] = job[field]
  end
  for field, value in pairs(job) do
    whole[field] = value
  end
  return whole
end

-- What a step answers that was to decide by this record or key; or_key: either may be at fault.
local function damaged(key, or_key)
  return refuse('recovering', distrust({ key, or_key })[3] .. ', and nothing is decided meanwhile; then try again')
end

local function no_job(uid)
  if redis.call('EXISTS', P .. 'job:' .. uid) == 1 then
    return damaged('job:' .. uid)
  end
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

-- A.base: the part of the job that the caller has read ({rev, era}), or nothing.
local function job_reply(job)
  local base = A.base or {}
  local news, kind = job_news(job.uid, base.rev, base.era)
  return { 1, news, kind, meta.era or '' }
end

local function is_terminal(job)
  return job.phase == 'succeeded' or job.phase == 'failed' or job.phase == 'stopped'
end

-- Jobs that ended a while ago are stored outside the view that agents read: `past:<uid>` is the unchanged record.
-- `history` has one line for each, ordered by the end: uid, name, owner, bytes of its spec. From the lines follow
-- `history:index`, by which a uid's beginning and a name are found, and `history:bytes` of each owner's specs: who
-- asks for one job, or submits one, must not make the store read all lines.
local past = { lines = P .. 'history', bytes = P .. 'history:bytes', index = P .. 'history:index' }

function past.read(uid)
  local found = attempt('HGETALL', P .. 'past:' .. uid)
  local job = found.err and {} or to_map(found) -- somebody has put a key of another type there
  return job.uid and job or nil
end

-- Whether a step has moved the job there. Else a record that somebody has moved to this key would never be restored:
-- it is removed.
function past.has(uid)
  local key = P .. 'past:' .. uid
  local kind = redis.call('TYPE', key).ok
  local job = kind == 'hash' and past.read(uid) or {}
  if job.uid == uid and job.name and job.owner and job.spec and is_terminal(job)
    and redis.call('ZSCORE', past.lines, past.line(job)) then
    return true
  end
  if kind ~= 'none' then
    redis.call('DEL', key)
  end
  return false
end

function past.line(job)
  return table.concat({ job.uid, job.name, job.owner, #job.spec }, ' ')
end

-- Adds a line to what follows from the lines (by: 1), or takes it out (-1).
function past.count(line, ended, by)
  local uid, name, owner, bytes = string.match(line, '^(%S+) (%S+) (%S+) (%d+)$')
  if not uid then -- no step wrote it
    return
  end
  local of_uid, of_name = 'uid ' .. uid, string.format('name %s %016.0f %s', name, 1000 * ended, uid)
  local sum = (tonumber(redis.call('HGET', past.bytes, owner) or '') or 0) + by * tonumber(bytes)
  if by > 0 then
    redis.call('ZADD', past.index, 0, of_uid, 0, of_name)
  else
    redis.call('ZREM', past.index, of_uid, of_name)
  end
  if sum > 0 then
    redis.call('HSET', past.bytes, owner, int(sum))
  else
    redis.call('HDEL', past.bytes, owner)
  end
end

function past.drop(line)
  local ended = redis.call('ZSCORE', past.lines, line)
  if ended then
    redis.call('ZREM', past.lines, line)
    past.count(line, tonumber(ended), -1)
  end
  redis.call('DEL', P .. 'past:' .. (string.match(line, '^%S+') or ''))
end

function past.add(job)
  local line, ended = past.line(job), tonumber(job.ended or '') or 0
  past.drop(line)
  in_parts(flat(job), 2, function(...) redis.call('HSET', P .. 'past:' .. job.uid, ...) end)
  redis.call('ZADD', past.lines, ended, line)
  past.count(line, ended, 1)
end

-- Makes what follows from the lines anew where somebody has removed some of either.
function past.count_anew()
  local lines = redis.call('ZCARD', past.lines)
  if redis.call('ZCARD', past.index) == 2 * lines and (lines == 0) == (redis.call('HLEN', past.bytes) == 0) then
    return
  end
  redis.call('DEL', past.index, past.bytes)
  local all = redis.call('ZRANGE', past.lines, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do
    past.count(all[i], tonumber(all[i + 1]), 1)
  end
end

local function put_entries(job, kind, map)
  for key in pairs(entries(job, kind)) do
    job[kind .. ':' .. key] = nil
  end
  for key, value in pairs(map) do
    job[kind .. ':' .. key] = value
  end
end

-- What is kept of this request, if it was carried out before: its subject, then did, whose first word says which change
-- it was. A refusal, too, if that is another change than this one.
local function request_seen(request, did)
  local seen = request ~= '' and redis.call('HGET', REQUESTS, request) or nil
  if seen and string.match(seen, '^%S* ?(%S*)') ~= string.match(did, '^%S*') then
    return seen, refuse('stale', 'the request id ' .. request .. ' was used for another change before')
  end
  return seen
end

-- whose: the owner of the job that it changed, or OPERATORS. Each has a list of its own, so that however often one of
-- them asks, no id of another is forgotten, and one more for requests that changed nothing, which push out no change.
local OPERATORS, remember = 'operators', nil
do
  local LISTS_KEPT = 512
  local ORDER = P .. 'requests:order'

  local function forget_oldest(list, kept)
    local over = redis.call('ZCARD', list) - kept
    local old = over > 0 and redis.call('ZRANGE', list, 0, over - 1) or {}
    in_parts(old, 1, function(...)
      redis.call('ZREM', list, ...)
      redis.call('HDEL', REQUESTS, ...)
    end)
  end

  function remember(request, subject, did, whose, idle)
    if request == '' then
      return
    end
    whose = idle and whose .. ':idle' or whose
    local list = P .. 'requests:of:' .. whose
    if redis.call('TYPE', list).ok ~= 'zset' then -- new, or written over by hand
      redis.call('DEL', list)
    end
    redis.call('HSET', REQUESTS, request, did == '' and subject or subject .. ' ' .. did)
    local number = redis.call('HINCRBY', META, 'requests', 1)
    redis.call('ZADD', list, number, request)
    forget_oldest(list, REQUESTS_KEPT)
    redis.call('ZADD', ORDER, number, whose)
    local over = redis.call('ZCARD', ORDER) - LISTS_KEPT
    for _, other in ipairs(over > 0 and redis.call('ZRANGE', ORDER, 0, over - 1) or {}) do
      forget_oldest(P .. 'requests:of:' .. other, 0)
      redis.call('ZREM', ORDER, other)
    end
  end
end

-- The revision at which somebody took more of a queue. None is above the store's own: that was written by hand, and
-- would refuse the queue for ever.
local CLAIMS = P .. 'claims'
local function claimed(queue)
  local rev = tonumber(redis.call('HGET', CLAIMS, queue) or '') or 0
  return rev <= tonumber(redis.call('HGET', META, 'rev') or '0') and rev or 0
end

-- Of queues with a quota for each user, the revision of the newest write that added to what somebody's jobs ask for.
-- A writer has counted those of its view: claims: {queues, read}, or nothing. No queue's name has a colon.
local function check_quotas(claims)
  for _, queue in ipairs(claims and claims.queues or {}) do
    if claimed('users:' .. queue) > claims.read then
      return refuse('stale', 'another job has been submitted to queue ' .. queue .. ', or has grown there, meanwhile')
    end
  end
end

local function leave_quotas(claims, rev)
  for _, queue in ipairs(claims and claims.queues or {}) do
    redis.call('HSET', CLAIMS, 'users:' .. queue, rev)
  end
end

-- An operator wrote: its command waits until everything up to now is on the disks of nodes.
local function ask_to_save()
  redis.call('HSET', META, 'asked', redis.call('HGET', META, 'rev') or '0')
end

-- The changes of a job since the last wake that had some, as the fields of a stream's entry: who waits on the job, and
-- has read it up to then, needs no beat. So one text serves all members of a gang. Only { 'e', '' } if there is no such
-- wake, or if the changes are many. The job must be saved, and nothing else that members need may have changed with it.
local function wake_news(job)
  local NEWS_WORDS, NEWS_BYTES = 512, 65536
  local packed = P .. 'packed:' .. job.uid
  local since = tonumber(redis.call('HGET', packed, 'woken') or '')
  redis.call('HSET', packed, 'woken', job.rev)
  local news, kind = {}, 'whole'
  if since then
    news, kind = job_news(job.uid, since, meta.era)
  end
  if kind ~= 'since' or #news > NEWS_WORDS then
    return { 'e', '' }
  end
  local words, bytes = { 'era', meta.era, 'since', int(since) }, 0
  for i = 1, #news, 2 do -- false: the field was removed
    words[#words + 1] = (news[i + 1] and '+' or '-') .. news[i]
    words[#words + 1] = news[i + 1] or ''
    bytes = bytes + #words[#words]
  end
  return bytes <= NEWS_BYTES and words or { 'e', '' }
end

-- Adds to a stream. A later entry may be there: the clock was put back, or somebody wrote it by hand. Then the stream
-- begins anew: else each step that adds to it would fail half way.
local function append(key, ...)
  local added = attempt('XADD', key, 'MAXLEN', ...)
  if type(added) == 'table' then
    redis.call('DEL', key)
    return redis.call('XADD', key, 'MAXLEN', ...)
  end
  return added
end

-- Wakes the agents that wait on 'all', 'job:<uid>' or 'node:<id>'. Only a hint: a heartbeat finds a missed event.
local function wake(place, id, words)
  local key, for_ms = P .. 'wake:' .. place, 60000
  append(key, 1, id, unpack(words or { 'e', '' }))
  redis.call('PEXPIRE', key, for_ms)
end

-- Events on which only the members, holders and failsafe members of their job act. Any agent may have to act on other
-- events (free devices, a job that needs nodes), except on those that are only for people.
local OF_GANG = { WorkerFailed = true, PodFailed = true, RoleStopped = true, WorkersLeft = true, FaultJudged = true,
  NodeLost = true, GenerationForming = true, GenerationActive = true }
local FOR_PEOPLE = { GenerationStarted = true, JobAfterMet = true }

-- what: kind, text and, if they apply, job (record), node, generation, by; everybody: the event concerns all agents;
-- alone: the job is saved, and it is all that has changed
local function event(what)
  local job = what.job or {}
  local id = append(EVENTS, '~', EVENTS_KEPT, '*', 'kind', what.kind, 'job', job.name or '', 'uid', job.uid or '',
    'node', what.node or '', 'generation', what.generation or '0', 'by', what.by or '', 'text', what.text)
  redis.call('HSET', META, 'event', id) -- for a beat, which would pay more for asking the stream than for all of `meta`
  -- Of one user's jobs only the newest stay, and of how one node comes and goes: none push out what others look for.
  local of_coming = { AgentBack = true, AgentSilent = true, NodeJoined = true, NodeLeft = true, NodeLost = true }
  local whose, most = job.owner, 2500
  if of_coming[what.kind] then
    whose, most = 'node:' .. what.node, 20
  end
  if whose then
    local for_ms, own = 7 * 86400000, P .. 'events:of:' .. whose
    append(own, most + 1, id, 'e', '')
    if redis.call('XLEN', own) > most then
      local oldest = redis.call('XRANGE', own, '-', '+', 'COUNT', 1)[1][1]
      redis.call('XDEL', own, oldest)
      redis.call('XDEL', EVENTS, oldest)
    end
    redis.call('PEXPIRE', own, for_ms)
  end
  local news = what.alone and wake_news(job)
  if not OF_GANG[what.kind] and not FOR_PEOPLE[what.kind] or what.everybody then
    wake('all', id)
  elseif OF_GANG[what.kind] then
    wake(what.job and 'job:' .. job.uid or 'node:' .. what.node, id, news)
  end
  return id
end

-- A node's agent speaks again, and its record says so. All agents decide by that.
local function agent_back(node)
  event({ kind = 'AgentBack', node = node, by = node, text = 'the agent of node ' .. node .. ' is back' })
end

-- A record or a key differs from what the steps wrote: no step decides anything until the agents have restored what
-- they know. A record that is missing by then stays missing.
function distrust(damaged)
  local found, names = {}, false
  for _, key in ipairs(damaged) do
    found[#found + 1] = key
    if string.find(key, '^job:') or string.find(key, '^node:') or string.find(key, '^usage:') or key == 'queues' or key == 'windows' then
      drop(key)
    elseif key == 'names' then
      names = true
      redis.call('DEL', NAMES)
    end
  end
  for _, shared in ipairs({ 'queues', 'windows' }) do -- perhaps no agent has read these: their signatures decide
    local rev = redis.call('HGET', P .. shared, 'rev')
    if rev and is_above(tonumber(rev) or math.huge) then
      drop(shared)
    elseif rev and string.find(rev, '^%d+$') and (tonumber(redis.call('ZSCORE', CHANGES, shared) or '-1') < tonumber(rev)) then
      redis.call('ZADD', CHANGES, rev, shared)
    end
  end
  local listed = redis.call('ZRANGE', CHANGES, 0, -1, 'WITHSCORES')
  for i = 1, #listed, 2 do
    local record = listed[i]
    local gone = string.sub(record, 1, 5) == 'gone:'
    local job = names and string.sub(record, 1, 4) == 'job:' and attempt('HMGET', P .. record, 'uid', 'name') or {}
    if job[1] and job[2] and record == 'job:' .. job[1] then -- made anew, by the records alone
      redis.call('HSET', NAMES, job[2], job[1])
    end
    if not gone and redis.call('EXISTS', P .. record) == 0 then
      bury(record)
    elseif gone and (not string.find(listed[i + 1], '^%d+$') or is_above(tonumber(listed[i + 1]))
      or redis.call('EXISTS', P .. string.sub(record, 6)) == 1) then -- by hand
      redis.call('ZREM', CHANGES, record)
    end
  end
  revision = tonumber(redis.call('HGET', META, 'rev') or '0')
  redis.call('DEL', AWAITED, CALLED)
  known, least = 0, served + credit_ms + lease_ms
  recover = least
  amnesty = math.max(amnesty, least)
  begin_era('', 0)
  redis.call('HSET', META, 'least', int(least), 'amnesty', int(amnesty), 'unattended', '1')
  local function sentence(names)
    return 'somebody removed or damaged ' .. names .. ' in the store, or the server refused a step half way: the agents restore it'
  end
  event({ kind = 'StoreDamaged', text = sentence(table.concat(found, ', ', 1, math.min(#found, 5)))
    .. '; nothing is decided meanwhile' })
  return refuse('behind', sentence(found[1]))
end
