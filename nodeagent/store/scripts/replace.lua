-- replace: record (queues, windows), expect_rev, value (JSON), request, did, by, text
local KINDS = {
  queues = { key = P .. 'queues', field = 'tree', words = 'the queues have', event = 'QueueChanged' },
  windows = {
    key = P .. 'windows', field = 'windows', words = 'the maintenance windows have', event = 'WindowsChanged',
  },
}
local kind = KINDS[A.record]
local key = kind.key
local record = to_map(redis.call('HGETALL', key))
local seen, other = request_seen(A.request, A.did)
if other then
  return other
end
if not seen then
  local rev = record[kind.field] and cjson.decode(record[kind.field]).rev or 0
  if rev ~= A.expect_rev then
    return refuse('stale', kind.words .. ' revision ' .. int(rev) .. ' by now, not ' .. int(A.expect_rev))
  end
  remember(A.request, A.record, A.did, OPERATORS)
  record[kind.field], record.rev = A.value, touch(A.record)
  redis.call('ZREM', CHANGES, 'gone:' .. A.record)
  redis.call('HSET', key, kind.field, record[kind.field], 'rev', record.rev)
  event({ kind = kind.event, by = A.by, text = A.text })
end
ask_to_save()
return { 1, flat(record) }
