-- A renewal's script starts with this part and _usual_clock.lua, before _clock.lua: together they are a complete
-- renewal for the one usual case. They read only the fields of `meta` that a renewal needs, and have the same effect as
-- the rest would have. In every other case they change nothing, and the rest decides.
do
  local asked, prefix = cjson.decode(ARGV[3]), KEYS[1]
  local served, keep_clock, meta = usual_clock(not asked.asks and asked.era, 'unannounced')
  if served then
    local node = redis.call('HMGET', prefix .. 'node:' .. asked.node, 'life', 'lost', 'left')
    if node[1] == asked.life and node[2] ~= '1' and node[3] ~= '1' then
      keep_clock()
      redis.call('ZADD', prefix .. 'lease', string.format('%.0f', served + asked.length), asked.node)
      return { 1, string.format('%.0f', served) .. ' ' .. (meta[9] or '0'), '' }
    end
  end
end
