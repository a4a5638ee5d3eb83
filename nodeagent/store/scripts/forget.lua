-- forget: node, by
local node = node_read(A.node)
if not node then
  return refuse('not_found', 'there is no node ' .. A.node .. ': list the nodes and try again')
end
if not lapsed(A.node) then
  return refuse('not_live', 'node ' .. A.node .. ' holds its lease: drain it, or stop its agent, first')
end
if node.left ~= '1' and node.lost ~= '1' then
  local lost = copied(node)
  lost.lost = '1'
  node_save(lost)
  depart(A.node, lease_end(A.node))
  retire(A.node)
  event({ kind = 'NodeForgotten', node = A.node, by = A.by, text = 'node ' .. A.node .. ' is permanently down, says ' .. A.by })
end
release_keepers(A.node)
ask_to_save()
return { 1, flat(node_read(A.node)), redis.call('HGET', CORDONS, A.node) or '' }
