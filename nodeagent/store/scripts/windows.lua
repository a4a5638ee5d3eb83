-- windows: expect_rev, windows (JSON), request, by, text
local record = to_map(redis.call('HGETALL', P .. 'windows'))
if not request_seen(A.request) then
  local rev = record.windows and cjson.decode(record.windows).rev or 0
  if rev ~= A.expect_rev then
    return refuse('stale', 'the maintenance windows have revision ' .. int(rev) .. ' by now, not ' .. int(A.expect_rev))
  end
  remember(A.request, 'windows')
  record.windows, record.rev = A.windows, touch('windows')
  redis.call('ZREM', CHANGES, 'gone:windows')
  redis.call('HSET', P .. 'windows', 'windows', record.windows, 'rev', record.rev)
  event({ kind = 'WindowsChanged', by = A.by, text = A.text })
end
ask_to_save()
return { 1, flat(record) }
