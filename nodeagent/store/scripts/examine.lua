-- examine: no arguments. Called after a step failed on the server: deletes every key of a wrong type and every record
-- that no step could read; the agents restore them. At most once a second.
if now - tonumber(meta.examined or '0') < 1000 and now >= tonumber(meta.examined or '0') then
  return { 1 }
end
redis.call('HSET', META, 'examined', int(now))
local TYPES = {
  lease = 'zset', departed = 'zset', changes = 'zset', awaited = 'zset', called = 'zset', ['requests:order'] = 'zset',
  cordons = 'hash', queues = 'hash', windows = 'hash', claims = 'hash', names = 'hash', highest = 'hash', requests = 'hash', saved = 'hash', events = 'stream',
  saves = 'stream',
}
local found = {}

-- cache: the key holds nothing that is not in a record too.
local function check_type(key, wanted, cache)
  local is = redis.call('TYPE', P .. key).ok
  if is ~= 'none' and is ~= wanted then
    redis.call('DEL', P .. key)
    if not cache then
      found[#found + 1] = key
    end
    return false
  end
  return is ~= 'none'
end

local TEXTS = { uid = 1, name = 1, phase = 1, reason = 1, outcome = 1, generation_id = 1,
  generation_state = 1, generation_address = 1, generation_seal = 1, array = 1, active_id = 1 }

local NUMBERS = { version = 1, owner = 1, submitted = 1, ended = 1, since = 1, order = 1, first_active = 1,
  running_since = 1, stands_since = 1, started = 1, ran = 1, restart_done = 1, not_before = 1, last_number = 1,
  restarts = 1, rev = 1, min = 1, max = 1, at_once = 1,
  active_number = 1, generation_number = 1, generation_since = 1, generation_deadline = 1,
  generation_control_rev = 1, generation_stopped = 1, generation_ready = 1 }

-- Fields, and kinds of entries, whose JSON is a record, a text or a list.
local RECORDS = { spec = 1, control = 1, admission = 1, outcome = 1, checkpoint = 1, held = 1,
  generation_cause = 1, generation_outside = 1, member = 1, holder = 1, report = 1, last = 1, spend = 1, used = 1 }
local QUOTED = { missing = 1, host = 1, failsafe_member = 1, generation_failsafe_member = 1, silent = 1 }

-- As agents read it: cjson takes more for JSON (nothing at all, nan, hexadecimal numbers).
local function is_json(text)
  return string.find(text, '^%s*[%[{"%-%dtfn]') and not string.find(text, '^%s*%-?[n0][aAxX]')
    and pcall(cjson.decode, '[' .. text .. ']')
end

-- What the steps ask of a record: the numbers that each must have.
local PARTS = { control = { 'rev', 'restart' }, held = { 'at', 'gpus', 'slots', 'saved', 'stands', 'started' } }
local function has_parts(kind, record)
  for _, name in ipairs(PARTS[kind] or {}) do
    if type(record[name]) ~= 'number' then
      return false
    end
  end
  local gang = kind == 'member' or kind == 'holder'
  return not gang or (type(record.life) == 'string' and type(record.devices) == 'table')
end

local function is_number(text)
  local number = string.find(text, '^%-?%d[%deE.+-]*$') and tonumber(text)
  return number and math.abs(number) < 1e300
end

local function is_value(field, text)
  local kind = kind_of(field) or field
  local first = string.match(text, '^%s*(.)')
  if NUMBERS[field] then
    return is_number(text)
  end
  if kind == 'report' or kind == 'last' then
    text = string.match(text, '^%d+ %a+ (.*)$')
    first = text and string.match(text, '^%s*(.)')
  end
  if TEXTS[field] then
    return true
  end
  return text and is_json(text) and (not RECORDS[kind] or (first == '{' and has_parts(kind, cjson.decode(text))))
    and (not QUOTED[kind] or first == '"') and (kind ~= 'ports' or first == '[')
end

local function reads(uid, job)
  for field, value in pairs(job) do
    if not is_value(field, value) then
      return false
    end
  end
  return job.uid == uid and not is_above(tonumber(job.rev or '') or 0) and job.name and job.phase and job.control
    and job.spec and job.order
end

for _, key in ipairs(sorted_keys(TYPES)) do
  check_type(key, TYPES[key])
end
check_type('history', 'zset', true) -- no agent could restore it
check_type('history:index', 'zset', true)
check_type('history:bytes', 'hash', true)
check_type('nodes', 'hash', true)
for _, record in ipairs(redis.call('ZRANGE', CHANGES, 0, -1)) do
  local kind, id = string.match(record, '^(%a+):(.*)$')
  if kind == 'usage' and check_type(record, 'hash') then
    for _, text in pairs(to_map(redis.call('HGETALL', P .. record))) do
      if not pcall(cjson.decode, '[' .. text .. ']') then
        found[#found + 1] = record
        break
      end
    end
  end
  if kind == 'job' or kind == 'node' then
    if check_type(record, 'hash') and kind == 'job' and not reads(id, to_map(redis.call('HGETALL', P .. record))) then
      found[#found + 1] = record
    end
    if kind == 'node' then
      check_type('alloc:' .. id, 'hash')
      local node = attempt('HMGET', P .. record, 'seq', 'start', 'id')
      if not node.err and (not is_number(node[1] or '0') or not is_number(node[2] or '0') or node[3] ~= id) then
        found[#found + 1] = record
      end
      local small = redis.call('HSTRLEN', CORDONS, id) <= 4194304 -- as in beat.lua
      local cordon = small and redis.call('HGET', CORDONS, id)
      local whole = cordon and is_json(cordon) and string.find(cordon, '^%s*{')
      if (cordon or not small) and not (whole and type(cjson.decode(cordon).reason) == 'string') then
        redis.call('HDEL', CORDONS, id)
        found[#found + 1] = record -- it is restored with the cordon that agents know
      end
    else
      check_type('counts:' .. id, 'hash', true)
      check_type('marks:' .. id, 'zset', true)
      check_type('packed:' .. id, 'hash', true)
    end
  end
end
for _, shared in ipairs({ { 'queues', 'tree' }, { 'windows', 'windows' } }) do
  local text = redis.call('HGET', P .. shared[1], shared[2])
  if text and not pcall(cjson.decode, text) then
    found[#found + 1] = shared[1]
  end
end
if found[1] and meta.timing then
  distrust(found)
end
return { 1 }
