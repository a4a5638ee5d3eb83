-- The nodes that a recovering store waits for, after it has lost writes or may have: these nodes may know the writes.

-- The newest view so far names the nodes that were live. anew: the loss was found just now; all nodes must call.
local function expect(anew)
  if anew then
    redis.call('DEL', CALLED)
  end
  redis.call('ZREM', CALLED, A.by)
  redis.call('DEL', AWAITED)
  if A.regroup > 0 then
    redis.call('ZADD', AWAITED, 0, A.by)
    for _, id in ipairs(A.awaited) do
      if not redis.call('ZSCORE', CALLED, id) then
        redis.call('ZADD', AWAITED, 0, id)
      end
    end
    recover = least + A.regroup
    if A.regroup > tonumber(meta.regroup or '0') then -- no recovery lasts longer than META says
      redis.call('HSET', META, 'regroup', int(A.regroup))
    end
  else
    recover = math.max(least, math.min(recover, served + credit_ms + lease_ms))
  end
  amnesty = math.max(amnesty, recover)
end

-- This node has offered what it knows of the writes that the store may have lost.
local function has_called(id)
  if served >= recover then
    return
  end
  local known_loss, awaited = (meta.parent or '') == '', redis.call('ZREM', AWAITED, id) == 1
  if known_loss or awaited then
    redis.call('ZADD', CALLED, 0, id)
  end
  -- all have to call if writes were lost; if that is only possible, at least half of those that were live
  if not awaited or redis.call('ZCARD', AWAITED) > (known_loss and 0 or redis.call('ZCARD', CALLED)) then
    return
  end
  redis.call('DEL', AWAITED)
  recover = math.max(least, served)
  local usual = math.max(recover, served + credit_ms + lease_ms)
  if not known_loss then
    redis.call('DEL', CALLED)
    amnesty = math.min(amnesty, usual) -- an offer made it last for as long as all could have been waited for
  else
    amnesty = usual
  end
  redis.call('HSET', META, 'recover', int(recover), 'amnesty', int(amnesty))
end
