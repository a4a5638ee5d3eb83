-- pods: the published pods of the job ARGV[1], in order of node. Reads only: no prelude, the served clock stands.
local P, bodies = KEYS[1], {}
local nodes = redis.call('ZRANGE', P .. 'lease', 0, -1)
for _, node in ipairs(redis.call('ZRANGE', P .. 'departed', 0, -1)) do
  nodes[#nodes + 1] = node
end
table.sort(nodes)
for _, node in ipairs(nodes) do
  local body = redis.call('GET', P .. 'pod:' .. ARGV[1] .. ':' .. node)
  if body then
    bodies[#bodies + 1] = body
  end
end
return bodies
