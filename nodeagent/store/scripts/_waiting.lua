-- Who is waited for while a store recovers that has lost writes: those that may know better. Twin: twin/waiting.py.

-- The newest view so far says who was live. anew: the loss has only now been found; all are to be heard.
local function expect(anew)
  local heard, awaited = anew and {} or words(meta.heard), {}
  heard[A.by] = nil
  if A.regroup > 0 then
    awaited = words(table.concat(A.awaited, ' '))
    awaited[A.by] = true
    for id in pairs(heard) do
      awaited[id] = nil
    end
    recover = least + A.regroup
  else
    recover = math.max(least, math.min(recover, served + credit_ms + lease_ms))
  end
  amnesty = math.max(amnesty, recover)
  keep_words('heard', heard)
  keep_words('awaited', awaited)
end

-- This node has said what it knows of a store that has lost writes.
local function hear(id)
  local heard = words(meta.heard)
  if served >= recover or (meta.parent or '') ~= '' or heard[id] then
    return
  end
  local awaited = words(meta.awaited)
  heard[id] = true
  if awaited[id] then
    awaited[id] = nil
    if not next(awaited) then
      recover = math.max(least, served)
      amnesty = math.max(recover, served + credit_ms + lease_ms)
      redis.call('HSET', META, 'recover', int(recover), 'amnesty', int(amnesty))
    end
    keep_words('awaited', awaited)
  end
  keep_words('heard', heard)
end
