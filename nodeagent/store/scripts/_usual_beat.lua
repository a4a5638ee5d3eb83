-- The one usual case of a beat as a whole, before _clock.lua: of an agent that has read all that there is, brings nothing
-- but its pods, knows who is silent, and finds no damage, if it looks for any. Most of these decode no JSON, since they
-- have plain words: ARGV[4] revision, ARGV[5] era, ARGV[6] silent, ARGV[7] node, and ARGV[8] if it looks or brings pods.
-- Each step that changes a record raises the store's revision. While that is the agent's, every record is as the agent has
-- read it, its own node's too, and there is nothing to send: only the ends of leases pass without a step. In every other
-- case it changes nothing (but which records are looked at next), and the rest decides.
local function usual_beat()
  local rev, era, silent, id, prefix = ARGV[4], ARGV[5], ARGV[6], ARGV[7], KEYS[1]
  local served, keep_clock, meta = usual_clock(era, 'rev', 'amnesty', 'floor', 'floored', 'asked', 'lease',
    'cluster_uid', 'event')
  if not served or meta[9] ~= rev or #rev > 15 then
    return
  end
  local lease_ms, cluster_uid, event = meta[14] or '', meta[15] or '', meta[16] or ''
  local amnesty, floor, floored, asked = meta[10] or '0', meta[11] or '0', meta[12] or '0', meta[13] or '0'
  local texts = table.concat({ amnesty, floor, floored, asked, lease_ms, event }, ' ')
  if not string.find(texts, '^%d+ %d+ %d+ %d+ %d+ %d+%-%d+$') or not string.find(cluster_uid, '^[%w%p]+$') then
    return
  end
  amnesty, floor, floored, lease_ms = tonumber(amnesty), tonumber(floor), tonumber(floored), tonumber(lease_ms)
  if served < amnesty or math.max(floored, lease_ms) >= 1e15 or tonumber(asked) > tonumber(rev) then
    return
  end

  -- The leases around the place up to which they had ended for the agent. The one before it has ended, and is the one that
  -- was the last, and the next has not: so just those are silent.
  local count, last, is_of = string.match(silent, '^(%d+) (%S*) (.*)$')
  count = tonumber(count)
  if not count or is_of ~= era then
    return
  end
  local ends = redis.call('ZRANGE', prefix .. 'lease', math.max(count - 1, 0), count + 1, 'WITHSCORES')
  local next = count > 0 and 3 or 1
  local first = tonumber(ends[next + 1])
  if not first or first <= served or count > 0 and (ends[2] ~= last or tonumber(last) > served) then
    return
  end
  -- And no more than that end before `floor` (see `shortened`), which need not follow yet.
  local credit = tonumber(meta[6])
  local next_floor = math.min(first, served + lease_ms) - credit
  if count > floored or first < floor or next_floor > served and next_floor >= floor + credit then
    return
  end

  if ARGV[8] then
    local beat, key = cjson.decode(ARGV[3]), prefix .. 'node:' .. id
    local node = redis.call('HMGET', key, 'id', 'life', 'start', 'lost', 'left', 'mute', 'seq')
    if node[1] ~= id or node[2] ~= beat.life or node[3] ~= string.format('%.0f', beat.start) or node[4] == '1'
      or node[5] == '1' or node[6] or (tonumber(node[7] or '') or beat.seq) >= beat.seq then
      return
    end
    local looked = beat.looks > 0 and redis.call('HGET', prefix .. 'meta', 'looked') or '0'
    if not string.find(looked, '^%d+$') or #looked > 15 or beat.looks > 0 and look_once(beat, prefix, true) then
      return
    end
    redis.call('HSET', key, 'seq', string.format('%.0f', beat.seq))
    for _, pod in ipairs(beat.pods) do
      redis.call('SET', prefix .. 'pod:' .. pod.uid .. ':' .. id, pod.body, 'PX',
        string.format('%.0f', math.max(10 * lease_ms, 30000)))
    end
  end
  keep_clock()
  local other = ends[next + (ends[next] == id and 3 or 1)]
  return { 1, cluster_uid, string.format('%.0f', served), other and string.format('%.0f', other - served) or '', asked, event }
end
local found = ARGV[4] and usual_beat()
if found then
  return found
end
