-- The one usual case of an acknowledgement as a whole, before _clock.lua: in a large gang that forms, a member that is
-- neither the first nor the last, has no text of its last pod, and holds the devices that it held. It has the same
-- effect and reply as the rest would have. In every other case it changes nothing, and the rest decides. It leaves it to
-- the rest to bound the marks: each member adds a few at the most until a step does that begins or ends a generation.
do
  local asked, prefix = cjson.decode(ARGV[3]), KEYS[1]
  local key, marks, counted_in = prefix .. 'job:' .. asked.uid, prefix .. 'marks:' .. asked.uid, prefix .. 'counts:' .. asked.uid
  local PART = 64 -- as of own_reply: a reply that brings more changes of others brings none of them
  local base, id = asked.base, asked.node
  local era = base and base.era
  local served, keep_clock, meta = usual_clock(era, 'rev')
  local node = served and redis.call('HMGET', prefix .. 'node:' .. id, 'life', 'lost', 'left', 'start')
  local others = served and redis.call('ZCOUNT', marks, string.format('(%.0f', base.rev), '+inf') or 0
  local revision = served and meta[9] or ''
  if others > PART and node[1] == asked.life and node[2] ~= '1' and node[3] ~= '1'
    and node[4] == string.format('%.0f', asked.start) and not asked.last
    and #revision <= 15 and string.find(revision, '^%d+$') then
    local of_member, of_holder, of_missing = 'member:' .. id, 'holder:' .. id, 'missing:' .. id
    local of_failsafe_member, of_silent = 'failsafe_member:' .. id, 'silent:' .. id
    local of_host, of_ports, of_report, of_last = 'host:' .. id, 'ports:' .. id, 'report:' .. id, 'last:' .. id
    local fields = { 'rev', 'generation_id', 'generation_number', 'generation_state', 'phase', 'generation_seal',
      'generation_stopped', 'generation_ready', of_member, of_holder, of_failsafe_member, of_missing, of_host, of_ports,
      of_silent, of_report, of_last }
    local job, before = {}, redis.call('HMGET', key, unpack(fields))
    for i = 1, #fields do
      job[fields[i]] = before[i] or nil
    end
    local counts = redis.call('HMGET', counted_in, 'rev', 'missing', 'holding')
    local missing, holding = tonumber(counts[2] or ''), tonumber(counts[3] or '')
    local whole = job.rev and counts[1] == job.rev and missing and holding -- who wrote this revision wrote all counts
    local member, holder = job[of_member], job[of_holder]
    local follows = member and string.find(member, '"group_rank":[1-9]') -- it is not the first
    local keeps = not holder or holder == member or follows
      and table.concat(cjson.decode(holder).devices, ' ') == table.concat(cjson.decode(member).devices, ' ')
    local is_ours = cjson.encode(asked.life) -- as begin_acks writes a member's life
    local ack = cjson.decode(asked.ack)
    if whole and missing > 1 and job.generation_id == asked.token.id
      and job.generation_number == string.format('%.0f', asked.token.number) and job.generation_state == 'forming'
      and job.phase ~= 'pausing' and not ack.ended and #ack.down == 0 and follows and job[of_missing] == is_ours
      and not job[of_failsafe_member] and keeps
      and tonumber(redis.call('ZSCORE', marks, 'rev') or '') == tonumber(job.rev) then
      take_ack(job, { node = id, group_rank = 1 }, ack)
      job[of_holder] = nil
      if job[of_silent] and cjson.decode(job[of_silent]) == asked.life then
        job[of_silent] = nil
      end
      keep_clock()
      local rev = string.format('%.0f', redis.call('HINCRBY', prefix .. 'meta', 'rev', 1))
      redis.call('ZADD', prefix .. 'changes', rev, 'job:' .. asked.uid)
      job.rev = rev
      local set, removed, marked = {}, {}, {}
      for i = 1, #fields do
        local field = fields[i]
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
      local own = { of_member, job[of_member], of_holder, false, of_failsafe_member, false, of_missing, false,
        of_host, job[of_host] or false, of_ports, job[of_ports] or false, of_silent, job[of_silent] or false,
        of_report, job[of_report] or false, of_last, job[of_last] or false }
      return { 1, own, 'part', era, tonumber(rev) }
    end
  end
end
