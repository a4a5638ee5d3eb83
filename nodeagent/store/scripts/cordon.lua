-- cordon: node, cordon (JSON, or absent to clear), by, reason?, request, did
local id = A.node
local node = node_read(id)
if not node then
  return refuse('not_found', 'there is no node ' .. id .. ': list the nodes and try again')
end
if not as_written(id) then
  return damaged('node:' .. id)
end
local seen, other = request_seen(A.request, A.did)
if other then
  return other
end
local was = redis.call('HGET', CORDONS, id)
if not seen then
  remember(A.request, id, A.did, OPERATORS, (was or nil) == A.cordon)
  if (was or nil) ~= A.cordon then
    if A.cordon then
      redis.call('HSET', CORDONS, id, A.cordon)
      local how = cjson.decode(A.cordon).drain and 'to be drained' or 'cordoned'
      event({ kind = 'NodeCordoned', node = id, by = A.by, text = how .. ' (by ' .. A.by .. '): ' .. A.reason })
    else
      redis.call('HDEL', CORDONS, id)
      local who = A.by ~= '' and ' (by ' .. A.by .. ')' or ''
      event({ kind = 'NodeUncordoned', node = id, by = A.by, text = 'node ' .. id .. ' takes new work again' .. who })
    end
    was = A.cordon
    node_touch(node)
  end
end
ask_to_save()
return { 1, flat(node), was or '' }
