-- Functions that proposals, acknowledgements and endings share.
local function check_open(job)
  if is_terminal(job) then
    return refuse('ended', 'job ' .. job.name .. ' has ended (' .. job.phase .. ')')
  end
end

-- The generation (A.expect: {number, id} or nil) and the control are still those of the record that the agent decided
-- by.
local function check_expected(job)
  local expect, state, same = A.expect, A.expect_state, nil
  if expect then
    same = job.generation_id == expect.id and job.generation_number == int(expect.number)
      and job.generation_state == state
  else
    same = not job.generation_id
  end
  if not same and not highest_of(P, job.name, job.generation_number) then -- no step wrote it: nobody is to read it
    return damaged('highest', 'job:' .. job.uid)
  end
  if not same then
    local seen = expect and (state .. ' generation ' .. int(expect.number)) or 'none'
    local is = job.generation_id and (job.generation_state .. ' generation ' .. job.generation_number) or 'none'
    return refuse('stale', 'the current generation of job ' .. job.name .. ' is ' .. is .. ' by now, not ' .. seen
      .. ': read it again')
  end
  local rev = int(cjson.decode(job.control).rev)
  if rev ~= int(A.control_rev) then
    return refuse('stale', 'the control of job ' .. job.name .. ' has revision ' .. rev .. ' by now, not '
      .. int(A.control_rev))
  end
end

local function check_decision(job)
  return check_open(job) or check_expected(job)
end

-- All workers of this member must succeed, or only those of the role that completes the job, if it has any there.
local function ended_well(job, node, role)
  local state, body = string.match(job['report:' .. node] or '', '^%d+ (%a+) (.*)$')
  if not role or role == '' then
    return state == 'succeeded'
  end
  local has = false
  for _, place in ipairs(cjson.decode(job['member:' .. node]).places or {}) do
    has = has or place.role == role
  end
  return not has or (body and cjson.decode(body).completed)
end

-- The first member that has not, or nil.
local function first_unfinished(job)
  local role = cjson.decode(job.spec).completes
  for _, node in ipairs(sorted_keys(entries(job, 'member'))) do
    if not ended_well(job, node, role) then
      return node
    end
  end
end

-- An agent that decides on a fault may not have read yet that all the work is done: then the job has succeeded.
local function check_unfinished(job)
  if job.generation_state == 'active' and not first_unfinished(job) then
    return refuse('stale', 'all workers that complete job ' .. job.name .. ' have ended well by now: read it again')
  end
end

local function check_generation(job, token)
  if job.generation_id ~= token.id or job.generation_number ~= int(token.number) then
    local is = job.generation_id and ('generation ' .. job.generation_number) or 'none'
    return refuse('stale', 'the current generation of job ' .. job.name .. ' is ' .. is .. ' by now, not generation '
      .. int(token.number) .. ': read it again')
  end
end

-- The job as `read` returns it, for a node that reports about a generation: its incarnation must be current, and the
-- generation must have the token. Else nil and the refusal.
local function job_of_caller(read)
  local no = not_current(A.node, A.life, A.start)
  if no then
    return nil, no
  end
  local job, counts = read(A.uid, A.node)
  if not job then
    return nil, no_job(A.uid)
  end
  return job, check_generation(job, A.token), counts
end

-- The caller's own entries only, if others have changed more than PART fields since the caller's base: no agent decides
-- by them before its next beat, which brings them all. The caller's record stays of its revision.
local PART = 64
local function own_reply(job)
  local base = A.base
  local others = base and redis.call('ZCOUNT', P .. 'marks:' .. job.uid, '(' .. int(base.rev), '+inf') or 0
  if not base or base.era ~= meta.era or others <= PART then
    return job_reply(job)
  end
  local own = {}
  for _, kind in ipairs(OF_NODE) do
    own[#own + 1] = kind .. A.node
    own[#own + 1] = job[kind .. A.node] or false
  end
  return { 1, own, 'part', meta.era or '', tonumber(job.rev) }
end

local function lives_of(job, node)
  local lives = {}
  for _, kind in ipairs({ 'member:', 'holder:' }) do
    if job[kind .. node] then
      lives[cjson.decode(job[kind .. node]).life] = true
    end
  end
  return lives
end

-- lost: sorted list of nodes
local function check_lost(job, lost)
  for _, node in ipairs(lost) do
    local lives = lives_of(job, node)
    if not next(lives) then
      return refuse('stale', 'node ' .. node .. ' is neither member nor holder in job ' .. job.name)
    end
    for life in pairs(lives) do
      if not gone(node, life) then
        local about = node_brief(node)
        if about and (about.life ~= life or about.lost == '1' or about.left == '1') then -- its record alone says so
          return damaged('node:' .. node)
        end
        return refuse('stale', 'node ' .. node .. ' holds its lease: it is not lost')
      end
    end
  end
end

local function declare_lost(job, lost, by)
  for _, id in ipairs(lost) do
    local node = node_read(id)
    if node and node.lost ~= '1' and node.left ~= '1' and lives_of(job, id)[node.life] then
      local marked = copied(node)
      marked.lost = '1'
      node_save(marked)
      depart(id, lease_end(id))
      event({ kind = 'NodeLost', node = id, by = by, text = 'node ' .. id .. ' was silent for its whole lease' })
      retire(id, nil, job.uid)
    end
  end
end

-- The nodes that may still run workers once the generation is superseded or ended: node to text. And one of them that
-- no step has left among them, or nil: it has no record, and none was removed.
local function next_holders(job, lost)
  local found, out, unknown = entries(job, 'holder'), {}, nil
  if job.generation_state == 'active' then
    for node, member in pairs(entries(job, 'member')) do
      found[node] = member
    end
  end
  for _, node in ipairs(lost) do
    found[node] = nil
  end
  for id, holder in pairs(found) do
    local node, ended = node_brief(id), nil
    if node then
      ended = (node.life ~= parsed(holder).life or node.lost == '1' or node.left == '1') and as_written(id)
    else
      ended = buried('node:' .. id)
      unknown = not ended and (not unknown or id < unknown) and id or unknown
    end
    if not ended then
      out[id] = holder
    end
  end
  return out, unknown
end

-- Somebody removed the node's record, or wrote a node that there is not into the job's: nobody would ever let go. A node
-- that no agent gives back is gone.
local function damaged_holder(job, id)
  if not redis.call('ZSCORE', CHANGES, 'node:' .. id) then
    bury('node:' .. id)
  end
  return damaged('node:' .. id, 'job:' .. job.uid)
end

local FAILURES = { failed = true, lost = true, fenced = true, refused = true }

-- Keeps the reports of an active generation, and the members that must answer before its fault (spend entry or nil) is
-- judged: one that counts, or that a newcomer is taken for, since a lost node may have been the cause. A later entry that
-- does not count is the judgement.
local function close_generation(job, entry)
  local spent = entry and cjson.decode(entry) or {}
  local counts = spent.counts or spent.kind == 'join_failed'
  if job.generation_state ~= 'active' then
    if entry and not counts then
      put_entries(job, 'silent', {})
    end
    return
  end
  put_entries(job, 'last', entries(job, 'report'))
  job.last_number = job.generation_number
  local silent = {}
  for node, member in pairs(counts and decoded(entries(job, 'member')) or {}) do
    if not FAILURES[string.match(job['report:' .. node] or '', '^%d+ (%a+) ')] then
      silent[node] = cjson.encode(member.life)
    end
  end
  put_entries(job, 'silent', silent)
end

local function spend(job, entry)
  local BUDGET_KEPT = 64
  if not entry or not job.active_number then
    return
  end
  job['spend:' .. job.active_number] = entry
  -- Entries that do not count go first: no counted entry may be forgotten in favour of a mere note.
  local notes, counted = {}, {}
  for number, text in pairs(entries(job, 'spend')) do
    local into = cjson.decode(text).counts and counted or notes
    into[#into + 1] = tonumber(number)
  end
  table.sort(notes)
  table.sort(counted)
  local surplus = #notes + #counted - BUDGET_KEPT
  for i = 1, math.min(surplus, #notes) do
    job['spend:' .. int(notes[i])] = nil
  end
  for i = 1, surplus - #notes do
    job['spend:' .. int(counted[i])] = nil
  end
end

-- What a proposal and an ending do to the generation before: declare its lost nodes, count what its fault cost, keep
-- its budget entry and its reports. idle: the job has no active generation from now on. Returns the nodes that the
-- generation named (set).
local function leave_generation(job, idle)
  declare_lost(job, A.lost, A.by)
  count_fault(job, A.spend, not A.planned and not A.steps_saved, A.lost)
  if idle then
    count_idle(job)
  end
  local before = named(job)
  job.setbacks = A.setbacks or job.setbacks
  spend(job, A.spend)
  close_generation(job, A.spend)
  return before
end

-- Stores a report under its order of arrival ("seq state body"); true if it is the node's first fault.
-- The first few faults keep all that their workers wrote last (body), later ones less of it (brief?): any number of
-- nodes may fail, and one record holds all their texts.
local function put_report(job, counts, kind, node, state, body, brief)
  local WHOLE_TEXTS = 16
  local seq = tonumber(string.match(job[kind .. ':' .. node] or '0', '^%d+'))
  local first = seq == 0 and FAILURES[state] or false
  if first then
    counts[kind] = counts[kind] + 1
    seq = counts[kind]
  end
  job[kind .. ':' .. node] = int(seq) .. ' ' .. state .. ' ' .. (seq > WHOLE_TEXTS and brief or body)
  return first
end

-- No member has acknowledged this generation yet. The addresses of its members' agents are kept: mostly they stay the
-- same.
local function begin_acks(job)
  local lives, members = {}, entries(job, 'member')
  for node, text in pairs(members) do
    lives[node] = cjson.encode(parsed(text).life)
  end
  put_entries(job, 'missing', lives)
  for node in pairs(entries(job, 'host')) do
    job['host:' .. node] = members[node] and job['host:' .. node]
  end
  put_entries(job, 'ports', {})
  job.generation_address, job.generation_store_hosted, job.generation_seal, job.generation_released = '', '0', '', '0'
  job.generation_stopped, job.generation_ready = '0', '0'
end

-- Returns why this forming generation cannot become active, or nil.
local function not_ready(job)
  local holder = sorted_keys(entries(job, 'holder'))[1]
  if holder then
    return 'node ' .. holder .. ' may still run an older generation'
  end
  local missing = sorted_keys(entries(job, 'missing'))[1]
  if missing then
    return 'node ' .. missing .. ' has not acknowledged'
  end
  local members = decoded(entries(job, 'member'))
  for _, node in ipairs(sorted_keys(members)) do
    if not_live(node, members[node].life) then
      return 'node ' .. node .. ' is not live'
    end
  end
  local failsafe_members = sorted_keys(entries(job, 'failsafe_member'))
  if #failsafe_members > 0 and job.generation_released ~= '1' then
    return 'no failsafe member of generation ' .. job.active_number .. ' (' .. table.concat(failsafe_members, ', ')
      .. ') has let go'
  end
end

-- freed: a node of the previous generation has given devices back, which other jobs may take.
local function make_active(job, freed)
  local count = #sorted_keys(entries(job, 'member'))
  job.generation_state, job.generation_since, job.generation_deadline = 'active', int(served), '0'
  job.active_number, job.active_id = job.generation_number, job.generation_id
  put_entries(job, 'failsafe_member', entries(job, 'generation_failsafe_member'))
  count_active(job)
  if job.first_active then
    job.restarts = int(tonumber(job.restarts) + 1)
    add_on(job, math.floor((now - 1) / USE_DAY), { restarts = 1 })
  else
    job.first_active = int(served)
    job.started = string.format('%.0f.%03.0f', math.floor(now / 1000), now % 1000)
  end
  job.running_since = job.running_since or int(served)
  local text = 'generation ' .. job.generation_number .. ' runs on ' .. int(count) .. ' node'
    .. (count > 1 and 's' or '')
  enter_phase(job, 'running', text)
  counts_of[job.uid] = nil -- who has to report success is counted anew
  job_save(job, true)
  event({ kind = 'GenerationActive', job = job, generation = job.generation_number, text = text, everybody = freed,
    alone = true })
end
