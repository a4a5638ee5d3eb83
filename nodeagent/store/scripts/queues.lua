-- queues: expect_rev, tree (JSON), request, by, text
local record = to_map(redis.call('HGETALL', P .. 'queues'))
if not request_seen(A.request) then
  local rev = record.tree and cjson.decode(record.tree).rev or 0
  if rev ~= A.expect_rev then
    return refuse('stale', 'the queues have revision ' .. int(rev) .. ' by now, not ' .. int(A.expect_rev))
  end
  remember(A.request, 'queues')
  record.tree, record.rev = A.tree, touch('queues')
  redis.call('ZREM', CHANGES, 'gone:queues')
  redis.call('HSET', P .. 'queues', 'tree', record.tree, 'rev', record.rev)
  event({ kind = 'QueueChanged', by = A.by, text = A.text })
end
ask_to_save()
return { 1, flat(record) }
