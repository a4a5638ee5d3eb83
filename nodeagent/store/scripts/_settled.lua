-- First in every step that decides something of a job: none does while the store is recovering.
if served < recover then
  return refuse('recovering', 'the store was started anew and may lack what was written last: nothing is decided for '
    .. 'another ' .. recovering_for() .. ' s, so that every agent can say what it knows; then try again')
end
