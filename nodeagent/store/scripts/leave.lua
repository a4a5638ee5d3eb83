-- leave: node, life, start, why?, era? (from a lease process: its decision in another era is void)
local node = node_read(A.node)
if A.era and A.era ~= meta.era then
  return refuse('era', 'the store may have lost writes: its agents must agree on what it has first')
end
if node and node.life == A.life and node.start == int(A.start) and node.left == '1' and node.lost ~= '1' then
  return { 1 }
end
local no = not_current(A.node, A.life, A.start)
if no then
  return no
end
depart(A.node, served)
local left = copied(node)
left.left = '1'
node_save(left)
event({ kind = 'NodeLeft', node = A.node, by = A.node, 
  text = 'node ' .. A.node .. ' left' .. (A.why and ': ' .. A.why or '') })
retire(A.node)
release_failsafe_members(A.node)
return { 1 }
