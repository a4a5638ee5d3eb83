-- The one usual case of a beat as a whole, before _clock.lua: of an agent that has read all that there is, brings
-- nothing but its pods, and knows who is silent; no damage, no amnesty. It has the same effect and reply as the rest
-- would have. In every other case it changes nothing, and the rest decides. Each eighth beat is left to the rest, which
-- reads all of `meta`.
do
  local asked, prefix = cjson.decode(ARGV[3]), KEYS[1]
  local id, node_key, leases = asked.node, prefix .. 'node:' .. asked.node, prefix .. 'lease'
  local quiet = asked.rev > 0 and asked.seq % 8 ~= 0 and not (asked.facts or asked.readiness or asked.saved
    or asked.damaged[1] or asked.notes[1])
  local served, keep_clock, meta
  if quiet then
    served, keep_clock, meta = usual_clock(asked.era, 'rev', 'amnesty', 'lease', 'floor', 'floored', 'asked', 'horizon',
      'looked', 'cluster_uid', 'event')
  end
  local whole = served and meta[9] and meta[11] and meta[17] and not string.find(meta[17], '[^%w%p]')
    and string.find(meta[18] or '', '^%d+%-%d+$')
  for i = 9, 16 do
    local text = whole and meta[i] or '0'
    whole = whole and #text <= 15 and string.find(text, '^%d+$')
  end
  if whole then
    local revision, amnesty, lease_ms = tonumber(meta[9]), tonumber(meta[10] or '0'), tonumber(meta[11])
    local floor, floored = tonumber(meta[12] or '0'), tonumber(meta[13] or '0')
    local node = redis.call('HMGET', node_key, 'id', 'life', 'lost', 'left', 'start', 'seq', 'rev', 'mute')
    local is_current = node[1] == id and node[2] == asked.life and node[3] ~= '1' and node[4] ~= '1' and not node[8]
      and node[5] == string.format('%.0f', asked.start) and (tonumber(node[6] or '') or asked.seq) < asked.seq
    if is_current and asked.rev == revision and asked.top <= revision
      and revision >= math.max(tonumber(meta[14] or '0'), tonumber(meta[15] or '0'))
      and redis.call('ZCOUNT', prefix .. 'changes', '(' .. meta[9], '+inf') == 0
      and served >= amnesty and redis.call('ZSCORE', leases, id)
      and not (floor > 0 and redis.call('ZCOUNT', leases, '-inf', string.format('(%.0f', floor)) > floored) then
      local now = string.format('%.0f', served)
      local count = redis.call('ZCOUNT', leases, '-inf', now)
      local last = count > 0 and redis.call('ZREVRANGEBYSCORE', leases, now, '-inf', 'WITHSCORES', 'LIMIT', 0, 1) or {}
      local silent = string.format('%.0f', count) .. ' ' .. (last[2] or '') .. ' ' .. asked.era
      if (count == 0 or silent == asked.silent) and not look_for_damage(asked, prefix, true, node[7]) then
        keep_clock()
        redis.call('HSET', node_key, 'seq', string.format('%.0f', asked.seq))
        for _, pod in ipairs(asked.pods) do
          redis.call('SET', prefix .. 'pod:' .. pod.uid .. ':' .. id, pod.body, 'PX',
            string.format('%.0f', math.max(10 * lease_ms, 30000)))
        end
        local next_end = next_lease_end(id, prefix, served, false, amnesty, lease_ms, tonumber(meta[6]), floor, count)
        return { 1, meta[17], now, {}, next_end and string.format('%.0f', next_end - served) or '', meta[9], 0,
          meta[18], {}, asked.era, 0, string.format('%.0f', tonumber(meta[14] or '0')), '0', {}, {}, 0,
          silent, silent == asked.silent and 1 or 0, meta[9] }
      end
    end
  end
end
