-- forget: node, by, request, did
local seen, other = request_seen(A.request, A.did)
if other then
  return other
end
local gone = seen and tonumber(string.match(seen, ' (%d+)$')) -- the revision at which that request removed the record
if gone then
  ask_to_save()
  return { 1, {}, '', 1, gone }
end
local node = node_read(A.node)
if not node then
  return refuse('not_found', 'there is no node ' .. A.node .. ': list the nodes and try again')
end
if not as_written(A.node) then
  return damaged('node:' .. A.node)
end
if seen then
  ask_to_save()
  return { 1, flat(node), redis.call('HGET', CORDONS, A.node) or '', 0, node.rev }
end
if not lapsed(A.node) then
  return refuse('not_live', 'node ' .. A.node .. ' holds its lease: drain it, or stop its agent, first')
end
local removed = node.left == '1' or node.lost == '1'
if removed then
  node.rev = int(delete_node(A.node))
  redis.call('HDEL', CORDONS, A.node)
  remember(A.request, A.node, A.did .. ' ' .. node.rev, OPERATORS)
  event({ kind = 'NodeRemoved', node = A.node, by = A.by, text = A.by .. ' removed the record of node ' .. A.node })
else
  local lost = copied(node)
  lost.lost = '1'
  node_save(lost)
  depart(A.node, lease_end(A.node))
  retire(A.node)
  release_failsafe_members(A.node)
  remember(A.request, A.node, A.did, OPERATORS)
  node = node_read(A.node)
  event({ kind = 'NodeForgotten', node = A.node, by = A.by,
    text = A.by .. ' confirmed that node ' .. A.node .. ' is permanently down' })
end
ask_to_save()
return { 1, flat(node), redis.call('HGET', CORDONS, A.node) or '', removed and 1 or 0, node.rev }
