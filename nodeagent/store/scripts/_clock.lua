-- Every step starts with this: arguments, the served clock, refusals, liveness.
-- KEYS[1] prefix, ARGV[1] run id of this connection's server, ARGV[2] record version, ARGV[3] arguments as JSON.
-- Never encode a table that may be empty with cjson: cjson cannot tell a list from a map. Floats stay text.
local P, RUN, VERSION, A = KEYS[1], ARGV[1], ARGV[2], cjson.decode(ARGV[3])
local META, LEASE, CHANGES, EVENTS, CORDONS = P .. 'meta', P .. 'lease', P .. 'changes', P .. 'events', P .. 'cordons'
local NAMES, HIGHEST, REQUESTS, SAVED = P .. 'names', P .. 'highest', P .. 'requests', P .. 'saved'
local AWAITED, CALLED, NAMED = P .. 'awaited', P .. 'called', 5
local DEPARTED, NODES = P .. 'departed', P .. 'nodes'
local distrust -- _records.lua
local RELEASE = 1.05 -- of failsafe_limit, as in model/timing.py

local function int(number)
  return string.format('%.0f', number)
end

local function to_map(flat)
  local map = {}
  for i = 1, #flat, 2 do
    map[flat[i]] = flat[i + 1]
  end
  return map
end

local function sorted_keys(map)
  local keys = {}
  for key in pairs(map) do
    keys[#keys + 1] = key
  end
  table.sort(keys)
  return keys
end

local function refuse(code, text, number)
  return { 0, code, text, number }
end

-- A command on a key that may be damaged: of another type, or a stream whose top is above any new entry. Then the reply
-- is {err}. Any other error ends the step, as that of redis.call does: nothing follows from it about what is there.
local function attempt(...)
  local found = redis.pcall(...)
  local why = type(found) == 'table' and found.err
  if why and not (string.find(why, 'WRONGTYPE', 1, true) or string.find(why, 'ID specified in XADD is equal or smaller', 1, true)
    or string.find(why, 'has exhausted the last possible ID', 1, true)) then
    error(why, 2)
  end
  return found
end

-- If META has another type, lacks a part, or has anything but a whole number where one belongs (tonumber also takes
-- nan, inf and hexadecimal ones), it is deleted. The agents then restore it, as they do for an emptied store. So it is
-- with a number that no step comes to in a hundred years (the next writes would make it one that is not exact), with a
-- revision above the store's own, and with a text that is longer than any. What else somebody wrote there is not read.
local function read_meta()
  local function is_whole(field, text) -- a machine's clock may stand before 1970
    return #text <= 15 and string.find(text, field == 'last' and '^%-?%d+$' or '^%d+$')
  end
  local fields = { 'run', 'era', 'parent', 'timing', 'cluster_uid', 'key', 'version', 'event', 'served', 'amnesty',
    'lease', 'credit', 'gap', 'limit', 'rev', 'known', 'recover', 'least', 'last', 'regroup', 'stopped', 'order', 'asked',
    'requests', 'unannounced', 'buried', 'horizon', 'floor', 'floored', 'looked', 'examined', 'unattended', 'taken' }
  local texts, longest = 8, 4096
  local found = attempt('HMGET', META, unpack(fields))
  local map, whole = {}, not found.err
  for i, field in ipairs(whole and fields or {}) do
    local value = found[i] or nil
    map[field] = value
    whole = whole and (not value or i <= texts and #value <= longest or is_whole(field, value))
  end
  whole = whole and string.find(map.event or '0-0', '^%d+%-%d+$')
  if map.timing or map.era or map.cluster_uid then
    whole = whole and map.timing and map.lease and map.credit and map.gap and map.limit and map.cluster_uid
      and map.version and map.era
  end
  local function number(field)
    return tonumber(map[field] or '0')
  end
  whole = whole and number('served') <= 1e13 -- as in _usual_clock.lua
    and number('regroup') <= 86400000 -- as in spec/agentconfig.py
    and math.max(number('horizon'), number('asked'), number('known'), number('unannounced')) <= number('rev')
  if whole and not string.find((map.era or '') .. (map.cluster_uid or ''), '[^%w%p]') then
    return map
  end
  redis.call('DEL', META)
  return {}
end

local meta = read_meta()
local now
do
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local served, amnesty = tonumber(meta.served or '0'), tonumber(meta.amnesty or '0')
local lease_ms, credit_ms, gap_ms = tonumber(meta.lease or '0'), tonumber(meta.credit or '0'), tonumber(meta.gap or '0')
local revision, known, recover = tonumber(meta.rev or '0'), tonumber(meta.known or '0'), tonumber(meta.recover or '0')
local least = tonumber(meta.least or '0')
local ERA_REVISIONS = 4294967296

-- If META alone is gone, served time goes on from the newest end of a lease: counted from 0, a lease that nobody renews
-- any more would end only when as much time has been served again.
for _, set in ipairs(meta.served and {} or { LEASE, DEPARTED }) do
  local newest = attempt('ZREVRANGEBYSCORE', set, '9000000000000', '-inf', 'WITHSCORES', 'LIMIT', 0, 1)
  served = math.max(served, math.floor(tonumber(newest[2] or '0')))
end

-- The new era's revisions are above all earlier ones (`top`), so a later version of a record never has the lower one.
local function begin_era(parent, top)
  revision = (math.floor(math.max(revision, top) / ERA_REVISIONS) + 1) * ERA_REVISIONS
  meta.era, meta.parent, meta.floor = RUN .. '@' .. int(now) .. '/' .. int(revision), parent, '0'
  redis.call('HSET', META, 'era', meta.era, 'parent', parent, 'known', int(known), 'rev', int(revision),
    'recover', int(recover), 'floor', '0')
end

-- Nothing shows that writes were lost. If the newest writes were lost, perhaps only missing nodes know them. So the
-- store waits until at most half of the nodes that were live are missing. A key that somebody has written over stops
-- nothing here: `examine` begins with this, too, and has to come to its end.
local function doubt()
  local count, wait, stopped = 0, tonumber(meta.regroup or '0'), meta.stopped or '0'
  redis.call('DEL', AWAITED)
  for _, id in ipairs(wait > 0 and attempt('ZRANGEBYSCORE', LEASE, '(' .. stopped, '+inf') or {}) do
    local node = attempt('HMGET', P .. 'node:' .. id, 'id', 'lost', 'left')
    if node.err or (node[1] and node[2] ~= '1' and node[3] ~= '1') then
      count = count + redis.call('ZADD', AWAITED, 0, id)
    end
  end
  redis.call('HSET', META, 'stopped', stopped)
  recover = least + (count > 0 and wait or 0)
end

do
  -- A link from before two fail-overs (there and back) names the old history: it must ask again who the server is.
  local function is_old_link()
    local history = string.match(RUN, '%-(%x+)$')
    local info = history and redis.pcall('INFO', 'replication') -- without it the link is as good as any
    local is = type(info) == 'string' and string.match(info, 'master_replid:(%x+)')
    return is and is ~= history
  end
  if RUN ~= meta.run and is_old_link() then
    return refuse('link', 'this connection is older than the last fail-over')
  end
end

do
  local step = now - tonumber(meta.last or now)
  if RUN ~= meta.run or step < 0 or step > gap_ms then
    amnesty = math.max(amnesty, served + credit_ms + lease_ms)
  end
  if RUN ~= meta.run and meta.timing then
    least = served + credit_ms + lease_ms
    if served < recover and (meta.parent or '') == '' and redis.call('EXISTS', AWAITED) == 1 then
      attempt('ZUNIONSTORE', AWAITED, 2, AWAITED, CALLED) -- the writes that they restored may be lost again
      recover = math.max(recover, least)
    else
      if served >= recover and not meta.unattended then
        meta.parent, known, meta.stopped = meta.era, revision, int(served)
      end
      doubt()
    end
    redis.call('DEL', CALLED)
    begin_era(meta.parent or '', 0)
    redis.call('HSET', META, 'least', int(least))
  end
  served = served + math.min(math.max(step, 0), credit_ms)
  -- None lasts longer. Later ends were written by hand, and nobody would come to decide anything, or to lapse.
  local longest = served + credit_ms + lease_ms + tonumber(meta.regroup or '0')
  if math.max(recover, amnesty, least) > longest then
    recover, amnesty, least = math.min(recover, longest), math.min(amnesty, longest), math.min(least, longest)
    redis.call('HSET', META, 'recover', int(recover), 'least', int(least))
  end
  redis.call('HSET', META, 'run', RUN, 'last', int(now), 'served', int(served), 'amnesty', int(amnesty))
  -- not the first write: a full Redis refuses a script nothing after a write that frees memory
  if served >= recover then
    redis.call('DEL', AWAITED, CALLED)
  end
end
if meta.version and meta.version ~= VERSION then
  return refuse('version', "the store's records have version " .. meta.version .. ', this agent reads ' .. VERSION
    .. ': install the version of nodeagent that the other nodes run')
end

local function recovering_for()
  return string.format('%.1f', (recover - served) / 1000)
end

local nodes_read = {}
local function node_read(id)
  if nodes_read[id] == nil then
    local map = to_map(redis.call('HGETALL', P .. 'node:' .. id))
    nodes_read[id] = map.id == id and map or false
  end
  return nodes_read[id] or nil
end

-- Reads only the fields that say whether a node is there, and which life it is: its facts are most of the record. Once:
-- what changes a record changes nodes_read, or forgets both.
local briefs_read = {}
local function node_brief(id)
  if nodes_read[id] ~= nil then
    return nodes_read[id] or nil
  end
  local brief = briefs_read[id]
  if not brief then
    local found = redis.call('HMGET', P .. 'node:' .. id, 'id', 'life', 'lost', 'left', 'start', 'seq', 'address', 'mute')
    brief = found[1] == id and { id = found[1], life = found[2], lost = found[3], left = found[4], start = found[5],
      seq = found[6], address = found[7], mute = found[8] or nil } or nil
    briefs_read[id] = brief
  end
  return brief
end

-- Whether a node's record is what the steps wrote, by its revision in `changes` and its copy in `nodes`, which must be
-- of the same revision: who writes over the record can change that along. Asked only where a node is refused, or counts
-- as gone, by its record.
local function as_written(id)
  local node = redis.call('HMGET', P .. 'node:' .. id, 'life', 'start', 'lost', 'left', 'rev')
  local pack = attempt('HGET', NODES, id)
  local copy = type(pack) == 'string' and { string.match(pack, '^[^\n]*\n([^\n]*)\n([^\n]*)\n(.-)\n(.-)\n.-\n(%d+)\n') } or {}
  local same = true
  for i = 1, 5 do
    same = same and copy[i] == node[i]
  end
  return same and (tonumber(node[5] or '') or -1) >= tonumber(redis.call('ZSCORE', CHANGES, 'node:' .. id) or '0')
end

-- The end of a node's lease, even if the node left or was declared lost: a beat brings those nodes in neither list.
local function lease_end(id)
  return tonumber(redis.call('ZSCORE', LEASE, id) or redis.call('ZSCORE', DEPARTED, id) or '0')
end

local function depart(id, ended)
  redis.call('ZREM', LEASE, id)
  redis.call('ZADD', DEPARTED, int(ended), id)
end

-- A step removed the record. A record that is missing without this mark was removed by hand.
local function buried(record)
  return redis.call('ZSCORE', CHANGES, 'gone:' .. record)
end

-- Served time before which no node lapses.
local function shelter()
  return math.max(amnesty, recover)
end

-- A lease's end only moves away: if more leases end before `floor` than a beat counted, somebody wrote earlier ends
-- over theirs. Then silence is no proof of anything, and the next beat has them restored.
local function shortened()
  local floor = tonumber(meta.floor or '0')
  return floor > 0 and redis.call('ZCOUNT', LEASE, '-inf', '(' .. int(floor)) > tonumber(meta.floored or '0')
end

local function lapsed(id)
  local node = node_brief(id)
  if not node or ((node.left == '1' or node.lost == '1') and as_written(id)) then
    return true
  end
  local ends = redis.call('ZSCORE', LEASE, id) -- without one there is no proof of silence
  return ends and tonumber(ends) <= served and served >= shelter() and not shortened() or false
end

local function gone(id, life)
  local node = node_brief(id)
  if not node then
    return buried('node:' .. id) and true or false
  end
  return (node.life ~= life and as_written(id)) or lapsed(id)
end

-- The node holds no lease in this life.
local function not_live(id, life)
  return not node_brief(id) or gone(id, life)
end

-- nil, or the refusal of an incarnation that is not current. node: its record, if the caller has read it
local function not_current(id, life, start, node)
  node = node or node_brief(id)
  if not node then
    return refuse('not_current', 'node ' .. id .. ' is not known to the store: it must join first')
  end
  local current = node.life == life and node.start == int(start)
  if (not current or node.lost == '1' or node.left == '1') and not as_written(id) then
    return distrust({ 'node:' .. id })
  end
  if not current then
    return refuse('not_current', 'node ' .. id .. ' is held by another incarnation (start ' .. node.start .. ', at '
      .. node.address .. '): this agent must stop')
  end
  if node.lost == '1' then
    return refuse('lost', 'node ' .. id .. ' was declared lost: it must come back with a new life')
  end
  if node.left == '1' then
    return refuse('lost', 'node ' .. id .. ' has left: it must join again')
  end
end
