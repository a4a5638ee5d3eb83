-- How a member's acknowledgement is taken: by the usual case of the step, and by the whole of it.

-- The sum of this signature (hex) and of the earlier ones, in parts of 32 bits, so that the sum is exact.
local PARTS, PART_OF_SUM, PART_OF_TEXT = '%d %d %d %d %d %d %d %d', '(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+)', 8
local function sealed(sum, signature)
  local parts = { string.match(sum, PART_OF_SUM) }
  for i = 1, 8 do
    parts[i] = (parts[i] or 0) + (tonumber(string.sub(signature, 8 * i - 7, 8 * i), 16) or 0)
  end
  return string.format(PARTS, unpack(parts))
end
-- Keeps the longest of the members' times (seconds).
local function slowest(job, field, seconds)
  if seconds > tonumber(job[field]) then
    job[field] = string.format('%.4f', seconds)
  end
end

-- cjson writes a large number as 1e+15, which no agent reads as a whole one.
local function list_of_whole(numbers)
  local texts = {}
  for i = 1, #numbers do
    texts[i] = string.format('%.0f', numbers[i])
  end
  return '[' .. table.concat(texts, ',') .. ']'
end

-- Takes a member's acknowledgement. The fields that other members need are kept once for all members together, so each
-- member reads only what changed, however many members there are. An acknowledgement is taken only once, since a sum
-- does not show what it contains; and that of group rank 0 only with an address.
local function take_ack(job, member, ack)
  local leads = member.group_rank == 0
  if not job['missing:' .. member.node] or (leads and ack.address == '') then
    return false
  end
  job['missing:' .. member.node] = nil
  job['host:' .. member.node] = ack.host ~= '' and cjson.encode(ack.host) or nil
  job['ports:' .. member.node] = #ack.ports > 0 and list_of_whole(ack.ports) or nil
  job.generation_seal = sealed(job.generation_seal, ack.signature)
  slowest(job, 'generation_stopped', ack.stopped)
  slowest(job, 'generation_ready', ack.ready)
  if leads then
    job.generation_address, job.generation_store_hosted = ack.address, ack.store_hosted and '1' or '0'
  end
  return true
end
