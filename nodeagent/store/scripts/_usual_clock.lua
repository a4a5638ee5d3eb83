-- The served clock in the usual case, for the usual cases of steps that come before _clock.lua: the same process,
-- version and era, no recovery, and no gap. Returns the served time, a function that keeps it, and a list: the first
-- eight are its own, then come the other fields of `meta` that were asked for. Or nothing. It changes nothing.
-- The clock's own fields may lag: the clock then counts less, never more, and notices a gap sooner, never later.
local function usual_clock(era, ...)
  local key = KEYS[1] .. 'meta'
  local meta = redis.pcall('HMGET', key, 'run', 'version', 'era', 'last', 'served', 'credit', 'gap', 'recover',
    ...)
  local last, served, credit, gap = tonumber(meta[4]), tonumber(meta[5]), tonumber(meta[6]), tonumber(meta[7])
  local recover = tonumber(meta[8] or '0')
  if not (era and meta[1] == ARGV[1] and meta[2] == ARGV[2] and meta[3] == era
    and last and served and credit and gap and recover and served >= recover) then
    return
  end
  if served > 1e13 or math.max(last, credit, gap, recover) >= 1e15 or string.find(meta[4] .. meta[5] .. meta[6] .. meta[7] .. (meta[8] or ''), '%D') then -- nan, inf
    return
  end
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  local step = now - last
  if step < 0 or step > gap then
    return
  end
  served = served + math.min(step, credit)
  return served, function()
    if step > credit / 4 then
      redis.call('HSET', key, 'last', string.format('%.0f', now), 'served', string.format('%.0f', served))
    end
  end, meta
end
