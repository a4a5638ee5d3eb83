-- What a beat's usual case (_usual_beat.lua) and the whole step share. Needs no prelude.

-- Looks for damage that no step would cause: the first damaged key, and another if either may be at fault; or nil. It
-- checks one thing, the node's own jobs and other records in turn, so its cost does not grow with the number of jobs.
-- One look for each beat: a second call has the result of the first. same_era: the agent has read this era. rev: of the
-- node's record, if the caller has read it.
local look_for_damage
do
  local LOOKED_AT, AT_ONCE, SHARED, MOST_NAMES, MOST_UID = 2, 2000, { 'queues', 'windows' }, 65536, 64
  local looked, damaged, or_damaged

  -- In a job that runs on the node.
  local function of_job(asked, prefix, same_era, own)
    local uid, record, id = own.uid, 'job:' .. own.uid, asked.node
    local job = redis.call('HMGET', prefix .. record, 'uid', 'name', 'rev', 'generation_number', 'holder:' .. id,
      'member:' .. id, 'generation_state', 'generation_id', 'phase')
    if not job[1] and redis.call('ZSCORE', prefix .. 'changes', 'gone:' .. record) then
      return -- this beat sends the record
    end
    if job[1] ~= uid or not job[2] or not tonumber(job[3]) then
      return record
    end
    local score = tonumber(redis.call('ZSCORE', prefix .. 'changes', record) or '-1')
    if score ~= tonumber(job[3]) then
      return score > tonumber(job[3]) and record or 'changes'
    end
    -- each step that changes the generation writes a new revision
    if same_era and own.rev > tonumber(job[3]) then -- an older record was put back, or the agent believed what none says
      return record
    end
    local entry = job[5] or (job[7] ~= 'ended' and job[6])
    local held = entry and cjson.decode(entry)
    local read = same_era and own.rev <= asked.rev and own.rev == tonumber(job[3])
    local stands = read and table.concat({ job[4] or '', job[8] or '', job[7] or '', job[9] or '' }, ' ')
    if read and (own.stands ~= stands or not held or held.life ~= asked.life) then
      return record
    end
    if redis.call('HGET', prefix .. 'names', job[2]) ~= uid then
      return 'names'
    end
    if not highest_of(prefix, job[2], job[4]) then
      return 'highest', record
    end
    local devices = held and held.devices or {}
    for from = 1, #devices, AT_ONCE do
      local to = math.min(from + AT_ONCE - 1, #devices)
      for _, by in ipairs(redis.call('HMGET', prefix .. 'alloc:' .. id, unpack(devices, from, to))) do
        if by ~= uid then
          return 'alloc:' .. id
        end
      end
    end
  end

  -- The record is there, and `changes` does not list it: who reads everything anew would take it for removed.
  local function unlisted(prefix, record, rev)
    rev = rev or redis.call('HGET', prefix .. record, 'rev')
    return rev and tonumber(redis.call('ZSCORE', prefix .. 'changes', record) or '-1') ~= tonumber(rev)
  end

  -- Some record is there and not listed: who reads everything anew now would take it for removed, and offer that as the
  -- newest view. Each is looked at only if the numbers differ, as they also do while a lost job's name is left. More
  -- names, or longer ones, than there are jobs: somebody wrote them, and the names are made anew.
  local function cut_short(prefix)
    local changes, nodes = prefix .. 'changes', prefix .. 'nodes'
    local copies, names = redis.pcall('HLEN', nodes), redis.call('HLEN', prefix .. 'names')
    if names > MOST_NAMES then
      return 'names'
    end
    if redis.call('ZCARD', changes) >= (tonumber(copies) or 0) + names then
      return
    end
    local ids = { job = redis.call('HVALS', prefix .. 'names'), node = tonumber(copies) and redis.call('HKEYS', nodes) or {} }
    for _, kind in ipairs({ 'job', 'node' }) do
      for _, id in ipairs(ids[kind]) do
        local record = kind .. ':' .. id
        if kind == 'job' and #id > MOST_UID then
          return 'names'
        end
        if redis.call('EXISTS', prefix .. record) == 1 and not redis.call('ZSCORE', changes, record) then
          return 'changes'
        end
      end
    end
  end

  -- In the next few of all records: a missing one may belong to no node that could report it.
  local function of_any(prefix)
    local changes = prefix .. 'changes'
    local card = redis.call('ZCARD', changes)
    local from = redis.call('HINCRBY', prefix .. 'meta', 'looked', LOOKED_AT) % (card + #SHARED)
    for at = math.max(from, card) + 1, math.min(from + LOOKED_AT, card + #SHARED) do
      local shared = SHARED[at - card]
      if unlisted(prefix, shared) then
        local score = tonumber(redis.call('ZSCORE', changes, shared) or '-1')
        return score > (tonumber(redis.call('HGET', prefix .. shared, 'rev')) or -1) and shared or 'changes'
      end
    end
    local listed = from < card and redis.call('ZRANGE', changes, from, from + LOOKED_AT - 1, 'WITHSCORES') or {}
    for i = 1, #listed, 2 do
      local record = listed[i]
      local kind, name = string.match(record, '^(%a+):(.*)$')
      local field = kind == 'job' and 'uid' or kind == 'node' and 'id'
      if field then
        local about = redis.call('HMGET', prefix .. record, field, 'rev', 'lost', 'left')
        if about[1] ~= name or (tonumber(about[2] or '') or -1) < tonumber(listed[i + 1]) then
          return record
        end
        if kind == 'node' and about[3] ~= '1' and about[4] ~= '1' and not redis.call('ZSCORE', prefix .. 'lease', name) then
          return 'lease'
        end
      elseif kind ~= 'gone' and redis.call('EXISTS', prefix .. record) == 0 then
        return record
      end
    end
  end

  local function look(asked, prefix, same_era, rev)
    if unlisted(prefix, 'node:' .. asked.node, rev) then
      return 'changes'
    end
    local cut = (asked.rev == 0 or asked.anew) and cut_short(prefix)
    if cut then
      return cut
    end
    local own = asked.runs[asked.seq % (#asked.runs + 1)]
    if own then
      return of_job(asked, prefix, same_era, own)
    end
    return of_any(prefix)
  end

  function look_for_damage(asked, prefix, same_era, rev)
    if not looked then
      looked, damaged, or_damaged = true, look(asked, prefix, same_era, rev)
    end
    return damaged, or_damaged
  end
end

-- When the next lease of another node ends: served time, or nil. It also moves `floor` (see `shortened`), of which
-- count leases end before.
local function next_lease_end(id, prefix, served, protected, shelter, lease_ms, credit_ms, floor, count)
  local later = redis.call('ZRANGEBYSCORE', prefix .. 'lease', string.format('(%.0f', served), '+inf', 'WITHSCORES',
    'LIMIT', 0, 2)
  local first = later[1] == id and 3 or 1
  -- a step back of the server's clock may take up to a quarter of credit_ms from an end
  local next_floor = later[1] and math.min(tonumber(later[2]), served + lease_ms) - credit_ms or 0
  if not protected and next_floor > served and next_floor >= floor + credit_ms then
    redis.call('HSET', prefix .. 'meta', 'floor', string.format('%.0f', next_floor), 'floored',
      string.format('%.0f', count))
  end
  return later[first] and math.max(tonumber(later[first + 1]), shelter) or nil
end
