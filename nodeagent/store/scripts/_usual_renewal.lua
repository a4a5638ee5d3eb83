-- A renewal's script starts with this part, before _clock.lua: it is a complete renewal for the one usual case. It
-- reads only the fields of `meta` that a renewal needs, and has the same effect as the rest would have. In every other
-- case it changes nothing, and the rest decides.
do
  local asked, prefix = cjson.decode(ARGV[3]), KEYS[1]
  local meta = redis.pcall('HMGET', prefix .. 'meta', 'run', 'version', 'era', 'last', 'served', 'credit', 'gap',
    'recover', 'unannounced')
  local node = redis.call('HMGET', prefix .. 'node:' .. asked.node, 'life', 'lost', 'left')
  local last, served, credit, gap = tonumber(meta[4]), tonumber(meta[5]), tonumber(meta[6]), tonumber(meta[7])
  local recover = tonumber(meta[8] or '0')
  if meta[1] == ARGV[1] and meta[2] == ARGV[2] and meta[3] == asked.era and not asked.asks
    and node[1] == asked.life and node[2] ~= '1' and node[3] ~= '1'
    and last and served and credit and gap and recover and served >= recover then
    local time = redis.call('TIME')
    local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
    local step = now - last
    if step >= 0 and step <= gap then
      served = served + math.min(step, credit)
      -- The clock's own fields may lag: the clock then counts less, never more, and notices a gap sooner, never later.
      if step > credit / 4 then
        redis.call('HSET', prefix .. 'meta', 'last', string.format('%.0f', now), 'served', string.format('%.0f', served))
      end
      redis.call('ZADD', prefix .. 'lease', string.format('%.0f', served + asked.length), asked.node)
      return { 1, string.format('%.0f', served) .. ' ' .. (meta[9] or '0'), '' }
    end
  end
end
