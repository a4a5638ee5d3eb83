-- First part of every step that decides something about a job: while the store is recovering, such a step is refused.
local awaits = served < recover and redis.call('ZCARD', AWAITED) or 0
if awaits > 0 then
  local named, more = redis.call('ZRANGE', AWAITED, 0, NAMED - 1), ''
  if awaits > NAMED then
    more = ' and ' .. int(awaits - NAMED) .. ' more'
  end
  return refuse('recovering', 'the store may lack what was written last, and waits for nodes that may know it: '
    .. table.concat(named, ', ') .. more .. '; nothing is decided until enough of them are back, or for '
    .. 'another ' .. recovering_for() .. ' s; then try again')
end
if served < recover then
  return refuse('recovering', 'the store was started anew and may lack what was written last: nothing is decided for '
    .. 'another ' .. recovering_for() .. ' s, so that every agent can offer what it knows; then try again')
end
