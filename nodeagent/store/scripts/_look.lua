-- Looks for damage that no step would cause: the first damaged key, and another if either may be at fault; or nil. It
-- checks one of the node's own jobs, in turn by the number of the look, and the next few of all records: so its cost does
-- not grow with the number of jobs. same_era: the agent has read this era. Needs no prelude; its functions are made once
-- a beat looks.
local function look_for_damage(asked, prefix, same_era)
  local LOOKED_AT, AT_ONCE, SHARED, MOST_NAMES, MOST_UID = 8, 2000, { 'queues', 'windows' }, 65536, 64

  -- In a job that runs on the node.
  local function of_job(own)
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
  local function unlisted(record)
    local rev = redis.call('HGET', prefix .. record, 'rev')
    return rev and tonumber(redis.call('ZSCORE', prefix .. 'changes', record) or '-1') ~= tonumber(rev)
  end

  -- Some record is there and not listed: who reads everything anew now would take it for removed, and offer that as the
  -- newest view. Each is looked at only if the numbers differ, as they also do while a lost job's name is left. More
  -- names, or longer ones, than there are jobs: somebody wrote them, and the names are made anew.
  local function cut_short()
    local copies, names = redis.pcall('HLEN', prefix .. 'nodes'), redis.call('HLEN', prefix .. 'names')
    if names > MOST_NAMES then
      return 'names'
    end
    if redis.call('ZCARD', prefix .. 'changes') >= (tonumber(copies) or 0) + names then
      return
    end
    local ids = { job = redis.call('HVALS', prefix .. 'names'), node = tonumber(copies) and redis.call('HKEYS', prefix .. 'nodes') or {} }
    for _, kind in ipairs({ 'job', 'node' }) do
      for _, id in ipairs(ids[kind]) do
        local record = kind .. ':' .. id
        if kind == 'job' and #id > MOST_UID then
          return 'names'
        end
        if redis.call('EXISTS', prefix .. record) == 1 and not redis.call('ZSCORE', prefix .. 'changes', record) then
          return 'changes'
        end
      end
    end
  end

  -- In the next few of all records: a missing one may belong to no node that could report it.
  local function of_any()
    local card = redis.call('ZCARD', prefix .. 'changes')
    local from = redis.call('HINCRBY', prefix .. 'meta', 'looked', LOOKED_AT) % (card + #SHARED)
    for at = math.max(from, card) + 1, math.min(from + LOOKED_AT, card + #SHARED) do
      local shared = SHARED[at - card]
      if unlisted(shared) then
        local score = tonumber(redis.call('ZSCORE', prefix .. 'changes', shared) or '-1')
        return score > (tonumber(redis.call('HGET', prefix .. shared, 'rev')) or -1) and shared or 'changes'
      end
    end
    local listed = from < card and redis.call('ZRANGE', prefix .. 'changes', from, from + LOOKED_AT - 1, 'WITHSCORES') or {}
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

  -- Whether somebody wrote over one of the fields that each step of a job decides by, and no difference brings.
  local function has_other_texts(seen)
    local fields = {}
    for field in pairs(seen.texts) do
      fields[#fields + 1] = field
    end
    local stored, other = redis.call('HMGET', prefix .. 'job:' .. seen.uid, 'rev', unpack(fields)), false
    for i = 1, #fields do
      other = other or (stored[i + 1] or '') ~= seen.texts[fields[i]]
    end
    return other and tonumber(stored[1] or '') == seen.rev
  end

  if not redis.call('ZSCORE', prefix .. 'lease', asked.node) then
    return 'lease'
  end
  if unlisted('node:' .. asked.node) then
    return 'changes'
  end
  local own, damaged, or_damaged = asked.runs[asked.looks % math.max(1, #asked.runs) + 1], nil, nil
  if asked.rev == 0 or asked.anew then
    damaged = cut_short()
  end
  if own and not damaged then
    damaged, or_damaged = of_job(own)
  end
  if asked.seen and same_era and not damaged and has_other_texts(asked.seen) then
    damaged = 'job:' .. asked.seen.uid
  end
  if damaged then
    return damaged, or_damaged
  end
  return of_any()
end

-- One look for each beat: where its usual case has looked, and found something, the rest is given that.
local look_once
do
  local looked, damaged, or_damaged
  function look_once(...)
    if not looked then
      looked, damaged, or_damaged = true, look_for_damage(...)
    end
    return damaged, or_damaged
  end
end
