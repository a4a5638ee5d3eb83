-- The one usual case of an acknowledgement as a whole, before _clock.lua: in a large gang that forms, a member that is neither
-- the first nor the last, has no text of its last pod, and holds the devices that it held. It has the same effect and reply
-- as the rest would have. In every other case it changes nothing, and the rest decides.
do
  local asked, prefix = cjson.decode(ARGV[3]), KEYS[1]
  local key, marks, counted_in = prefix .. 'job:' .. asked.uid, prefix .. 'marks:' .. asked.uid, prefix .. 'counts:' .. asked.uid
  local PART = 64 -- as of own_reply: a reply that brings more changes of others brings none of them
  local KINDS = { 'member:', 'holder:', 'keeper:', 'missing:', 'host:', 'ports:', 'silent:', 'report:', 'last:' }
  local base, id = asked.base, asked.node
  local era = base and base.era
  local served, keep_clock = usual_clock(era)
  local node = served and redis.call('HMGET', prefix .. 'node:' .. id, 'life', 'lost', 'left', 'start')
  local others = served and redis.call('ZCOUNT', marks, string.format('(%.0f', base.rev), '+inf') or 0
  if others > PART and node[1] == asked.life and node[2] ~= '1' and node[3] ~= '1'
    and node[4] == string.format('%.0f', asked.start) and not asked.last then
    local fields = { 'rev', 'head_id', 'head_number', 'head_state', 'phase', 'head_seal', 'head_stopped', 'head_ready' }
    for _, kind in ipairs(KINDS) do
      fields[#fields + 1] = kind .. id
    end
    local job, before = {}, redis.call('HMGET', key, unpack(fields))
    for i, field in ipairs(fields) do
      job[field] = before[i] or nil
    end
    local counts = redis.call('HMGET', counted_in, 'rev', 'missing', 'holding', 'report', 'last', 'done', 'undone', 'freed')
    local missing, holding = tonumber(counts[2] or ''), tonumber(counts[3] or '')
    local whole = job.rev and counts[1] == job.rev and missing and holding
    for i = 4, 8 do
      whole = whole and tonumber(counts[i] or '')
    end
    local member, holder = job['member:' .. id], job['holder:' .. id]
    member, holder = member and cjson.decode(member), holder and cjson.decode(holder)
    local ack, silent = cjson.decode(asked.ack), job['silent:' .. id]
    if whole and missing > 1 and job.head_id == asked.token.id
      and job.head_number == string.format('%.0f', asked.token.number) and job.head_state == 'forming'
      and job.phase ~= 'pausing' and not ack.ended and member and member.life == asked.life and member.group_rank > 0
      and job['missing:' .. id] and not job['keeper:' .. id]
      and (not holder or table.concat(holder.devices, ' ') == table.concat(member.devices, ' '))
      and tonumber(redis.call('ZSCORE', marks, 'rev') or '') == tonumber(job.rev) and redis.call('ZCARD', marks) <= 65536 then
      take_ack(job, member, ack)
      job['holder:' .. id] = nil
      if silent and cjson.decode(silent) == asked.life then
        job['silent:' .. id] = nil
      end
      keep_clock()
      local rev = string.format('%.0f', redis.call('HINCRBY', prefix .. 'meta', 'rev', 1))
      redis.call('ZADD', prefix .. 'changes', rev, 'job:' .. asked.uid)
      job.rev = rev
      local set, removed, marked = {}, {}, {}
      for i, field in ipairs(fields) do
        local after = job[field]
        if after ~= (before[i] or nil) then
          marked[#marked + 1] = rev
          marked[#marked + 1] = field
          if after then
            set[#set + 1] = field
            set[#set + 1] = after
          else
            removed[#removed + 1] = field
          end
        end
      end
      redis.call('HSET', key, unpack(set))
      redis.call('HDEL', key, unpack(removed))
      redis.call('ZADD', marks, unpack(marked))
      redis.call('HSET', counted_in, 'rev', rev, 'missing', string.format('%.0f', missing - 1), 'holding',
        string.format('%.0f', holding - (holder and 1 or 0)))
      local own = {}
      for _, kind in ipairs(KINDS) do
        own[#own + 1] = kind .. id
        own[#own + 1] = job[kind .. id] or false
      end
      return { 1, own, 'part', era, tonumber(rev) }
    end
  end
end
