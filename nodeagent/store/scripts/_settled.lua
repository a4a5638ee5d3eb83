-- First in every step that decides something of a job: none does while the store is recovering.
if served < recover and meta.awaited then
  local named, more = sorted_keys(words(meta.awaited)), ''
  if #named > 5 then
    more = ' and ' .. int(#named - 5) .. ' more'
  end
  return refuse('recovering', 'the store has lost what was written last, and waits for nodes that may know it: '
    .. table.concat(named, ', ', 1, math.min(5, #named)) .. more .. '; nothing is decided until they are back, or for '
    .. 'another ' .. recovering_for() .. ' s; then try again')
end
if served < recover then
  return refuse('recovering', 'the store was started anew and may lack what was written last: nothing is decided for '
    .. 'another ' .. recovering_for() .. ' s, so that every agent can say what it knows; then try again')
end
