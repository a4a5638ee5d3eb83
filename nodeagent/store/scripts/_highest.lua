-- The highest number of a generation that a name had. Needs no prelude.

-- As the steps leave it: whole, not below that of the job's record (text or nil), and not so far above it that no step
-- comes there. Who writes more would have it counted on from, to where Lua's numbers are not exact. Else nothing.
local function highest_of(prefix, name, number)
  local FURTHER = 1e9 -- a generation a second for 30 years
  local text, least = redis.call('HGET', prefix .. 'highest', name) or '0', tonumber(number or '0')
  local found = #text <= 15 and string.find(text, '^%d+$') and tonumber(text)
  return found and found >= least and found <= least + FURTHER and found or nil
end
